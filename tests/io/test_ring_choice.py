"""Threads or io_uring: the faster one is taken, and whoever asked is told why; timed once for a file system."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.io.conftest import io_uring_refusal, takes_direct
from tests.io.test_select import works
from tiered_zero.errors import ConfigError, TransferError
from tiered_zero.io import ring_choice
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.native import NativeEngine
from tiered_zero.io.ring_choice import Rates
from tiered_zero.io.select import BUILDERS, config_of, select_engine
from tiered_zero.sizes import MIB


@pytest.fixture(autouse=True)
def _native_and_nothing_known(native_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if refusal := io_uring_refusal(native_dir):
        pytest.skip(refusal)
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(native_dir))
    monkeypatch.setattr(ring_choice, "_known", {})
    monkeypatch.setattr(ring_choice, "_PATIENCE_S", 60.0)  # whatever else keeps the disk busy


@pytest.fixture
def direct_path(swap_path: Path) -> Iterator[Path]:
    if not takes_direct(swap_path):
        pytest.skip(f"the file system of {swap_path} has no O_DIRECT; io_uring is left to those who ask for it")
    yield swap_path
    assert os.listdir(swap_path) == []


class MadeUpRates:
    """Instead of measuring: what engines of each kind do, and how often was asked."""

    def __init__(self, threads: float, ring: float) -> None:
        self.rates = {False: threads, True: ring}
        self.num_asked = 0

    def __call__(self, engine: NativeEngine, *arguments: object, **options: object) -> float:
        self.num_asked += 1
        return self.rates[engine.io_uring]


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(("ring", "state"), [(2.9e9, "off"), (3e9, "on"), (3.1e9, "on")])
def test_the_faster_one_is_taken(direct_path: Path, monkeypatch: pytest.MonkeyPatch, ring: float, state: str) -> None:
    monkeypatch.setattr(ring_choice, "measure_rate", made_up := MadeUpRates(3e9, ring))
    for _ in range(3):
        selection = select_engine(direct_path)
        assert isinstance(selection.engine, NativeEngine) and selection.engine.io_uring == (state == "on")
        assert selection.io_uring == f"{state}: it moves {ring / 2**30:.1f} GiB/s there, threads 2.8 GiB/s"
        said = f"io_uring is {selection.io_uring}" in selection.reasons
        assert said == (state == "on"), "threads are the rule: that they stay is no news"
        assert works(selection, direct_path)
    assert made_up.num_asked == (6 if state == "on" else 2)  # three rounds or the first that is lost; asked once


def test_other_settings_are_timed_anew(direct_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_choice, "measure_rate", made_up := MadeUpRates(3e9, 1e9))
    for depth in (4, 8, 4):
        select_engine(direct_path, settings=IOSettings(queue_depth=depth)).engine.close()
    assert made_up.num_asked == 4


@pytest.mark.usefixtures("no_leaks")
def test_a_real_disk_is_timed(direct_path: Path) -> None:
    selection = select_engine(direct_path)
    (rates,) = ring_choice._known.values()
    assert not rates.untimed and min(rates.threads, rates.ring) > 1e6
    assert selection.io_uring == f"{'on' if rates.ring >= rates.threads else 'off'}: {rates}"
    assert works(selection, direct_path)


def test_a_disk_that_cannot_be_timed_keeps_threads(direct_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: NativeEngine, **options: object) -> float:
        engine.latch.set(error := TransferError("read of 1 bytes failed: EIO"))
        raise error

    monkeypatch.setattr(ring_choice, "measure_rate", fail)
    selection = select_engine(direct_path)
    assert selection.io_uring == "off: it cannot be timed there: read of 1 bytes failed: EIO"
    assert works(selection, direct_path)


def test_a_slow_disk_is_not_waited_for(direct_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_choice, "_PATIENCE_S", 0.0)
    selection = select_engine(direct_path)
    assert re.fullmatch(r"off: the disk took [\d.e-]+ s to write \d+\.0 MiB: threads keep up", selection.io_uring)
    selection.engine.close()


def test_a_nearly_full_disk_is_left_alone(direct_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(direct_path)
    nearly_full = os.statvfs_result((real.f_bsize, real.f_frsize, *real[2:4], 63 * MIB // real.f_frsize, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: nearly_full)
    selection = select_engine(direct_path)
    assert selection.io_uring == "off: it cannot be timed with 63.0 MiB free there"
    selection.engine.close()


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.usefixtures("no_leaks")
def test_a_setting_decides_without_timing(swap_path: Path, wanted: bool) -> None:
    selection = select_engine(swap_path, io_uring=wanted)
    assert isinstance(selection.engine, NativeEngine) and selection.engine.io_uring == wanted
    assert selection.io_uring == f"{'on' if wanted else 'off'}: tiered_zero.io_uring is {str(wanted).lower()}"
    assert works(selection, swap_path)
    assert not ring_choice._known


def test_a_setting_that_cannot_be_met_is_an_error(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="io_uring is of the engine native, not of threads"):
        select_engine(swap_path, prefer="threads", io_uring=True)
    read = NativeEngine.read

    def damage(self: NativeEngine, file: object, offset: int, into: memoryview, **options: bool) -> object:
        ticket = read(self, file, offset, into, **options)  # type: ignore[arg-type]
        ticket.wait()
        into[-1] ^= self.io_uring
        return ticket

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "read", damage)
        with pytest.raises(ConfigError, match=r"io_uring is true, but .* read back is not what .* Leave it at auto"):
            select_engine(swap_path, io_uring=True)
        if takes_direct(swap_path):
            selection = select_engine(swap_path)
            assert selection.io_uring.startswith("off: ") and "read back is not what" in selection.io_uring
            selection.engine.close()
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="native is off"):
        select_engine(swap_path, io_uring=True)
    assert os.listdir(swap_path) == []


def test_the_slower_of_two_disks_decides() -> None:
    assert Rates(2.0, 2.0).ring_wins and not Rates(2.0, 1.9).ring_wins and not Rates(untimed="full").ring_wins


@pytest.mark.parametrize("name", list(BUILDERS))
def test_every_builder_can_be_written_into_a_config(swap_path: Path, name: str) -> None:
    config = config_of(name)
    selection = select_engine(swap_path, prefer=config["io_engine"], io_uring=config["io_uring"])
    assert selection.engine.name == config["io_engine"]
    assert getattr(selection.engine, "io_uring", False) == config["io_uring"] == (name == "io_uring")
    selection.engine.close()
