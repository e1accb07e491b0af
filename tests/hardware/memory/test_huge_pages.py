"""Memory that changes places: what is in it, what stays of it, and what it costs."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import psutil
import pytest
import torch

from tiered_zero.hardware.device.accelerator import CpuAccelerator
from tiered_zero.hardware.memory import huge_pages
from tiered_zero.hardware.memory.huge_pages import HugePagePool, PageRange
from tiered_zero.sizes import HUGE_PAGE_NBYTES, MIB, PAGE_NBYTES

SIZES = (1, PAGE_NBYTES, HUGE_PAGE_NBYTES - 1, HUGE_PAGE_NBYTES, 2 * HUGE_PAGE_NBYTES + 5, 9 * MIB)


def resident_nbytes() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_place_holds_what_is_written_until_it_is_emptied(nbytes: int) -> None:
    pool = HugePagePool(16 * MIB)
    place, other = PageRange(pool, nbytes), PageRange(pool, nbytes)
    assert place.tensor.numel() == nbytes and place.tensor.data_ptr() % PAGE_NBYTES == 0
    assert place.pages.nbytes % PAGE_NBYTES == 0 and place.pages.nbytes >= nbytes
    for value in (1, 2, 3):
        for one in (place, other):
            one.fill()
            one.tensor.fill_(value + (one is other))
        assert place.tensor.eq(value).all() and other.tensor.eq(value + 1).all()
        assert place.pages[:nbytes].eq(value).all()
        place.empty()
        assert other.tensor.eq(value + 1).all()
        other.empty()


def test_places_of_all_sizes_share_the_same_memory() -> None:
    """Four times as much as the pool holds is used in turn; what is resident stays within the pool."""
    pool = HugePagePool(32 * MIB)
    places = [PageRange(pool, nbytes * MIB) for nbytes in (30, 10, 14, 6, 24, 4, 2, 30)]
    gc.collect()
    before = resident_nbytes()
    for _ in range(3):
        for place in places:
            place.fill()
            place.tensor.fill_(1)
            assert resident_nbytes() - before < 48 * MIB
            place.empty()
    kept = resident_nbytes() - before
    assert kept < 48 * MIB


def test_more_than_the_pool_holds_is_mapped_and_freed_again() -> None:
    pool = HugePagePool(8 * MIB)
    places = [PageRange(pool, 8 * MIB) for _ in range(4)]
    before = resident_nbytes()
    for number, place in enumerate(places):
        place.fill()
        place.tensor.fill_(number)
    # a sample: what malloc keeps of larger temporaries would count below
    assert all(place.tensor[::PAGE_NBYTES].eq(number).all() for number, place in enumerate(places))
    for place in places:
        place.empty()
    assert resident_nbytes() - before < 20 * MIB


def test_memory_is_moved_not_cleared() -> None:
    """The bytes of the unit that had the pages before are still in them."""
    pool = HugePagePool(HUGE_PAGE_NBYTES)
    first, second = PageRange(pool, HUGE_PAGE_NBYTES), PageRange(pool, HUGE_PAGE_NBYTES)
    first.fill()
    first.tensor.fill_(7)
    first.empty()
    second.fill()
    assert second.tensor.eq(7).all()


def test_a_store_that_begins_inside_of_a_huge_page_stays_within_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system puts a mapping depends on its version: what lies behind this one is not ours."""
    around = mmap.mmap(-1, 8 * HUGE_PAGE_NBYTES)
    start = -huge_pages._address(around) % HUGE_PAGE_NBYTES + PAGE_NBYTES
    ends: list[int] = []

    def inside(nbytes: int, flags: int) -> memoryview:
        ends.append(start + nbytes)
        around[start + nbytes :] = b"\x5a" * (len(around) - start - nbytes)
        return memoryview(around)[start : start + nbytes]

    monkeypatch.setattr(huge_pages, "map_memory", inside)
    HugePagePool(HUGE_PAGE_NBYTES)
    assert around[ends[0] :].count(b"\x5a") == len(around) - ends[0]


def test_pages_that_are_kept_make_room_for_units_that_are_smaller_than_a_page() -> None:
    pool = HugePagePool(32 * MIB)
    large = PageRange(pool, 32 * MIB)
    small = [PageRange(pool, HUGE_PAGE_NBYTES - PAGE_NBYTES) for _ in range(16)]
    before = resident_nbytes()
    for places in ([large], small, [large]):
        for place in places:
            place.fill()
            place.tensor.fill_(1)
            assert resident_nbytes() - before < 48 * MIB
        for place in places:
            place.empty()


