"""`tiered-zero bench io`: the choice among its settings, and the command on a real disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tiered_zero.cli import bench_io
from tiered_zero.cli.bench_io import SETTINGS
from tiered_zero.cli.main import main
from tiered_zero.config.load import load
from tiered_zero.errors import TransferError
from tiered_zero.io.select import MODES
from tiered_zero.plan.machine import default_path, load_machine
from tiered_zero.sizes import MIB

CONFIG = Path(__file__).parents[2] / "configs" / "gpt_nvme.json"


def bench(directory: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["bench", "io", str(directory), *options])


def answer(directory: Path, *options: str) -> dict[str, Any]:
    result = bench(directory, *options, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert os.listdir(directory) == []
    return report


@pytest.mark.usefixtures("no_leaks")
def test_a_real_disk_is_measured_and_left_as_it_was(swap_path: Path) -> None:
    report = answer(swap_path, "--seconds", "2")
    tried = report["tried"]
    assert {(row["block_size"], row["queue_depth"]) for row in tried} == {
        (settings.block_size, settings.queue_depth) for settings in SETTINGS
    }
    assert report["aio"].items() <= {**tried[0], "intra_op_parallelism": 1}.items()
    rates = [f"{mode}_bytes_per_s" for mode in MODES]
    assert all(row[name] > 0 for row in tried for name in rates)
    assert report["disk"].items() >= {"path": os.path.realpath(swap_path), "rated_nbytes": None}.items()
    config = load({"train_batch_size": 1, "aio": report["aio"], "tiered_zero": report["tiered_zero"]})
    assert config.aio.block_size == report["aio"]["block_size"] and not config.notices[1:]


@pytest.mark.parametrize("chosen", range(len(SETTINGS)))
def test_the_setting_with_the_best_rates_is_printed(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: int
) -> None:
    """By the product of its three rates; the first if all are equal."""
    best = SETTINGS[chosen]

    def measure(engine: Any, path: str, nbytes: int, seconds: float) -> dict[str, float]:
        is_best = chosen and engine.settings == best
        return {"read": 4e9, "write": 0.5e9, "mixed": 1e9} if is_best else dict.fromkeys(MODES, 1e9)

    monkeypatch.setattr(bench_io, "measure_modes", measure)
    result = bench(swap_path, "--seconds", "1")
    assert result.exit_code == 0 and "Measuring " in result.stderr
    aio = {"block_size": best.block_size, "queue_depth": best.queue_depth, "intra_op_parallelism": 1}
    assert json.dumps({"aio": aio}, indent=2) in result.stdout
    (disk,) = load_machine(default_path()).disks
    assert (disk.path, disk.read_bytes_per_s) == (os.path.realpath(swap_path), 1e9), "by the default settings"


def leave_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=nbytes))


def test_a_nearly_full_disk_is_measured_on_what_is_left(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(monkeypatch, 11 * MIB)
    report = answer(swap_path, "--seconds", "1")
    assert report["file_nbytes"] == 8 * MIB
    assert any("the file has 8.0 MiB" in note and "11.0 MiB are free" in note for note in report["notes"])


def test_a_full_disk_is_one_clear_error(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(monkeypatch, MIB)
    result = bench(swap_path, "--seconds", "1", "--json")
    assert (result.exit_code, result.stdout) == (1, "") and "1.0 MiB are free" in result.stderr
    assert os.listdir(swap_path) == []


def test_a_failed_transfer_leaves_nothing(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise TransferError("write of 1 bytes failed: EIO")

    monkeypatch.setattr(bench_io, "measure_modes", fail)
    result = bench(swap_path, "--seconds", "1")
    assert result.exit_code == 1 and "EIO" in result.stderr and "Traceback" not in result.stderr
    assert os.listdir(swap_path) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGTERM, "bench io DIR --seconds 30"),
        (signal.SIGINT, "bench io DIR"),
        (signal.SIGINT, "doctor DIR --measure"),
    ],
)
def test_a_signal_leaves_nothing(swap_path: Path, number: signal.Signals, words: str) -> None:
    options = [str(swap_path) if word == "DIR" else word for word in words.split()]
    command = [sys.executable, "-m", "tiered_zero", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=CONFIG.parents[1]) as process:
        deadline_s = time.monotonic() + 300
        while not list(swap_path.glob("*/bench.bin")) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert os.listdir(swap_path) == [] and not default_path().exists()
