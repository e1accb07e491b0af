"""`tiered-zero bench io`: the search on disks that are made up, and the command on a real one."""

from __future__ import annotations

import itertools
import json
import os
import random
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
from hypothesis import given
from hypothesis import strategies as st

from tiered_zero.cli import bench_io
from tiered_zero.cli.bench_io import BLOCKS, DEPTHS, Search, Setting, find_best
from tiered_zero.cli.main import main
from tiered_zero.config import load
from tiered_zero.errors import TransferError
from tiered_zero.io.measure import MODES
from tiered_zero.io.select import ENGINES
from tiered_zero.sizes import MIB

CONFIG = Path(__file__).parents[2] / "configs" / "gpt_nvme.json"


class MadeUpDisk:
    """A clock, and rates that saturate in bytes on their way, each mode and engine in its own manner.

    `wander`: relative error of a measurement of 0.1 s; longer ones err less.
    """

    def __init__(self, seed: int, wander: float) -> None:
        draw = random.Random(seed)
        self.now_s = draw.uniform(0, 1000)
        self._wander = wander
        self._noise = random.Random(seed + 1)
        self._knee = {mode: draw.uniform(1, 40) * MIB for mode in MODES}
        self._call_nbytes = {name: draw.uniform(0.01, 0.5) * MIB for name in ENGINES}
        self._crowd = {name: draw.uniform(0, 0.02) for name in ENGINES}
        self._top = {(name, mode): draw.uniform(0.3, 1.0) * 5e9 for name in ENGINES for mode in MODES}
        self.num_measured = 0
        self.longest_s = 0.0

    def true_rate(self, setting: Setting, mode: str) -> float:
        on_their_way = setting.block_nbytes * setting.depth
        calls = setting.block_nbytes / (setting.block_nbytes + self._call_nbytes[setting.engine])
        crowd = 1 / (1 + self._crowd[setting.engine] * setting.depth)
        return self._top[setting.engine, mode] * calls * crowd * on_their_way / (on_their_way + self._knee[mode])

    def measure(self, setting: Setting, mode: str, seconds: float) -> float:
        took_s = max(seconds, 0.05) + 0.03
        self.now_s += took_s
        self.num_measured += 1
        self.longest_s = max(self.longest_s, took_s)
        error = self._wander * min(1.0, (0.1 / took_s) ** 0.5)
        return self.true_rate(setting, mode) * self._noise.uniform(1 - error, 1 + error)

    def search(self, seconds: float = 55.0) -> Search:
        return find_best([*ENGINES], self.measure, seconds, clock=lambda: self.now_s)

    def score(self, setting: Setting) -> float:
        rates = {mode: self.true_rate(setting, mode) for mode in MODES}
        return Search(rates={setting: rates}).score(setting)

    @property
    def best_score(self) -> float:
        return max(self.score(Setting(*point)) for point in itertools.product(ENGINES, BLOCKS, DEPTHS))


@given(seed=st.integers(0, 1 << 30), wander=st.sampled_from([0.0, 0.05, 0.15]))
def test_the_choice_reaches_nine_tenths_of_the_full_grid(seed: int, wander: float) -> None:
    disk = MadeUpDisk(seed, wander)
    search = disk.search()
    assert disk.score(search.ranking[0]) >= 0.9 * disk.best_score
    assert len(search.rates) == search.num_settings == len(BLOCKS) * len(DEPTHS) * len(ENGINES)
    assert len(search.ranking) == len(set(search.ranking)) == len(search.rates)


@given(seed=st.integers(0, 1 << 30), seconds=st.floats(0.5, 60))
def test_it_ends_in_time(seed: int, seconds: float) -> None:
    disk = MadeUpDisk(seed, 0.1)
    begun_s = disk.now_s
    search = disk.search(seconds)
    overrun_s = disk.now_s - begun_s - seconds
    assert search.ranking and overrun_s <= len(MODES) * disk.longest_s
    assert search.ranking[0] in search.rates


