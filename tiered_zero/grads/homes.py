"""Hold all gradients at their homes: find a parameter's, wait for it, turn a home to fp32."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, final

import torch
from torch import nn

from tiered_zero.errors import ModelError
from tiered_zero.grads.in_flight import InFlightGradients
from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import FlatEntry, Unit
from tiered_zero.sizes import format_nbytes
from tiered_zero.tiers.inventory import Inventory

logger = logging.getLogger("tiered_zero")

GRAD_SLOT: Any = torch.Tensor.grad
"""The descriptor of autograd's own attribute; it bypasses the `grad` property of guarded parameters."""

_PRESENT: Callable[[UnitGradients], set[int]] = attrgetter("present")

_SECOND_BACKWARD = (
    "backward() called again before step(): gradients accumulate in fp32 (%s). If unintended, call engine.step() or "
    "engine.zero_grad()."
)
CHANGED_GRADIENT = (
    "A gradient was changed between backward() and step(): fp16 may not hold it times the loss scale, so gradients "
    "rest in fp32 from now on (%s)."
)


@final
class GradientHomes:
    """The gradients of all units at their homes. The store fills them and `param.grad` reads them. Driver or autograd's
    thread."""

    def __init__(
        self,
        params: Mapping[nn.Parameter, tuple[Unit, FlatEntry]],
        units: Iterable[UnitGradients],
        inventory: Inventory,
        runtime: Runtime,
        in_flight: InFlightGradients,
    ) -> None:
        self.units = {gradients.unit.index: gradients for gradients in units}
        self.places = {param: (self.units[unit.index], entry) for param, (unit, entry) in params.items()}
        """Parameter -> its unit's gradients and its entry. An empty parameter is in no unit and not here."""
        self.storages = {storage for each in self.units.values() for storage in each.storages()}
        self._inventory = inventory
        self._in_flight = in_flight
        self._recorder = runtime.recorder
        self._ledger = runtime.ledger
        self._windows = {each.paged.windows for each in self.units.values() if each.paged is not None}
        """Host memory windows of gradients that rest on NVMe."""
        self._extra_nbytes: Counter[str] = Counter()
        """Tier -> bytes beyond the plan, see `promote`."""

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient in this step."""
        return any(map(_PRESENT, self.units.values()))

    def wait_update(self, unit: Unit) -> None:
        """Block until the unit's last update has read its gradients. Raises the error of a failed update."""
        update = self._inventory.last_update(unit)
        if update is not None and not update.written.done():
            with self._recorder.span("compute", "wait_update", unit.name):
                update.computed.wait()

    def wait_transfers(self) -> None:
        """Block until every gradient so far is at its home, including empty ones."""
        self._in_flight.wait_all()
        for gradients in self.units.values():
            if gradients.shard is not None or gradients.num_sums:
                gradients.wait_transfers()
        for windows in self._windows:
            windows.finish_writes()

    def promote(self, gradients: UnitGradients, why: str = _SECOND_BACKWARD) -> None:
        """Convert the unit's gradients to fp32, as a second gradient in one step needs: a 16-bit sum would round.
        `why`: the warning to log, if a second backward is not the cause."""
        if gradients.flat.dtype == torch.float32:
            return
        if gradients.paged is not None:
            found = "another backward" if why is _SECOND_BACKWARD else "a gradient changed under a loss scale"
            raise ModelError(
                f"Gradients of {gradients.unit.name} rest on NVMe in 16 bit, as planned for one backward in a step; "
                f"found {found}, which needs fp32. Set gradient_accumulation_steps to the number of backwards, which "
                "also divides each loss by it, or managed_gradient_accumulation to false where that varies: either "
                'plans fp32. Or keep gradients in host memory: "tiered_zero": {"gradients": "cpu"}.'
            )
        tier = gradients.tier_name
        nbytes = _sum_nbytes(gradients)
        if not self._extra_nbytes:
            more = Counter[str]()
            for each in self.units.values():
                more[each.tier_name] += _sum_nbytes(each)
            logger.warning(
                why,
                ", ".join(f"+{format_nbytes(extra)} on {where}" for where, extra in more.items()),
            )
        self._ledger.charge(tier, "gradient_sums", nbytes)
        self._extra_nbytes[tier] += nbytes
        self.wait_transfers()
        gradients.expire_views()
        gradients.flat = gradients.flat.to(torch.float32)
        if gradients.spare is not None:
            gradients.spare = gradients.spare.to(torch.float32)
        self.storages |= gradients.storages()

    def close(self) -> None:
        """Drop all gradients. The lanes have ended."""
        self.places.clear()
        self.units.clear()
        for tier, nbytes in self._extra_nbytes.items():
            self._ledger.discharge(tier, "gradient_sums", nbytes)
        self._extra_nbytes.clear()


def _sum_nbytes(gradients: UnitGradients) -> int:
    """Return the bytes of the unit's gradients as fp32 sums; 0 for an fp32 unit, whose gradients are fp32 anyway."""
    if gradients.unit.dtype == torch.float32:
        return 0
    return 4 * gradients.flat.numel() * (1 if gradients.spare is None else 2)