def test_a_closed_accelerator_keeps_no_pages_for_places_that_are_still_held() -> None:
    accelerator = CpuAccelerator()
    places = [place for _ in range(2) if (place := accelerator.reserve_place(16 * MIB, 32 * MIB)) is not None]
    before = resident_nbytes()
    for place in places:
        place.fill()
        place.tensor.fill_(1)
    places[0].empty()
    accelerator.close()
    places[1].empty()
    assert len(places) == 2 and resident_nbytes() - before < 16 * MIB
    accelerator.close()


def test_views_keep_their_memory_when_the_pool_is_gone() -> None:
    pool = HugePagePool(8 * MIB)
    place = PageRange(pool, 8 * MIB)
    place.fill()
    view = place.tensor[5:].fill_(9)
    del pool, place
    gc.collect()
    assert view.eq(9).all()


def test_where_pages_cannot_be_moved_malloc_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    accelerator = CpuAccelerator()
    with monkeypatch.context() as patched:
        patched.setattr(HugePagePool, "_move", refused)
        assert accelerator.reserve_place(4 * MIB, 8 * MIB) is None
    place = accelerator.reserve_place(4 * MIB, 8 * MIB)
    assert place is not None
    pages = accelerator.host_pages(place.tensor)
    assert pages is not None and pages.data_ptr() == place.tensor.data_ptr() and pages.nbytes == place.pages.nbytes
    assert accelerator.host_pages(torch.zeros(5)) is None
    accelerator.close()
    assert accelerator.host_pages(place.tensor) is None


def test_a_file_is_read_into_a_place_without_a_copy(swap_path: Path) -> None:
    place = PageRange(HugePagePool(4 * MIB), 4 * MIB)
    place.fill()
    (swap_path / "file").write_bytes(bytes(range(256)) * (4 * MIB // 256))
    with open(swap_path / "file", "rb", buffering=0) as file:
        assert file.readinto(place.pages.numpy()) == 4 * MIB
    assert torch.equal(place.tensor[:256], torch.arange(256, dtype=torch.uint8))


def test_pages_of_a_part_are_found_in_its_place() -> None:
    """A rank's shard is read in place too: it begins inside of its unit's flat."""
    accelerator = CpuAccelerator()
    places = [accelerator.reserve_place(nbytes, 8 * MIB) for nbytes in (4 * PAGE_NBYTES, 2 * PAGE_NBYTES)]
    for place in places:
        assert place is not None
        place.fill()
        flat = place.tensor.view(torch.float32)
        part = flat[PAGE_NBYTES // 4 :]
        pages = accelerator.host_pages(part)
        assert pages is not None and pages.nbytes == part.nbytes
        pages[:4].view(torch.float32).fill_(1)
        assert part[0] == 1 == flat[PAGE_NBYTES // 4]
        assert accelerator.host_pages(flat[1:]) is None, "not at a page"
        alias = accelerator.alias(flat)
        assert torch.equal(alias[PAGE_NBYTES // 4 :][:1], part[:1]) and alias.shape == flat.shape
        assert alias.untyped_storage()._cdata != flat.untyped_storage()._cdata, "it counts as no view"
    accelerator.close()


def test_where_no_page_moves_any_more_the_system_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HugePagePool(8 * MIB)
    places = [PageRange(pool, 4 * MIB) for _ in range(2)]
    places[0].fill()
    places[0].tensor.fill_(1)
    places[0].empty()

    def refused(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pool.__class__, "_move", refused)
    for place in places:
        place.fill()
        place.tensor.fill_(2)
        assert place.tensor.eq(2).all()
        place.empty()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_has_no_memory_shows_nan(dtype: torch.dtype) -> None:
    pool = HugePagePool(8 * MIB)
    places = [PageRange(pool, nbytes) for nbytes in (5 * MIB + 4, HUGE_PAGE_NBYTES, 100)]

    def shows_nan(index: int) -> bool:
        return bool(places[index].tensor.view(dtype).isnan().all())

    assert all(shows_nan(index) for index in range(3)), "before they are first filled"
    for index in range(3):
        places[index].fill()
        places[index].tensor.fill_(index)
    for index in (1, 0):
        places[index].empty()
        assert shows_nan(index)
    assert bool((places[2].tensor == 2).all()), "what is full keeps its bytes"
    places[0].fill()
    places[0].tensor.fill_(7)
    assert shows_nan(1), "nothing that is written to memory reaches the pattern"
    pool.close()
    places[0].empty()
    assert shows_nan(0), "also after the pool is closed"