def bench(directory: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["bench", "io", str(directory), *options])


def answer(directory: Path, *options: str) -> dict[str, Any]:
    result = bench(directory, *options, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert os.listdir(directory) == []
    return report


@pytest.mark.usefixtures("no_leaks")
def test_a_real_disk_is_measured_in_time_and_left_as_it_was(swap_path: Path) -> None:
    report = answer(swap_path, "--seconds", "3", "--model", "gpt:layers=2,hidden=128")
    assert any("time was short" in note for note in report["notes"]) == (len(report["tried"]) < report["num_settings"])
    assert report["best"]["read_bytes_per_s"] > 0 and report["best"]["write_bytes_per_s"] > 0
    best, tried = report["aio"], report["tried"][0]
    assert (best["block_size"], best["queue_depth"]) == (tried["block_size"], tried["queue_depth"])
    floor = report["floor"]
    assert floor["read_nbytes"] > floor["written_nbytes"] > 0
    assert floor["seconds_per_step"] >= floor["read_nbytes"] / report["best"]["read_bytes_per_s"]
    assert floor["seconds_per_step"] >= floor["written_nbytes"] / report["best"]["write_bytes_per_s"]
    block = {"train_batch_size": 1, "aio": report["aio"], "tiered_zero": report["tiered_zero"]}
    config = load(block)
    assert config.aio.block_size == best["block_size"] and not config.notices[1:]


def test_the_floor_follows_the_config(swap_path: Path) -> None:
    model = ("--seconds", "1", "--model", "gpt:layers=2,hidden=128")
    everything, given_config = (answer(swap_path, *model, *more) for more in ((), ("--config", str(CONFIG))))
    assert given_config["floor"]["read_nbytes"] < everything["floor"]["read_nbytes"]  # small parameters stay
    result = bench(swap_path, "--config", str(CONFIG))
    assert result.exit_code == 2 and "--config goes with --model" in result.stderr


@pytest.mark.parametrize("is_choice", [True, False])
def test_words(swap_path: Path, monkeypatch: pytest.MonkeyPatch, is_choice: bool) -> None:
    """Settings are given for the config where enough were tried, else it is said why not."""
    monkeypatch.setattr(bench_io, "CHOICE_SHARE", 0.0 if is_choice else 2.0)
    result = bench(swap_path, "--seconds", "1", "--model", "gpt:")
    assert result.exit_code == 0, result.output
    for words in ("For the config:", "Floor: ", "s per step"):
        assert words in result.stdout
    for words in ('"block_size":', '"queue_depth":'):
        assert (words in result.stdout) == is_choice
    assert ("nothing. Too few settings were tried" in result.stdout) != is_choice
    assert "Measuring " in result.stderr


def leave_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=nbytes))


def test_a_nearly_full_disk_is_measured_on_what_is_left(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(monkeypatch, 11 * MIB)
    report = answer(swap_path, "--seconds", "4")
    assert report["file_nbytes"] == 8 * MIB
    assert any("only 11.0 MiB are free: the file has 8.0 MiB" in note for note in report["notes"])


def test_a_full_disk_is_one_clear_error(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(monkeypatch, MIB)
    result = bench(swap_path, "--seconds", "1", "--json")
    assert (result.exit_code, result.stdout) == (1, "") and "1.0 MiB are free" in result.stderr
    assert os.listdir(swap_path) == []


def test_a_failed_transfer_leaves_nothing(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> float:
        raise TransferError("write of 1 bytes failed: EIO")

    monkeypatch.setattr(bench_io, "measure_rate", fail)
    result = bench(swap_path, "--seconds", "1")
    assert result.exit_code == 1 and "EIO" in result.stderr and "Traceback" not in result.stderr
    assert os.listdir(swap_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(swap_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tiered_zero", "bench", "io", str(swap_path), "--seconds", "30"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=CONFIG.parents[1]) as process:
        deadline_s = time.monotonic() + 300
        while not list(swap_path.glob("*/bench.bin")) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert os.listdir(swap_path) == []
