"""What the pager knows, and what an interrupt leaves of it."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from tiered_zero.errors import ModelError
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.params.call_phase import CallPhase
from tiered_zero.params.copies import ParamCopies
from tiered_zero.params.driver_thread import DriverThread
from tiered_zero.params.offloaded_params import OffloadedParams
from tiered_zero.params.schedule import Schedule
from tiered_zero.params.unit_state import Frame, Residency
from tiered_zero.plan.planner import PagerLimits
from tiered_zero.tiers.inventory import Inventory


class PagerState:
    """The attributes of `Pager`, which alone changes them."""

    def __init__(
        self,
        runtime: Runtime,
        inventory: Inventory,
        keeper: OffloadedParams,
        limits: PagerLimits,
        phase: CallPhase,
    ) -> None:
        self._accelerator = runtime.accelerator
        self._ledger = runtime.ledger
        self._recorder = runtime.recorder
        self._inventory = inventory
        self.keeper = keeper
        self._limits = limits
        self._schedule = Schedule()
        self._residencies: dict[int, Residency] = {}
        self._by_param: dict[nn.Parameter, Residency] = {}
        self._by_storage: dict[int, Residency] = {}
        self._frames: list[Frame] = []
        self._ticks = itertools.count(1)
        self._live_nbytes = 0
        self._blocked: set[int] = set()
        self._refusal: ModelError | None = None
        self._told_excess = False
        self._closed = False
        self.num_uses = 0
        """Frames, loans and copies so far: whether weights were used since some moment."""
        self.driver = DriverThread()
        self._copies = ParamCopies(keeper, self.driver)
        self._fetching: Residency | None = None
        """The unit whose fetch is being started. Stays where that is interrupted: something may write to its memory."""
        self._is_moving = False  # whether memory is taken or given back; stays too
        self.phase = phase

    @property
    def was_broken_off(self) -> bool:
        """Between calls: whether a forward, backward or loan that the engine did not run itself has left something."""
        has_failed = self.phase.has_own_backward and torch._C._current_graph_task_id() == -1
        return bool(self._frames) or self.needs_drain or self._is_moving or has_failed

    @property
    def needs_drain(self) -> bool:
        """Whether lanes and disk must be idle before `abort`."""
        return self._fetching is not None or self.keeper.is_busy
