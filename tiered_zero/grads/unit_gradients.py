"""The gradients of one unit at their home, and what users see of them as `param.grad`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import ModelError
from tiered_zero.hardware.memory.host_memory import typed_view
from tiered_zero.layout.flat import FlatEntry, Unit
from tiered_zero.tiers.step_gradients import UnitShare
from tiered_zero.tiers.tier import Tier


class ExpiredGradient(torch.Tensor):
    """A `param.grad` that was kept beyond its step: its memory holds other values by now, so every use is refused."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ModelError(
            "This gradient was read as parameter.grad in an earlier step (or before zero_grad()); its memory is used "
            "again since. Keep parameter.grad.clone() instead."
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return "ExpiredGradient()"


@dataclass(kw_only=True)
class UnitGradients:
    """`flat`: [P] of the unit's dtype, or fp32 where micro-batches are summed; zeros between entries.

    All sets and dicts are of parameter indices. `present`: parameters with a gradient in this step. `arrived`: those of
    this backward. `norms`: of gradients that were measured as they arrived. `last`: the event of the one that left the
    device last. `frozen`: their update has begun. `spare`: a second flat, where the update of one step runs under the
    backward of the next. `shown`: what users got as `param.grad`: a view of the flat in the parameter's shape; under a
    loss scale a copy without it; or, for those in `assigned`, the user's own tensor, which `store_assigned` copies into
    the flat. `zeroed`: present, with
    value 0 and nothing to add to. `earlier`: had a gradient since zero_grad() last set gradients to None.

    `shard`: with many ranks, where each keeps the sums of its own shard only: which elements of the unit's flat `flat`
    holds; None: all. `num_sums`: reductions that `flat` has the sum of (of a whole unit, in this rank's shard); the
    content of a shard is undefined where there is none. `waiting`: of a shard, or of a unit that has been reduced: this
    rank's gradients [numel] that no bucket has taken, in fp32 where they are sums.
    """

    unit: Unit
    flat: torch.Tensor
    spare: torch.Tensor | None
    on_device: bool
    present: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    norms: dict[int, float | torch.Tensor] = field(default_factory=dict)
    last: Transfer | None = None
    frozen: bool = False
    shown: dict[int, torch.Tensor] = field(default_factory=dict)
    assigned: set[int] = field(default_factory=set)
    zeroed: set[int] = field(default_factory=set)
    earlier: set[int] = field(default_factory=set)
    shard: range | None = None
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)
    num_sums: int = 0

    @classmethod
    def reserve(
        cls, unit: Unit, tier: Tier, *, nbytes: int, dtype: torch.dtype, has_spare: bool, shard: range | None = None
    ) -> UnitGradients:
        """Reserve the slots that the unit's gradients rest in, `nbytes` each, on a tier that can be addressed."""
        flats: list[torch.Tensor] = []
        for kind in ("gradient", "gradient_spare")[: 1 + has_spare]:
            if not nbytes:  # a rank without any parameter of the unit
                flats.append(torch.empty(0, dtype=dtype, device="cpu"))
                continue
            raw = tier.view(tier.reserve(f"{kind}/{unit.index}", nbytes, "gradient"))
            assert raw is not None, "gradients rest where they can be addressed"
            flats.append(flat := typed_view(raw, dtype, unit.numel if shard is None else len(shard)))
            if shard is None:
                _zero_padding(flat, unit)
        spare, on_device = flats[1] if has_spare else None, tier.name == "device"
        return cls(unit=unit, flat=flats[0], spare=spare, on_device=on_device, shard=shard)

    @property
    def tier_name(self) -> str:
        return "device" if self.on_device else "host"

    def storages(self) -> set[int]:
        """Identify the memory of both flats."""
        return {flat.untyped_storage()._cdata for flat in (self.flat, self.spare) if flat is not None}

    @cached_property
    def start(self) -> int:
        """The element of the unit's flat that `flat` begins with."""
        return 0 if self.shard is None else self.shard.start

    @property
    def holds_sums(self) -> bool:
        """Whether this rank's gradients of the unit are fp32, as sums over micro-batches are."""
        own = [*([self.flat] if self.shard is None else []), *self.waiting.values()]
        return any(values.dtype == torch.float32 for values in own)

    @property
    def is_unreduced(self) -> bool:
        """Whether this rank has gradients of the unit that no bucket has taken."""
        return bool(self.waiting if self.shard is not None or self.num_sums else self.present)

    def share(self) -> UnitShare:
        present = frozenset(self.present)
        return UnitShare(flat=self.flat, start=self.start, present=present, last=self.last, on_device=self.on_device)

    def clear(self) -> None:
        self.earlier |= self.present
        self.last = None
        self.frozen = False
        self.present.clear()
        self.arrived.clear()
        self.norms.clear()
        self.zeroed.clear()
        if self.shown:
            self.expire_views()
        self.assigned.clear()
        self.waiting.clear()
        self.num_sums = 0

    def wait_transfers(self) -> None:
        """Block until every gradient of the unit that has left the device is at its home. Raises what failed there."""
        if self.last is not None:
            self.last.wait()

    def view(self, entry: FlatEntry) -> torch.Tensor:
        """View one parameter's gradient at its home, in the parameter's shape."""
        return entry.param.view(self.flat[entry.start : entry.stop])

    def show(self, entry: FlatEntry, loss_scale: float) -> torch.Tensor:
        """Return what `param.grad` is, the same object until the step ends; the gradient is present."""
        index = entry.param.index
        if index not in self.assigned:
            self.wait_transfers()
            self.zeroed.discard(index)
            if index not in self.shown:
                self.shown[index] = self.view(entry) if loss_scale == 1.0 else self._unscaled(entry, loss_scale)
        return self.shown[index]

    def _unscaled(self, entry: FlatEntry, loss_scale: float) -> torch.Tensor:
        return self.view(entry).to(torch.float32, copy=True).mul_(1 / loss_scale)

    def take_changed(self, loss_scale: float) -> list[tuple[FlatEntry, torch.Tensor]]:
        """End what users hold as `param.grad` under a loss scale; return what they assigned or changed, without it."""
        if not self.shown:
            return []
        self.wait_transfers()
        found: list[tuple[FlatEntry, torch.Tensor]] = []
        for entry in self.unit.entries:
            if (index := entry.param.index) not in self.shown:
                continue
            value, is_assigned = self.shown.pop(index), index in self.assigned
            if is_assigned or not _same_bits(value, self._unscaled(entry, loss_scale)):
                found.append((entry, value.detach()))
            self.assigned.discard(index)
            if not is_assigned:
                value.__class__ = ExpiredGradient
        return found

    def entries_present(self) -> dict[int, torch.Tensor]:
        """View the [numel] of each gradient at its home, by parameter."""
        present = (entry for entry in self.unit.entries if entry.param.index in self.present)
        return {entry.param.index: self.flat[entry.start : entry.stop] for entry in present}

    def take_waiting(self) -> dict[int, torch.Tensor]:
        """Return this rank's gradients that wait for a bucket, by parameter; `GradientStore.free_taken` follows."""
        taken, self.waiting = self.waiting, {}
        return taken

    def check_new(self, entry: FlatEntry, grad: torch.Tensor) -> None:
        """Raise ModelError where the unit cannot take a gradient of the parameter."""
        if grad.layout is not torch.strided:
            raise ModelError(
                f"The gradient of {entry.param.name} is sparse; gradients are reduced as dense arrays. "
                "Build the embedding with sparse=False."
            )
        if self.frozen:
            raise ModelError(
                f"{entry.param.name} gets a gradient although the update of this step has begun: without clipping and "
                "overflow checks updates begin in backward, when every gradient of a unit has come once. Set "
                '"tiered_zero": {"optimizer_in_backward": false} for loops with several backward passes in some steps.'
            )

    def assign(self, entry: FlatEntry, value: torch.Tensor) -> None:
        """Make `value` the gradient, in place of what was there."""
        self.remove(entry)
        self.shown[entry.param.index] = value
        self.assigned.add(entry.param.index)
        self.present.add(entry.param.index)

    def remove(self, entry: FlatEntry) -> None:
        """Leave the parameter without a gradient."""
        index = entry.param.index
        self.expire_views([index])
        for owner in (self.present, self.assigned, self.zeroed):
            owner.discard(index)

    def adds_to(self, index: int) -> bool:
        """Whether another gradient of the parameter is added, rather than stored."""
        return index in self.present and index not in self.zeroed

    def store_assigned(self) -> None:
        """Copy the tensors that users assigned into the flat.

        torch sums the norm of a tensor in the order of its memory, which the copy does not keep: where it differs the
        norm is that of the user's own tensor."""
        if not self.assigned:
            return
        self.wait_transfers()
        for entry in self.unit.entries:
            if (index := entry.param.index) in self.assigned:
                self.replace(entry, self.shown.pop(index).detach())
                self.assigned.discard(index)

    def replace(self, entry: FlatEntry, value: torch.Tensor) -> None:
        """Copy `value`, in the parameter's shape, to the gradient's home."""
        view = self.view(entry)
        view.copy_(value)
        self.norms.pop(entry.param.index, None)
        if value.stride() != view.stride():
            self.norms[entry.param.index] = torch.linalg.vector_norm(value, 2, dtype=torch.float32)

    def set_zero(self) -> None:
        """Set every gradient since `zero_grad()` last set gradients to None to 0."""
        self.wait_transfers()
        self.present |= self.earlier
        self.waiting.clear()
        self.num_sums = 0
        if self.shard is not None:
            self.flat.zero_()
            return
        for entry in self.unit.entries:
            if (index := entry.param.index) in self.present:
                if index not in self.assigned:
                    self.view(entry).zero_()
                if index in self.shown:
                    self.shown[index].zero_()
                else:
                    self.zeroed.add(index)
        self.norms.clear()

    def expire_views(self, indices: Iterable[int] | None = None) -> None:
        """Refuse the views of the flat that users may hold: it is used for something else."""
        for index in tuple(self.shown) if indices is None else indices:
            view = self.shown.pop(index, None)
            if view is not None and index not in self.assigned:
                view.__class__ = ExpiredGradient


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare fp32 tensors; a NaN equals itself."""
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def _zero_padding(flat: torch.Tensor, unit: Unit) -> None:
    """Zero the gaps between entries and after the last. The rest is written before it is read, and takes no memory
    until then."""
    stops = [0, *(entry.stop for entry in unit.entries)]
    starts = [*(entry.start for entry in unit.entries), unit.numel]
    for stop, start in zip(stops, starts, strict=True):
        flat[stop:start] = 0
