"""A pager over units of whole pages, on a tier of log entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from tests.fakes.slow_tier import SlowTier
from tests.support.inspection import held_nbytes
from tests.support.inspection.insides import (
    Home,
    Inventory,
    OffloadedParameter,
    OffloadedParams,
    Pager,
    UnitState,
    as_bytes,
)
from tests.support.tier_rig import make_runtime
from tests.support.units import flat_of, make_params, make_unit
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.planner import PagerLimits

N = 2048
FREE = 1 << 30


class World:
    """A pager over units of `sizes` pages of fp32, each at home on a slow tier; `resident` ones on the device. Stands
    for the engine's TrainStep; `calls`: which of its events came."""

    def __init__(
        self,
        sizes: Sequence[int],
        live: int = FREE,
        prefetch: int = 0,
        reuse: int = 0,
        resident: Sequence[int] = (),
        frozen: Sequence[int] = (),
    ) -> None:
        self.tier = SlowTier()
        self.runtime = make_runtime(seed=None)
        self.inventory = Inventory()
        self.changed: list[int] = []
        offloaded_params = OffloadedParams(
            self.inventory, None, self.runtime, lambda unit, flat, old: self.changed.append(unit.index)
        )
        live_nbytes = live * N * 4 if live < FREE else FREE
        limits = PagerLimits(live_nbytes=live_nbytes, prefetch_numel=prefetch * N, reuse_numel=reuse * N)
        self.pager = Pager(self.runtime, self.inventory, offloaded_params, limits)
        self.calls: list[str] = []
        self.units: list[Unit] = []
        self.params: list[list[nn.Parameter]] = []
        self.values: list[torch.Tensor] = []
        for index, size in enumerate(sizes):
            unit = make_unit(
                index, [size * N - 500, 372], trainable=index not in frozen
            )  # 128 bytes of padding, at most
            params = make_params(unit)
            assert unit.numel == size * N
            flat = flat_of(unit, params)
            if index not in resident:
                home = Home(self.tier, self.tier.reserve(f"u{index}", unit.nbytes, "param"))
                self.inventory.place(unit, "param", home)
                self.tier.contents[f"u{index}"].copy_(as_bytes(flat))
            self.pager.adopt(unit, params, self)
            if index in resident:
                self.pager.store(unit, flat)
            self.units.append(unit)
            self.params.append(params)
            self.values.append(flat)

    def notice_backward(self) -> None:
        """No test runs a backward."""

    def before_use(self, unit: Unit, pass_name: str) -> None:
        """No test reduces."""

    def before_weights_read(self) -> None:
        self.calls.append("read")

    def before_weights_write(self) -> None:
        self.calls.append("write")

    def state(self, index: int) -> UnitState:
        return self.pager.units.by_param[self.params[index][0]].state

    def check_in_use(self, index: int) -> None:
        unit = self.units[index]
        for entry, param in zip(unit.entries, self.params[index], strict=True):
            assert not isinstance(param, OffloadedParameter)
            assert torch.equal(param.detach(), self.values[index][entry.start : entry.stop])

    def check_guarded(self, index: int) -> None:
        assert all(isinstance(param, OffloadedParameter) for param in self.params[index])

    @contextmanager
    def frame(self, units: Sequence[Unit] = ()) -> Iterator[None]:
        """A module that owns `units`."""
        self.pager.enter_frame(units)
        try:
            yield
        finally:
            self.pager.exit_frame()

    def use(self, *indices: int) -> None:
        """One module each, one after another."""
        for index in indices:
            with self.frame([self.units[index]]):
                self.check_in_use(index)

    def fetches(self) -> list[int]:
        return [int(name[1:]) for what, name in self.tier.log if what == "fetch"]

    @property
    def live_pages(self) -> int:
        return held_nbytes(self.runtime.ledger, "device") // (N * 4)

    @property
    def peak_pages(self) -> int:
        return self.runtime.ledger.peaks().get("device", 0) // (N * 4)
