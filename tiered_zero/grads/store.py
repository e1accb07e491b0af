"""Store every gradient, from autograd or assigned by users, return it as `param.grad`, and pass a step's gradients to
its update."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import ModelError
from tiered_zero.grads.check import Norm, OverflowGuard, span_squares
from tiered_zero.grads.gradient import Arrival, InFlightGradients, UnitGradients
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import FlatEntry, ParamSpec, Unit
from tiered_zero.native.norms import GradNorm
from tiered_zero.sizes import format_nbytes
from tiered_zero.tiers.step_gradients import StepGradients
from tiered_zero.tiers.tier import Inventory
from tiered_zero.unit.guard import set_gradient_home

logger = logging.getLogger("tiered_zero")

GRAD_SLOT: Any = torch.Tensor.grad
"""The descriptor of autograd's own `grad` attribute. It bypasses the `grad` property of guarded parameters."""

_HIDDEN_BY_UPDATE = (
    'its update begins in backward, as it does where nothing is clipped or checked. Set "tiered_zero": '
    '{"optimizer_in_backward": false} to read and change gradients until step(). To clip, set gradient_clipping; '
    "engine.get_global_grad_norm() has the norm after step()."
)
_HIDDEN_BY_RANKS = (
    "it is this rank's own until step(), which averages the gradients of all ranks: leave DistributedDataParallel out. "
    "To clip, set gradient_clipping; engine.get_global_grad_norm() has the norm after step()."
)
_PRESENT: Callable[[UnitGradients], set[int]] = attrgetter("present")

_SECOND_BACKWARD = (
    "backward() called again before step(): gradients accumulate in fp32 (%s). If unintended, call engine.step() or "
    "engine.zero_grad()."
)
_CHANGED_GRADIENT = (
    "A gradient was changed between backward() and step(): fp16 may not hold it times the loss scale, so gradients "
    "rest in fp32 from now on (%s)."
)


