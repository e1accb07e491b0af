"""`tiered-zero demo`: what dies, what trains, equal losses, refusals, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from tiered_zero.cli import demo
from tiered_zero.cli.main import main
from tiered_zero.hardware import probe
from tiered_zero.sizes import GIB, MIB

SMALL = ("--params", "100M")


def test_plain_pytorch_dies_and_the_losses_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 60 blocks of 0.8M parameters, and memory for half of what plain PyTorch takes."""
    monkeypatch.setattr(demo, "HIDDEN", 256)
    monkeypatch.setattr(demo, "HOST_NBYTES", 0)
    for name, nbytes in (("DEVICE", 32 * MIB), ("LEAST_HOST", 128 * MIB), ("SPARE", 160 * MIB)):
        monkeypatch.setattr(demo, f"{name}_NBYTES", nbytes)
    result = CliRunner().invoke(main, ["demo", str(tmp_path), "--params", "750M"])
    assert result.exit_code == 0, result.output
    first, second, third = result.output.split("\n\n")[1:4]
    assert "out of memory" in first and "step 3" not in first
    assert second.count("loss") == third.count("loss") == 3
    assert "The 3 losses are equal in every bit." in result.output
    assert len(result.output.splitlines()) < 24 and list(tmp_path.iterdir()) == []


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The forms that would be trained; the first runs out of memory."""
    forms: list[Any] = []

    def train(form: Any) -> tuple[list[float], str]:
        forms.append(form)
        return [1.0] if form.directory is None else [2.0], "no memory" if len(forms) == 1 else ""

    monkeypatch.setattr(demo, "_train", train)
    return forms


def test_other_losses_are_an_error(trained: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "available_host_nbytes", lambda: 64 * GIB)
    result = CliRunner().invoke(main, ["demo", str(tmp_path), *SMALL])
    assert result.exit_code == 1 and "expected to be equal in every bit; found [2.0] here, [1.0]" in result.output


def test_without_memory_for_plain_pytorch_it_says_so(
    trained: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "available_host_nbytes", lambda: 8 * GIB)
    result = CliRunner().invoke(main, ["demo", str(tmp_path)])
    assert result.exit_code == 0 and "Not compared: plain PyTorch takes about 11.6 GiB" in result.output
    assert [form.directory is None for form in trained] == [True, False]


def test_it_refuses_a_small_disk_and_little_memory(
    trained: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "available_host_nbytes", lambda: GIB)
    result = CliRunner().invoke(main, ["demo", str(tmp_path)])
    assert result.exit_code == 1 and "1.0 GiB are free. Close other programs" in result.output
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB))
    result = CliRunner().invoke(main, ["demo", str(tmp_path)])
    assert result.exit_code == 1 and "writes 14.1 GiB there, and 1.0 GiB are free" in result.output
    assert CliRunner().invoke(main, ["demo", str(tmp_path), "--params", "1M"]).exit_code == 2
    assert trained == []


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(form: Any) -> tuple[list[float], str]:
        if form.directory is None:
            return [], "no memory"
        Path(form.directory, "swap").write_bytes(b"x")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_train", interrupt)
    assert CliRunner().invoke(main, ["demo", str(tmp_path), *SMALL]).exit_code == 130
    assert list(tmp_path.iterdir()) == []
