"""Under seeded delays of every kernel and copy, each placement has the bits of plain PyTorch on the CPU."""

from pathlib import Path

import pytest

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.lagging.training import courses, differences_of
from tests.support.trainers import PLACEMENTS


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
@on_device
def test_delays_change_no_bit(device: LaggingDevice, placement: tuple[str, str], precision: str, swap_path: Path):
    """What one placement's two courses leave out, the next ones' have, and 16 bit's where fp32's have not."""
    wrong, index = {}, PLACEMENTS.index(placement)
    half = (index + (precision == "bf16")) % 2
    chosen = courses(placement, precision, half)[index // 2 % 2 :: 2]
    for seed, course in enumerate(chosen, start=8 * index):
        device.set(delay_seed=seed)
        if found := differences_of(course, swap_path):
            wrong[seed, course] = found
    assert not wrong, wrong
    assert device.take_counts().get("unpinned_under_a_copy", 0) == 0 == device.pinned_nbytes()
