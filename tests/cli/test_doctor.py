"""`tiered-zero doctor`: each line says on, or off with the reason and the fix; it fails for a directory only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.inspection.insides import machine_rates
from tiered_zero.cli import doctor as module
from tiered_zero.cli.main import main
from tiered_zero.errors import TransferError
from tiered_zero.hardware import check, probe
from tiered_zero.io.engine import File, IOEngine
from tiered_zero.native import LIBRARY_DIR_VARIABLE
from tiered_zero.plan.machine import Disk, default_path, load_machine
from tiered_zero.sizes import GIB, MIB
from tiered_zero.system import BAD, GOOD, POOR, UNKNOWN

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "engine native", "engine aiofiles", "file system", "free space",
    "host memory",
    "cgroup memory", "huge pages", "processors", "update kernel", "torch", "accelerator",
    "pinned memory", "rates",
]  # fmt: skip


def examine(directory: Path, code: int = 0) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(main, ["doctor", str(directory), "--json"])
    assert (result.exit_code, result.stderr) == (code, "")
    found = json.loads(result.stdout)
    assert found["directory"] == str(directory)
    return {finding["name"]: finding for finding in found["findings"]}


@pytest.mark.usefixtures("no_leaks")
def test_every_question_is_answered_and_nothing_is_left(swap_path: Path) -> None:
    found = examine(swap_path)
    assert list(found) == NAMES and os.listdir(swap_path) == []
    assert {finding["state"] for finding in found.values()} <= {GOOD, POOR, BAD, UNKNOWN}
    assert all(finding["found"] and "\n" not in finding["found"] + finding["fix"] for finding in found.values())
    assert found["torch"]["state"] == GOOD and found["engine aiofiles"]["state"] in (GOOD, POOR)


def test_one_line_each_with_a_word_for_its_colour(swap_path: Path) -> None:
    result = CliRunner().invoke(main, ["doctor", str(swap_path)])
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and len(lines) == len(NAMES)
    for line, name in zip(lines, NAMES, strict=True):
        assert line.split()[0] in (GOOD, POOR, BAD, UNKNOWN) and line[5:].startswith(name)


def test_native_libraries_that_are_missing(swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_DIR_VARIABLE, str(tmp_path))
    found = examine(swap_path)
    for name in ("engine native", "update kernel"):
        assert found[name]["state"] == BAD and str(tmp_path) in found[name]["found"]
        assert found[name]["fix"] == f"unset {LIBRARY_DIR_VARIABLE}"


def test_a_processor_without_a_level_of_the_kernel(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "supported_levels", lambda path: [])
    found = examine(swap_path)["update kernel"]
    assert found["state"] == POOR and "torch's own operations" in found["found"] and "AVX2" in found["fix"]


def test_a_disk_without_o_direct_says_why(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = IOEngine.write

    def refuse(self: IOEngine, file: File, offset: int, data: memoryview) -> Any:
        if self.direct:
            raise TransferError("EINVAL (Invalid argument)")
        return write(self, file, offset, data)

    monkeypatch.setattr(IOEngine, "write", refuse)
    found = examine(swap_path)
    engine = found["engine aiofiles"]
    assert engine["state"] == POOR and "buffered" in engine["found"] and "EINVAL" in engine["found"] and engine["fix"]


def test_a_full_disk_says_so(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: IOEngine, file: File, offset: int, data: memoryview) -> Any:
        raise TransferError("ENOSPC (No space left on device)")

    monkeypatch.setattr(IOEngine, "write", refuse)
    found = examine(swap_path)
    assert found["engine aiofiles"]["state"] == BAD and "ENOSPC" in found["engine aiofiles"]["found"]


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_directory_that_cannot_be_used(swap_path: Path, kind: str) -> None:
    path = swap_path / kind
    if kind == "file":
        path.write_text("")
    found = examine(path, code=1)
    assert found["directory"]["state"] == BAD and str(path) in found["directory"]["found"]
    assert found["engine aiofiles"]["state"] in (GOOD, POOR), "tried elsewhere"
    assert "torch" in found and "free space" not in found


def test_a_check_that_fails_is_a_finding(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr(module, "available_cpus", fail)
    found = examine(swap_path)
    assert found["processors"]["found"] == "could not be found out: ZeroDivisionError: no such luck"
    assert "torch" in found


@pytest.mark.usefixtures("no_leaks")
def test_rates_are_measured_kept_and_shown(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a second disk, next to the first one's."""
    rates = examine(swap_path)["rates"]
    assert "are not known; measure them with `tiered-zero doctor DIR --measure`" in rates["found"]
    assert rates["state"] == UNKNOWN
    for target, name, value in (
        (module, "_DISK_S", 0.5), (check, "LIMIT_S", 0.0), (check, "_SHAPES", {True: (32, 16)}),
        (check, "_MODEL_SHAPES", {True: (32, 1, 64)}),
        (check, "_COPIED_NBYTES", MIB), (machine_rates, "_UPDATED_NUMEL", MIB),
    ):  # fmt: skip
        monkeypatch.setattr(target, name, value)
    loads = iter([0.1, 9.0 * (os.cpu_count() or 1)])
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    paths = [swap_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
        result = CliRunner().invoke(main, ["doctor", str(path), "--measure", "--json"])
        assert result.exit_code == 0 and os.listdir(path) == []
        assert ("load average of" in result.stdout) == (path is paths[1]), "of other programs only"
    machine = load_machine(default_path())
    assert json.loads(result.stdout)["machine"] == json.loads(default_path().read_text())
    assert machine.date[:2] == "20" and machine.num_cores and machine.host_nbytes
    assert machine.flops_per_s.keys() == {"bf16", "fp16", "fp32"}
    assert "fp32" in machine.block_elements_per_s and machine.logits_per_s.keys() == machine.block_elements_per_s.keys()
    assert machine.copy_bytes_per_s and machine.update_bytes_per_s and machine.to_device_bytes_per_s is None
    assert [disk.path for disk in machine.disks] == [os.path.realpath(path) for path in paths]
    assert all(disk.read_bytes_per_s and disk.write_bytes_per_s and disk.mixed_bytes_per_s for disk in machine.disks)
    shown = CliRunner().invoke(main, ["doctor", str(swap_path)]).stdout
    assert "elements of blocks: " in shown and f"disk of {paths[0]}: read " in shown and machine.date in shown
    replace(machine, name="another").save(default_path())
    assert "were measured on another with" in examine(swap_path)["rates"]["found"]


def test_free_memory_is_read_before_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the memory of a device that it has used."""
    order: list[str] = []

    def measure(accelerator: object) -> dict[str, float]:
        order.append("rates")
        return {}

    monkeypatch.setattr(probe, "available_device_nbytes", lambda device: order.append("free"))
    monkeypatch.setattr(check, "product_rates", measure)
    monkeypatch.setattr(check, "_COPIED_NBYTES", MIB)
    monkeypatch.setattr(machine_rates, "_UPDATED_NUMEL", MIB)
    assert machine_rates.measure_machine(Disk(path="disk")).device_nbytes is None and order == ["free", "rates"]


@pytest.mark.parametrize("limit", [2 * GIB, None])
def test_the_cgroup_is_named(swap_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    monkeypatch.setattr(probe, "cgroup_memory_limit_nbytes", lambda: limit)
    expected = "limited to 2.0 GiB; plans keep to it" if limit else "no limit below the machine's memory"
    assert examine(swap_path)["cgroup memory"]["found"] == expected


def test_without_torch_the_rest_is_reported(swap_path: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    command = [sys.executable, "-m", "tiered_zero", "doctor", str(swap_path), "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
    found = {finding["name"]: finding for finding in json.loads(shown.stdout)["findings"]}
    assert found["torch"]["found"] == "cannot be imported: libcudart.so is missing" and found["torch"]["fix"]
    assert found["engine aiofiles"]["state"] in (GOOD, POOR)


@pytest.mark.skipif(bool(probe.accelerator_names()), reason="this machine has an accelerator")
def test_a_machine_without_an_accelerator_has_one_line() -> None:
    result = CliRunner().invoke(main, ["doctor", "--device"])
    assert result.exit_code == 1 and len(result.stdout.splitlines()) == 1
    assert "torch finds no accelerator" in result.stdout and "fix: " in result.stdout
