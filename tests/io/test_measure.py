"""The measured rate counts what was completed, and the file keeps its size."""

from pathlib import Path

import pytest

from tests.fakes.io_faults import Fault, FaultyEngine
from tiered_zero.errors import TransferError
from tiered_zero.io.aiofile import AiofilesEngine
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.select import MODES, fill_file, measure_rate
from tiered_zero.sizes import MIB


def engine() -> FaultyEngine:
    return FaultyEngine(AiofilesEngine(direct=False, settings=IOSettings(), io_timeout_s=120.0))


@pytest.mark.parametrize("one_memory", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("no_leaks")
def test_each_mode_has_a_rate(swap_path: Path, mode: str, one_memory: bool) -> None:
    path = swap_path / "data"
    fill_file(str(path), 4 * MIB)
    before = path.read_bytes()
    counting = engine()
    rate = measure_rate(counting, str(path), 4 * MIB, mode, 0.05, one_memory=one_memory)
    reads, writes = counting.count("read"), counting.count("write")
    assert rate > 0.0 and {"read": not writes, "write": not reads, "mixed": abs(reads - writes) <= 1}[mode]
    assert rate <= (reads + writes) * MIB / 0.05
    after = path.read_bytes()
    assert len(after) == 4 * MIB and (after == before) == (mode == "read") and path.stat().st_mode & 0o777 == 0o600
    counting.close()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.75, 1.0])
def test_reads_and_writes_are_mixed_in_the_ratio_asked_for(swap_path: Path, share: float) -> None:
    path = swap_path / "data"
    fill_file(str(path), 4 * MIB)
    counting = engine()
    measure_rate(counting, str(path), 4 * MIB, "mixed", 0.05, read_share=share)
    reads, writes = counting.count("read"), counting.count("write")
    assert abs(reads - share * (reads + writes)) <= 1
    counting.close()


def test_a_file_is_filled_until_the_time_is_over(swap_path: Path) -> None:
    assert fill_file(str(swap_path / "whole"), 40 * MIB + 1) == 40 * MIB == (swap_path / "whole").stat().st_size
    assert 0 < fill_file(str(swap_path / "part"), 40 * MIB, 0.0) == (swap_path / "part").stat().st_size < 40 * MIB


def test_a_failed_transfer_counts_for_nothing(swap_path: Path) -> None:
    fill_file(str(swap_path / "data"), 4 * MIB)
    failing = engine()
    failing.add(Fault("write", 3))
    with pytest.raises(TransferError, match="EIO"):
        measure_rate(failing, str(swap_path / "data"), 4 * MIB, "write", 1.0)
    failing.close()