class GradientStore:
    """Takes each gradient from autograd, and copies or adds it to its home (device memory, host memory or NVMe).
    Used on the driver thread or autograd's."""

    def __init__(
        self,
        params: Mapping[nn.Parameter, tuple[Unit, FlatEntry]],
        units: Iterable[UnitGradients],
        inventory: Inventory,
        runtime: Runtime,
        in_flight: InFlightGradients,
        norms: GradNorm,
        overflow: OverflowGuard,
    ) -> None:
        """`params`: trainable parameter -> its unit and its place there. `overflow`: has the loss scale, by
        which gradients at their homes are multiplied."""
        self._units = {gradients.unit: gradients for gradients in units}
        self._places = {param: (self._units[unit], entry) for param, (unit, entry) in params.items()}
        """Parameter -> its unit's gradients and its place in the unit. Empty parameters that belong to no unit are not
        in it."""
        self._storages = {storage for each in self._units.values() for storage in each.storages()}
        """The identities of the storages of all homes in memory, to recognize tensors that are views of a home."""
        self._windows = {each.paged.windows for each in self._units.values() if each.paged is not None}
        """The windows (buffers in host memory) of gradients that rest on NVMe."""
        self._inventory, self._in_flight = inventory, in_flight
        self._norms, self._overflow = norms, overflow
        self._accelerator, self._recorder, self._ledger = runtime.accelerator, runtime.recorder, runtime.ledger
        self._span = runtime.accelerator.timer(runtime.recorder)
        self._measures_norms = True
        self.is_shown = False
        """Whether `param.grad` of a parameter in use is the gradient at its home, instead of autograd's attribute. True
        while there are gradients and no forward or backward of the engine runs."""
        self._hidden_by_ranks = _HIDDEN_BY_RANKS if runtime.collectives.world_size > 1 else None
        self._hidden: str | None = self._hidden_by_ranks
        """Why `param.grad` cannot be read or assigned now, for the error; None if it can."""
        self._extra_nbytes: Counter[str] = Counter()
        """Tier -> bytes that `promote` has allocated beyond the plan."""

    # -- filling -----------------------------------------------------------------------------------------------------

    def begin_backward(self, *, is_last: bool) -> None:
        """Begin a backward. `is_last`: whether the step follows this backward, and there is only one rank. If so, norms
        are computed when gradients arrive."""
        self._measures_norms = is_last

    def accumulate(self, param: nn.Parameter) -> Unit | None:
        """Move the gradient that autograd has left on `param` to its home, or keep it for a bucket. Add it to an
        earlier gradient there. Return the unit if it now has all gradients of this backward; else None."""
        with torch._C.DisableTorchFunctionSubclass():
            grad: torch.Tensor | None = GRAD_SLOT.__get__(param)
            GRAD_SLOT.__set__(param, None)
        if grad is None or (place := self._places.get(param)) is None:
            return None
        gradients, entry = place
        unit, index = gradients.unit, entry.param.index
        gradients.check_new(entry, grad)
        if grad.requires_grad:
            raise ModelError(
                f"The gradient of {entry.param.name} came with a graph, as backward(create_graph=True) makes; the "
                "engine keeps gradients without a graph, so a penalty on param.grad would have no gradient. Compute "
                "them by torch.autograd.grad(loss, params, create_graph=True), and add the penalty to the loss."
            )
        if gradients.shard is None and not gradients.num_sums:
            self._store(gradients, entry, entry.param.flatten(grad))
        else:
            self._keep_waiting(gradients, entry, entry.param.flatten(grad))
        gradients.present.add(index)
        gradients.arrived.add(index)
        if len(gradients.arrived) < len(unit.entries):
            return None
        self._in_flight.flush()
        return unit

    def _store(self, gradients: UnitGradients, entry: FlatEntry, source: torch.Tensor) -> None:
        """Copy `source`, a gradient [numel], to its home, or add it to the gradient there. Called only if the home
        holds the whole unit, and no reduction of this step has stored averages there."""
        index = entry.param.index
        if not gradients.arrived:  # else the unit's first gradient of this backward has waited already
            self.wait_update(gradients.unit)
        if gradients.shown:
            self.store_shown(gradients)
        adds = gradients.adds_to(index)
        if adds:
            self.promote(gradients)
        gradients.zeroed.discard(index)
        place = slice(entry.start, entry.stop)
        if not gradients.on_device:
            if index in gradients.arrived:  # part of the graph ran twice, and a batch has one gradient per parameter
                self._in_flight.flush()
            arrival = Arrival(index=index, place=place, source=source, adds=adds)
            self._in_flight.send(gradients, arrival, measures=self._measures_norms)
        elif adds:
            gradients.flat[place].add_(source)
        else:
            gradients.flat[place].copy_(source)

    def _keep_waiting(self, gradients: UnitGradients, entry: FlatEntry, source: torch.Tensor) -> None:
        """Keep `source`, a gradient [numel], on the device until a bucket copies it. If a gradient of this parameter
        waits already, add the two in fp32."""
        waiting, index = gradients.waiting, entry.param.index
        if index in waiting:
            total = waiting[index].to(torch.float32) + source
            self._ledger.charge("device", "gradient_in_flight", total.nbytes - waiting[index].nbytes)
            waiting[index] = total
            return
        self._ledger.charge("device", "gradient_in_flight", source.nbytes)
        waiting[index] = source

    def free_taken(self, taken: Mapping[int, torch.Tensor]) -> None:
        """Subtract the bytes of `taken` from the ledger. `taken`: gradients that buckets have copied, or that are
        dropped."""
        self._ledger.discharge("device", "gradient_in_flight", sum(source.nbytes for source in taken.values()))

    def receive(
        self,
        gradients: UnitGradients,
        span: range,
        source: torch.Tensor,
        *,
        adds: bool,
        after: Transfer,
        divisor: float = 1.0,
        measures: bool = False,
    ) -> Transfer:
        """Start to move reduced gradients to elements `span` of their unit's flat, and return the transfer. Used on the
        driver thread or autograd's.

        `source`: [n], complete once `after` is done, and read until the returned transfer is done. `adds`: add `source`
        in fp32 to earlier reductions of this step. `divisor`: divides `source` first, in place. `measures`: also sum
        the squares of the stored averages, except if `adds` is true and `source` is on the device."""
        unit, squares = gradients.unit, gradients.squares
        self.wait_update(unit)
        if adds:
            self.promote(gradients)

        def bring() -> None:
            with (
                gradients.opened("reduce") as flat,
                self._span("reduce", "receive", unit.name, source.nbytes),
            ):
                target = flat[span.start - gradients.start :][: len(span)]
                self._in_flight.receive(source, target, adds=adds, divisor=divisor)
                if measures and (source.is_cpu or not adds):
                    for index, more in span_squares(target if source.is_cpu else source, span, unit).items():
                        squares.setdefault(index, []).extend(more)

        marks = [after, self._accelerator.record_compute()]  # compute may have made the flat fp32, or set it to 0
        gradients.last = gradients.submit(self._accelerator.lane("reduce"), bring, marks, [source])
        return gradients.last

    def show_sum(self, param: nn.Parameter) -> None:
        """Add the gradient at its home to `param.grad`, so that the user's hooks see the sum, as in plain PyTorch.
        Leave `param.grad` as it is if the unit's gradients are sharded or reduced already."""
        with torch._C.DisableTorchFunctionSubclass():
            grad: torch.Tensor | None = GRAD_SLOT.__get__(param)
        if grad is None or (place := self._places.get(param)) is None:
            return
        gradients, entry = place
        gradients.check_new(entry, grad)
        self.store_shown(gradients)
        if gradients.shard is not None or gradients.num_sums or not gradients.adds_to(entry.param.index):
            return
        self.promote(gradients)
        gradients.wait_transfers()
        with gradients.opened() as flat:
            total = entry.param.view(flat[entry.start : entry.stop]).to(grad.device) + grad
        gradients.present.discard(entry.param.index)  # what the hooks leave in `param.grad` replaces it
        with torch._C.DisableTorchFunctionSubclass():
            if total.dtype != param.dtype:
                param.grad_dtype = None  # the sum is fp32
            GRAD_SLOT.__set__(param, total)

    def finish_transfers(self) -> None:
        """Free the device memory of gradients that have reached their homes. Wait for others only if too many bytes are
        in flight, or if users may hold views of them. Called at the end of a backward. Raises transfer errors."""
        self._in_flight.end_backward()
        for gradients in self._units.values():
            if gradients.shown:  # users may hold views of the flat
                gradients.wait_transfers()

    def end_backward(self) -> None:
        for gradients in self._units.values():
            gradients.arrived.clear()

    def wait_update(self, unit: Unit) -> None:
        """Block until the unit's last update has read the unit's gradients. Raises the error of a failed update."""
        update = self._inventory.last_update(unit)
        if update is not None and not update.written.done():
            with self._recorder.span("compute", "wait_update", unit.name):
                update.computed.wait()

    def wait_transfers(self) -> None:
        """Block until every gradient that has come is at its home, and all running writes to NVMe are complete."""
        self._in_flight.wait_all()
        for gradients in self._units.values():
            if gradients.shard is not None or gradients.num_sums:
                gradients.wait_transfers()
        for windows in self._windows:
            windows.finish_writes()

    def promote(self, gradients: UnitGradients, why: str = _SECOND_BACKWARD) -> None:
        """Convert the unit's gradients to fp32, because a sum in 16 bits loses digits. `why`: the warning to log when
        memory beyond the plan is first used. Raises ModelError if the gradients rest on NVMe in 16 bits."""
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
            for each in self._units.values():
                more[each.tier_name] += _sum_nbytes(each)
            logger.warning(why, ", ".join(f"+{format_nbytes(extra)} on {where}" for where, extra in more.items()))
        self._ledger.charge(tier, "gradient_sums", nbytes)
        self._extra_nbytes[tier] += nbytes
        self.wait_transfers()
        gradients.expire_views()
        gradients.flat = gradients.flat.to(torch.float32)
        if gradients.spare is not None:
            gradients.spare = gradients.spare.to(torch.float32)
        self._storages |= gradients.storages()

    def freeze(self, unit: Unit, into: StepGradients) -> None:
        """Add a unit's gradients to `into`, which an update that has begun in backward reads. A further gradient of the
        unit in this step raises ModelError."""
        gradients = self._units[unit]
        self.store_shown(gradients)
        gradients.expire_views()
        into.shares[unit] = gradients.share()
        gradients.frozen = True

    def keep(self, unit: Unit) -> None:
        """Mark the window with a unit's gradients, if there is one, as kept, because the running update will read it.
        Only gradients on NVMe have windows."""
        if (flat := self._units[unit].paged) is not None:
            self._accelerator.lane("reduce").submit(partial(flat.windows.keep, flat), waits=False)

    def detach_step(self) -> StepGradients:
        """Return this step's gradients for its update, which reads them in place. Begin the next step without
        gradients."""
        step = StepGradients()
        for gradients in self._units.values():
            step.shares[gradients.unit] = gradients.share()
            gradients.clear()
            # without a spare flat, the next gradient waits for the update
            if gradients.spare is not None or gradients.paged_spare is not None:
                gradients.swap()
        return step

    def discard(self) -> None:
        """Wait for all transfers, then drop this step's gradients, also those that are still on parameters. Raises the
        first transfer error."""
        try:
            self._in_flight.drain()
            for gradients in self._units.values():
                if gradients.num_sums:  # the next gradients are written to the same memory
                    gradients.wait_transfers()
        finally:
            for gradients in self._units.values():
                if gradients.waiting:
                    self.free_taken(gradients.waiting)
                if gradients.paged is not None:
                    gradients.paged.windows.drop(gradients.paged)
                gradients.clear()
            self.take_unstored()

    def abort(self) -> None:
        """Free the gradients that a failed `discard` left behind. The lanes must be idle."""
        self._in_flight.clear()

    def zero(self) -> None:
        """Set to 0 the gradient of each parameter that has had one since zero_grad() last set gradients to None."""
        for gradients in self._units.values():
            if gradients.present or gradients.earlier or gradients.num_sums:
                self.wait_update(gradients.unit)
                self.free_taken(gradients.waiting)
                gradients.set_zero()

    def reset_zero(self) -> None:
        """Forget which parameters had gradients in earlier steps. `zero` then ignores those steps. Called when
        zero_grad() sets gradients to None."""
        for gradients in self._units.values():
            gradients.earlier.clear()

    def accumulators(self) -> list[Any]:
        """Return autograd's nodes that accumulate the gradients of trainable parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            return [get_gradient_edge(param).node for param in self._places if param.requires_grad]

    # -- param.grad --------------------------------------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient in this step."""
        return any(map(_PRESENT, self._units.values()))

    def serve(self) -> None:
        """Make `param.grad` read and assign the gradient at its home. For a guarded parameter this always holds, for a
        parameter in use only while `is_shown` is true."""
        set_gradient_home(self._places, self)

    def show(self) -> None:
        """Let users read and assign gradients as `param.grad` of parameters in use, if there are gradients. Called
        after a forward or backward, or after `zero`."""
        self.is_shown = self.has_gradients

    def hide(self) -> None:
        """Let `param.grad` of parameters in use read and assign only autograd's attribute, not the gradients in this
        store. Called before the engine's forward or backward, and when gradients are dropped."""
        self.is_shown = False

    def set_hidden(self, updates_in_backward: bool = False) -> None:
        """Make users' access to `param.grad` raise ModelError if there are several ranks, or if `updates_in_backward`;
        else allow it."""
        self._hidden = _HIDDEN_BY_UPDATE if updates_in_backward else self._hidden_by_ranks

    def read(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return the value of `param.grad` between backward and step(): a view of the gradient's home, or None without
        a gradient. With a loss scale, return an unscaled fp32 copy instead; on NVMe, return a copy. If the user changes
        a copy, the change is written to the home later. Raises ModelError if `set_hidden` forbids access. Used on the
        driver thread."""
        if (place := self._places.get(param)) is None or place[1].param.index not in place[0].present:
            return None
        self._refuse_if_hidden(place[1])
        return place[0].show(place[1], self._overflow.loss_scale)

    def assign(self, param: nn.Parameter, value: torch.Tensor | None) -> None:
        """Make `value` the gradient of `param`, as `param.grad = value` does; None drops the gradient. `value` itself
        may be kept, without a copy, until step(). With a loss scale, `value` is the unscaled gradient, and may be fp32.
        Raises ModelError if the shape, dtype or device of `value` does not fit, or if `set_hidden` forbids access to
        gradients of a backward. Used on the driver thread."""
        if (place := self._places.get(param)) is None:
            return
        gradients, entry = place
        index = entry.param.index
        if value is None and index not in gradients.present:
            return
        if self._hidden is not None and any(
            each.present - each.assigned or each.waiting for each in self._units.values()
        ):
            self._refuse_if_hidden(entry)
        if value is None:
            gradients.remove(entry)
            return
        if value is gradients.shown.get(index):  # `param.grad *= 2` assigns the same tensor
            return
        gradients.check_new(entry, value)
        devices, dtypes = (param.device, gradients.flat.device), [gradients.unit.dtype, gradients.flat.dtype]
        if self._overflow.loss_scale != 1.0:
            dtypes.append(torch.float32)
            value = value.detach()  # it may be the copy of another gradient, which expires before this one
        if value.shape != entry.param.shape or value.dtype not in dtypes or value.device not in devices:
            raise ModelError(
                f"A gradient of shape {tuple(entry.param.shape)}, {gradients.unit.dtype}, on {param.device} was "
                f"expected for {entry.param.name}; found shape {tuple(value.shape)}, {value.dtype}, on {value.device}."
            )
        if value.untyped_storage()._cdata in self._storages:
            value = value.detach().clone()  # it views another gradient's home, which may change first
        self.wait_update(gradients.unit)
        gradients.assign(entry, value)

    def collect_assigned(self) -> None:
        """Copy each gradient that users have assigned or changed to its home. Called when a step begins."""
        for param, grad in self.take_unstored():
            self.assign(param, grad)
        for gradients in self._units.values():
            if gradients.shown:
                self.store_shown(gradients)

    def assigned(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the gradients that users have assigned and that are not at their homes yet."""
        with torch._C.DisableTorchFunctionSubclass():
            found = {param: GRAD_SLOT.__get__(param) for param in self._places}
        for param, (gradients, entry) in self._places.items():
            if (index := entry.param.index) in gradients.assigned:
                found[param] = gradients.shown[index]
        return {param: grad for param, grad in found.items() if grad is not None}

    def store_shown(self, gradients: UnitGradients) -> None:
        """Copy each gradient of a unit to its home if the user has assigned it, or has changed the copy that
        `param.grad` returned."""
        for entry in gradients.unit.entries if self._hidden is not None else ():
            if entry.param.index in gradients.assigned:
                self._refuse_if_hidden(entry)
        scale = self._overflow.loss_scale
        if scale == 1.0 and gradients.paged is None:
            gradients.store_assigned()
        elif changed := gradients.take_changed(scale):
            if scale != 1.0:
                self.promote(gradients, _CHANGED_GRADIENT)
            for entry, value in changed:
                gradients.replace(entry, value if scale == 1.0 else value.to(torch.float32) * scale)

    def take_unstored(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return the gradients that no hook has moved to their homes, and remove them from the parameters."""
        found = []
        with torch._C.DisableTorchFunctionSubclass():
            for param in self._places:
                if (grad := GRAD_SLOT.__get__(param)) is not None:
                    GRAD_SLOT.__set__(param, None)
                    if param.grad_dtype is None:  # set by `show_sum` in a backward that has failed
                        param.grad_dtype = param.dtype
                    found.append((param, grad))
        return found

    def _refuse_if_hidden(self, entry: FlatEntry) -> None:
        if self._hidden is not None:
            raise ModelError(f"The gradient of {entry.param.name} cannot be read or changed now: {self._hidden}")

    # -- norms -------------------------------------------------------------------------------------------------------

    def norms(self) -> Sequence[tuple[ParamSpec, Norm]]:
        """Return (parameter, norm of its gradient) for each parameter that has a gradient, in the order of
        `model.parameters()`."""
        found = self._found()
        norms: dict[int, Norm] = {}
        missing: dict[int, torch.Tensor] = {}
        on_device: dict[int, torch.Tensor] = {}
        for gradients, entry in found:
            index = entry.param.index
            # a user may have changed a shown gradient, also by .data, which moves no counter
            if index not in gradients.norms or index in gradients.shown:
                if gradients.paged is not None:
                    assert not gradients.frozen, "measured on arrival: the update frees it"
                    with gradients.opened() as flat:
                        norms[index] = self._norms.in_memory([flat[entry.start : entry.stop]])[0]
                    continue
                grad = gradients.flat[entry.start : entry.stop]
                (missing if grad.is_cpu else on_device)[index] = grad
        if missing:
            norms.update(zip(missing, self._norms.in_memory(list(missing.values())), strict=True))
        if on_device:
            norms.update(zip(on_device, self._norms.on_device(list(on_device.values())), strict=True))
        return [
            (entry.param, norms[index] if (index := entry.param.index) in norms else gradients.norms[index])
            for gradients, entry in found
        ]

    def _found(self) -> list[tuple[UnitGradients, FlatEntry]]:
        """Return the `UnitGradients` and the `FlatEntry` of each parameter with a gradient, in the order of
        `model.parameters()`."""
        found = {}
        for gradients in self._units.values():
            for entry in gradients.unit.entries:
                if entry.param.index in gradients.present:
                    found[entry.param.index] = gradients, entry
        return list(map(found.__getitem__, sorted(found)))

    def close(self) -> None:
        """Drop all gradients, and make `param.grad` autograd's own again. Called after the lanes have ended."""
        self.hide()
        set_gradient_home(self._places, None)
        self._in_flight.clear()
        self._places.clear()
        self._units.clear()
        for tier, nbytes in self._extra_nbytes.items():
            self._ledger.discharge(tier, "gradient_sums", nbytes)
        self._extra_nbytes.clear()


def _sum_nbytes(gradients: UnitGradients) -> int:
    """Return the bytes of the unit's gradients as fp32 sums; 0 for an fp32 unit, which needs no conversion."""
    if gradients.unit.dtype == torch.float32:
        return 0
    return 4 * gradients.flat.numel() * (1 if gradients.spare is None else 2)
