"""Hold one unit's gradients at their home, and the tensors that users get as `param.grad`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import ModelError
from tiered_zero.hardware.device.lanes import Lane, LaneTransfer
from tiered_zero.hardware.memory.host_memory import typed_view
from tiered_zero.layout.flat import FlatEntry, Unit
from tiered_zero.tiers.step_gradients import FlatWindows, PagedFlat, UnitShare
from tiered_zero.tiers.tier import Home, Tier


class ExpiredGradient(torch.Tensor):
    """The class of a `param.grad` that the user has kept beyond its step. Its memory holds other values now, so every
    use raises ModelError."""

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
    """The gradients of one unit. All sets and dicts have parameter indices as elements and keys. GradientStore changes
    the object, on the driver thread or autograd's.

    `flat`: the gradients, [P] of the unit's dtype, or fp32 if micro-batches are summed; zeros between entries. For
    gradients on NVMe `flat` is empty, and `paged` and `paged_spare` hold them; `opened` gives the flat in both cases.
    `spare`: a second flat, if the update of one step runs under the next backward. `present`: parameters with a
    gradient in this step. `arrived`: parameters with a gradient in this backward. `norms`: norms that were computed on
    arrival. `squares`: sums of squares of averaged gradients in this rank's shard, computed on arrival. `last`: the
    last transfer of gradients to their home. `frozen`: whether the update of these gradients has begun. `shown`: the
    tensors that users got as `param.grad`: a view of the flat in the parameter's shape; a copy, with a loss scale or on
    NVMe; or the user's own tensor for parameters in `assigned`, which is copied to the flat later. `zeroed`: parameters
    whose gradient was set to 0, so the next gradient replaces it. `earlier`: parameters that had a gradient since
    zero_grad() last set gradients to None. `shard`: the elements of the unit's flat that `flat` holds, if each of many
    ranks keeps only the sums of its shard; None: all. `num_sums`: how many reductions of this step have been added up
    in `flat` (if it holds the whole unit, in this rank's shard of it); while 0, the content of a shard is undefined.
    `waiting`: gradients [numel] of this rank, of a shard or of a unit that was reduced before, that no bucket has
    copied yet; fp32 if they are sums.
    """

    unit: Unit
    flat: torch.Tensor
    spare: torch.Tensor | None
    on_device: bool
    present: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    norms: dict[int, float | torch.Tensor] = field(default_factory=dict)
    squares: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    last: Transfer | None = None
    frozen: bool = False
    shown: dict[int, torch.Tensor] = field(default_factory=dict)
    assigned: set[int] = field(default_factory=set)
    zeroed: set[int] = field(default_factory=set)
    earlier: set[int] = field(default_factory=set)
    shard: range | None = None
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)
    num_sums: int = 0
    paged: PagedFlat | None = None
    paged_spare: PagedFlat | None = None

    @classmethod
    def reserve(
        cls,
        unit: Unit,
        tier: Tier,
        *,
        nbytes: int,
        dtype: torch.dtype,
        has_spare: bool,
        shard: range | None = None,
        windows: FlatWindows | None = None,
        cuts: Iterable[int] = (),
    ) -> UnitGradients:
        """Reserve slots of `nbytes` each on `tier` for the unit's gradients. `has_spare`: whether to reserve a second
        slot. `windows`: buffers in host memory for a tier that cannot be addressed (NVMe). `cuts`: the first elements,
        in the unit's flat, of the parts that the update reads."""
        start = 0 if shard is None else shard.start
        numel = unit.numel if shard is None else len(shard)
        padding = tuple(_padding(unit)) if shard is None else ()
        flats: list[torch.Tensor] = []
        paged: list[PagedFlat] = []
        for kind in ("gradient", "gradient_spare")[: 1 + has_spare]:
            if not nbytes:  # a rank without any parameter of the unit
                flats.append(torch.empty(0, dtype=dtype, device="cpu"))
                continue
            slot = tier.reserve(f"{kind}/{unit.index}", nbytes, "gradient")
            if (raw := tier.view(slot)) is None:
                assert windows is not None, "gradients on nvme are planned with windows"
                own_cuts = [cut - start for cut in cuts]
                paged.append(PagedFlat(Home(tier, slot), windows, dtype, numel, cuts=own_cuts, padding=padding))
                flats.append(torch.empty(0, dtype=dtype, device="cpu"))
                continue
            flats.append(flat := typed_view(raw, dtype, numel))
            for part in padding:
                flat[part] = 0
        return cls(
            unit=unit,
            flat=flats[0],
            spare=flats[1] if has_spare else None,
            on_device=tier.name == "device",
            shard=shard,
            paged=paged[0] if paged else None,
            paged_spare=paged[1] if paged and has_spare else None,
        )

    @property
    def tier_name(self) -> str:
        return "device" if self.on_device else "host"

    def storages(self) -> set[int]:
        """Return the identities of the memory of both flats."""
        return {flat.untyped_storage()._cdata for flat in (self.flat, self.spare) if flat is not None}

    @cached_property
    def start(self) -> int:
        """The first element of the unit's flat that `flat` holds."""
        return 0 if self.shard is None else self.shard.start

    @property
    def holds_sums(self) -> bool:
        """Whether this rank's gradients of the unit are fp32; sums over micro-batches are."""
        own = [*([self.flat] if self.shard is None else []), *self.waiting.values()]
        return any(values.dtype == torch.float32 for values in own)

    @property
    def is_unreduced(self) -> bool:
        """Whether this rank has gradients of the unit that no bucket has copied for a reduction."""
        return bool(self.waiting if self.shard is not None or self.num_sums else self.present)

    def opened(self, lane: str = "compute") -> AbstractContextManager[torch.Tensor]:
        """Return a context that gives the unit's gradients as one tensor in memory; gradients on NVMe are there only
        inside the block. `lane`: the lane that uses it; "compute" for the driver thread."""
        return nullcontext(self.flat) if self.paged is None else self.paged.windows.open(self.paged, lane)

    def submit(
        self, lane: Lane, job: Callable[[], None], after: Sequence[Transfer], holds: Sequence[torch.Tensor]
    ) -> Transfer:
        """Submit a job that launches copies to the tensor of `opened`, and return its transfer. Gradients on NVMe are
        written to disk only after these copies are complete."""
        if (paged := self.paged) is None:
            return lane.submit(job, after=after, holds=holds, waits=False)
        transfer = LaneTransfer(launched=threading.Event())

        def run() -> None:
            paged.arriving = transfer
            job()

        return lane.submit(run, after=after, holds=holds, transfer=transfer)

    def share(self) -> UnitShare:
        return UnitShare(
            flat=self.flat,
            start=self.start,
            present=frozenset(self.present),
            last=self.last,
            on_device=self.on_device,
            paged=self.paged if self.present else None,
        )

    def swap(self) -> None:
        """Exchange `flat` and `spare`, if there is a spare: an update reads the old `flat` under the next backward."""
        if self.spare is not None:
            self.flat, self.spare = self.spare, self.flat
        if self.paged_spare is not None:
            self.paged, self.paged_spare = self.paged_spare, self.paged

    def clear(self) -> None:
        self.earlier |= self.present
        self.last = None
        self.frozen = False
        self.present.clear()
        self.arrived.clear()
        self.norms.clear()
        self.squares = {}  # a failed job may still fill the old dict
        self.zeroed.clear()
        if self.shown:
            self.expire_views()
        self.assigned.clear()
        self.waiting.clear()
        self.num_sums = 0
        if self.paged is not None:
            self.paged = self.paged.next()

    def wait_transfers(self) -> None:
        """Block until every gradient that was sent to its home is there. Raises the errors of the transfers."""
        if self.last is not None:
            self.last.wait()

    def copy(self, entry: FlatEntry, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a copy of one parameter's gradient in the parameter's shape. `dtype`: None keeps the dtype of the
        flat."""
        with self.opened() as flat:
            return entry.param.view(flat[entry.start : entry.stop]).to(dtype or flat.dtype, copy=True)

    def show(self, entry: FlatEntry, loss_scale: float) -> torch.Tensor:
        """Return the tensor that users get as `param.grad` of a parameter with a gradient: the same object until the
        step ends. With a loss scale, or on NVMe, it is an unscaled copy."""
        index = entry.param.index
        if index not in self.assigned:
            self.wait_transfers()
            self.zeroed.discard(index)
            if index not in self.shown:
                is_live = loss_scale == 1.0 and self.paged is None
                view = entry.param.view(self.flat[entry.start : entry.stop]) if is_live else None
                self.shown[index] = self._shown_copy(entry, loss_scale) if view is None else view
        return self.shown[index]

    def _shown_copy(self, entry: FlatEntry, loss_scale: float) -> torch.Tensor:
        return self.copy(entry) if loss_scale == 1.0 else self.copy(entry, torch.float32).mul_(1 / loss_scale)

    def take_changed(self, loss_scale: float) -> list[tuple[FlatEntry, torch.Tensor]]:
        """Return the gradients that users assigned, and the copies that users changed, unscaled. Copies that users hold
        as `param.grad` raise ModelError from then on."""
        if not self.shown:
            return []
        self.wait_transfers()
        found: list[tuple[FlatEntry, torch.Tensor]] = []
        for entry in self.unit.entries:
            if (index := entry.param.index) not in self.shown:
                continue
            value, is_assigned = self.shown.pop(index), index in self.assigned
            if is_assigned or not _same_bits(value, self._shown_copy(entry, loss_scale)):
                found.append((entry, value.detach()))
            self.assigned.discard(index)
            if not is_assigned:
                value.__class__ = ExpiredGradient
        return found

    def entries_present(self) -> dict[int, torch.Tensor]:
        """Return parameter index -> a view [numel] of the gradient at its home."""
        present = (entry for entry in self.unit.entries if entry.param.index in self.present)
        return {entry.param.index: self.flat[entry.start : entry.stop] for entry in present}

    def take_waiting(self) -> dict[int, torch.Tensor]:
        """Remove this rank's gradients that wait for a bucket, and return them by parameter index. The caller calls
        `GradientStore.free_taken` once buckets have copied them."""
        taken, self.waiting = self.waiting, {}
        return taken

    def check_new(self, entry: FlatEntry, grad: torch.Tensor) -> None:
        """Raise ModelError if `grad` is sparse, or if the unit's update has begun, so it cannot be added."""
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
        """Make `value` the parameter's gradient, replacing any other."""
        self.remove(entry)
        self.shown[entry.param.index] = value
        self.assigned.add(entry.param.index)
        self.present.add(entry.param.index)

    def remove(self, entry: FlatEntry) -> None:
        """Remove the parameter's gradient."""
        index = entry.param.index
        self.expire_views([index])
        for owner in (self.present, self.assigned, self.zeroed):
            owner.discard(index)

    def adds_to(self, index: int) -> bool:
        """Return whether the next gradient of the parameter is added to the present one, not copied over it."""
        return index in self.present and index not in self.zeroed

    def store_assigned(self) -> None:
        """Copy the tensors that users assigned into the flat."""
        if not self.assigned:
            return
        self.wait_transfers()
        for entry in self.unit.entries:
            if (index := entry.param.index) in self.assigned:
                self.replace(entry, self.shown.pop(index).detach())
                self.assigned.discard(index)

    def replace(self, entry: FlatEntry, value: torch.Tensor) -> None:
        """Copy `value`, in the parameter's shape, to the gradient's home. torch sums a norm in the order of a tensor's
        memory: if the copy has another order, compute the norm of `value` now."""
        with self.opened() as flat:
            view = entry.param.view(flat[entry.start : entry.stop])
            view.copy_(value)
        self.norms.pop(entry.param.index, None)
        if value.stride() != view.stride():
            self.norms[entry.param.index] = torch.linalg.vector_norm(value, 2, dtype=torch.float32)

    def set_zero(self) -> None:
        """Set to 0 the gradient of every parameter that had one since `zero_grad()` last set gradients to None."""
        self.wait_transfers()
        self.present |= self.earlier
        self.waiting.clear()
        self.squares = {}
        self.num_sums = 0
        with self.opened() as flat:
            if self.shard is not None:
                flat.zero_()
                return
            for entry in self.unit.entries:
                if (index := entry.param.index) in self.present and index not in self.assigned:
                    flat[entry.start : entry.stop] = 0
        for entry in self.unit.entries:
            if (index := entry.param.index) in self.present:
                if index in self.shown:
                    self.shown[index].zero_()
                else:
                    self.zeroed.add(index)
        self.norms.clear()

    def expire_views(self, indices: Iterable[int] | None = None) -> None:
        """Make every use of the views that users hold as `param.grad` raise ModelError, because their memory is used
        again. `indices`: of these parameters; None: of all."""
        for index in tuple(self.shown) if indices is None else indices:
            view = self.shown.pop(index, None)
            if view is not None and index not in self.assigned:
                view.__class__ = ExpiredGradient


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype have the same bits; a NaN equals itself."""
    bits = torch.int32 if left.itemsize == 4 else torch.int16
    return torch.equal(left.view(bits), right.view(bits))


def _padding(unit: Unit) -> Iterator[slice]:
    """Yield the gaps in the unit's flat between entries and after the last entry, which must be set to zero. The rest
    of the flat is written before it is read, and occupies no memory until then."""
    stops = [0, *(entry.stop for entry in unit.entries)]
    starts = [*(entry.start for entry in unit.entries), unit.numel]
    for stop, start in zip(stops, starts, strict=True):
        if stop < start:
            yield slice(stop, start)
