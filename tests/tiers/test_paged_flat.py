"""Flats on NVMe: which windows they get, when they are written, and what a failure leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.fakes.sync_io import SyncEngine
from tests.support.tier_rig import Rig, open_rig
from tiered_zero.errors import EngineFailedError, TransferError
from tiered_zero.tiers.nvme import NvmeTier
from tiered_zero.tiers.step_gradients import FlatWindows, PagedFlat
from tiered_zero.tiers.tier import Home

NUMEL = 2048
"""A page of 16 bit."""


class World:
    def __init__(self, rig: Rig, num_flats: int, writes_ahead: bool) -> None:
        assert isinstance(rig.tier, NvmeTier)
        self.tier, self.buffers = rig.tier, rig.staging
        self.windows = FlatWindows(rig.staging, rig.runtime.recorder, writes_ahead=writes_ahead)
        self.flats = []
        for index in range(num_flats):
            slot = rig.tier.reserve(f"gradient/{index}", 2 * NUMEL, "gradient")
            padding = (slice(NUMEL - 8, NUMEL),)
            self.flats.append(PagedFlat(Home(rig.tier, slot), self.windows, torch.bfloat16, NUMEL, padding=padding))

    def fill(self, index: int, value: float) -> None:
        with self.windows.open(self.flats[index], "reduce") as flat:
            flat[: NUMEL - 8] = value

    def read(self, index: int) -> torch.Tensor | None:
        """By way of a buffer, as the update does."""
        raw = torch.zeros(2 * NUMEL, dtype=torch.uint8)
        done = self.windows.read(self.flats[index], 0, raw)
        if done is None:
            return None
        done.wait()
        return raw.view(torch.bfloat16)

    def written(self) -> int:
        return self.tier.store.nbytes("write").get("gradient", 0) // (2 * NUMEL)


@contextmanager
def world(
    path: Path, num_flats: int = 4, num_windows: int = 2, writes_ahead: bool = False, engine: SyncEngine | None = None
) -> Iterator[World]:
    with open_rig("nvme", path, num_buffers=num_windows, engine=engine) as rig:
        yield (own := World(rig, num_flats, writes_ahead))
        for flat in own.flats:
            own.windows.drop(flat)


def test_the_oldest_window_is_written_and_read_back(swap_path: Path) -> None:
    with world(swap_path) as own:
        for index in range(4):
            own.fill(index, index + 1)
        assert own.written() == 2, "the last two are in their windows"
        for index in range(4):
            values = own.read(index)
            assert values is not None
            assert (values[: NUMEL - 8] == index + 1).all() and not values[NUMEL - 8 :].any()
        with own.windows.open(own.flats[0], "reduce") as flat:
            assert (flat[: NUMEL - 8] == 1).all(), "as it was written"
            flat.add_(1)
        assert own.written() == 3
        own.fill(1, 7)
        own.fill(2, 7)
        assert own.read(0)[0] == 2, "what was added is written again"  # type: ignore[index]


def test_what_is_dropped_is_not_written_and_holds_nothing(swap_path: Path) -> None:
    with world(swap_path) as own:
        own.fill(0, 1)
        own.fill(1, 1)
        own.windows.drop(own.flats[0])
        assert own.read(0) is None and own.buffers.num_free == 1
        own.fill(2, 1)
        assert own.written() == 0
        after = own.flats[1].next()
        assert after is not own.flats[1] and after.next() is after, "it was not opened"
        own.flats[1] = after
        own.fill(1, 3)
        assert own.read(1)[0] == 3 and own.buffers.num_free == 0  # type: ignore[index]


def test_a_kept_window_is_waited_for(swap_path: Path) -> None:
    with world(swap_path) as own:
        own.fill(0, 1)
        own.fill(1, 1)
        own.windows.keep(own.flats[1])
        thread = threading.Thread(target=own.fill, args=(2, 1))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        own.windows.drop(own.flats[1])
        thread.join()
        assert own.written() == 0 and own.read(2) is not None


def test_what_is_kept_for_an_update_that_waits_itself_is_written(swap_path: Path) -> None:
    with world(swap_path) as own:
        for index in range(2):
            own.fill(index, index + 1)
            own.windows.keep(own.flats[index])
        thread = threading.Thread(target=own.fill, args=(2, 3))
        thread.start()
        with own.windows.awaited():
            thread.join(60)
            assert not thread.is_alive()
        assert own.written() == 1 and own.flats[1].lease is not None
        assert [own.read(index)[0].item() for index in range(3)] == [1, 2, 3]  # type: ignore[index]


def test_the_next_write_begins_as_the_last_window_is_taken(swap_path: Path) -> None:
    with world(swap_path, num_windows=3, writes_ahead=True) as own:
        for index in range(3):
            own.fill(index, 1)
        assert own.flats[0].writing is not None
        assert own.read(0)[0] == 1, "from the window that is written"  # type: ignore[index]
        own.windows.finish_writes()
        assert own.written() == 1 and own.buffers.num_free == 1


def test_a_failed_write_leaves_the_window_and_raises_once_more(swap_path: Path) -> None:
    def refuse(kind: str, number: int) -> None:
        if kind == "write":
            raise OSError(5, "planted")

    with world(swap_path, engine=SyncEngine(held=[], before=refuse)) as own:
        own.fill(0, 1)
        own.fill(1, 1)
        with pytest.raises(TransferError):
            own.fill(2, 1)
        assert own.read(0)[0] == 1  # type: ignore[index]
        with pytest.raises(EngineFailedError):
            own.fill(3, 1)
        for flat in own.flats:
            own.windows.drop(flat)
        assert own.buffers.num_free == 2
