"""Store gradients between backward and the update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import ModelError
from tiered_zero.grads.homes import GRAD_SLOT, GradientHomes
from tiered_zero.grads.in_flight import Arrival, InFlightGradients
from tiered_zero.grads.norms import GradNorm, Norm, span_squares
from tiered_zero.grads.overflow import OverflowGuard
from tiered_zero.grads.param_grads import ParamGrads
from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import FlatEntry, ParamSpec, Unit
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.step_gradients import StepGradients


class GradientStore:
    """Takes each gradient from autograd and adds it up at its unit's home, on the device or in host memory.

    Sums on the device run on compute; copies and sums to host memory run on the reduce lane. A gradient first waits for
    the unit's last update, which may still read the one before. Driver or autograd's thread.
    """

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
        """`overflow`: holds the loss scale, which multiplies gradients at their homes."""
        self.homes = GradientHomes(params, units, inventory, runtime, in_flight)
        self.param_grads = ParamGrads(self.homes, overflow)
        self._units, self._places = self.homes.units, self.homes.places
        self._norms = norms
        self._accelerator = runtime.accelerator
        self._recorder = runtime.recorder
        self._span = runtime.accelerator.timer(runtime.recorder)
        self._ledger = runtime.ledger
        self._in_flight = in_flight
        self._measures_norms = True

    # -- filling -----------------------------------------------------------------------------------------------------

    def begin_backward(self, *, is_last: bool) -> None:
        """Measure gradients during their transfer if this is the step's last backward; a later one would change the
        norms."""
        self._measures_norms = is_last

    def accumulate(self, param: nn.Parameter) -> Unit | None:
        """Move `param.grad` to its home, adding it to what is there, and set `param.grad` to None. Returns the
        parameter's unit once all of its gradients of this backward have arrived."""
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
                f"The gradient of {entry.param.name} came with a graph, as backward(create_graph=True) makes; where "
                "it rests it has none, so a penalty on param.grad would have no gradient. Compute such gradients by "
                "torch.autograd.grad(loss, params, create_graph=True), and add the penalty to the loss."
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
        """Move a gradient [numel] to its home. The home holds whole units."""
        index = entry.param.index
        if not gradients.arrived:  # else an earlier gradient of this unit has waited
            self.homes.wait_update(gradients.unit)
        if gradients.shown:
            self.param_grads.store_shown(gradients)
        adds = gradients.adds_to(index)
        if adds:
            self.homes.promote(gradients)
        gradients.zeroed.discard(index)
        place = slice(entry.start, entry.stop)
        if not gradients.on_device:
            if index in gradients.arrived:  # a part of the graph ran twice
                self._in_flight.flush()  # a batch has one gradient per parameter
            arrival = Arrival(index=index, place=place, source=source, adds=adds)
            self._in_flight.send(gradients, arrival, measures=self._measures_norms)
        elif adds:
            gradients.flat[place].add_(source)
        else:
            gradients.flat[place].copy_(source)

    def _keep_waiting(self, gradients: UnitGradients, entry: FlatEntry, source: torch.Tensor) -> None:
        """Keep this rank's gradient [numel] on the device until a bucket takes it; add it in fp32 to one that is kept
        already."""
        waiting, index = gradients.waiting, entry.param.index
        if index in waiting:
            total = waiting[index].to(torch.float32) + source
            self._ledger.charge("device", "gradient_in_flight", total.nbytes - waiting[index].nbytes)
            waiting[index] = total
            return
        self._ledger.charge("device", "gradient_in_flight", source.nbytes)
        waiting[index] = source

    def free_taken(self, taken: Mapping[int, torch.Tensor]) -> None:
        """Free the memory of what buckets have copied out of `UnitGradients.waiting`."""
        self._ledger.discharge("device", "gradient_in_flight", sum(source.nbytes for source in taken.values()))

    def receive(
        self,
        unit: Unit,
        span: range,
        source: torch.Tensor,
        *,
        adds: bool,
        after: Transfer,
        divisor: float = 1.0,
        measures: bool = False,
    ) -> Transfer:
        """Move reduced gradients to elements `span` of their unit's flat. Every gradient of a shard takes this way.
        Driver or autograd's thread.

        `source`: [n], complete once `after` is done; it may be read until the returned transfer is done. `adds`: add in
        fp32 to what earlier reductions of this step brought, instead of replacing it. `divisor`: divide `source` by it,
        in place. `measures`: also sum the squares of the averages: on the device if nothing more is added there, in
        host memory at their home.
        """
        gradients = self._units[unit.index]
        self.homes.wait_update(unit)
        if adds:
            self.homes.promote(gradients)
        squares = gradients.squares

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

        marks = [after, self._accelerator.record_compute()]  # compute has made the flat fp32, or set it to 0
        gradients.last = gradients.submit(self._accelerator.lane("reduce"), bring, marks, [source])
        return gradients.last

    def show_sum(self, param: nn.Parameter) -> None:
        """Add the gradient at home to `param.grad`, so that hooks see the sum, as in plain PyTorch; the sum replaces it
        at home. If ranks keep shards of the unit, or it has been reduced, hooks see this rank's gradient of this
        backward instead."""
        with torch._C.DisableTorchFunctionSubclass():
            grad: torch.Tensor | None = GRAD_SLOT.__get__(param)
        if grad is None or (place := self._places.get(param)) is None:
            return
        gradients, entry = place
        gradients.check_new(entry, grad)
        self.param_grads.store_shown(gradients)
        if gradients.shard is not None or gradients.num_sums or not gradients.adds_to(entry.param.index):
            return
        self.homes.promote(gradients)
        gradients.wait_transfers()
        with gradients.opened() as flat:
            total = entry.param.view(flat[entry.start : entry.stop]).to(grad.device) + grad
        gradients.present.discard(entry.param.index)
        with torch._C.DisableTorchFunctionSubclass():
            if total.dtype != param.dtype:
                param.grad_dtype = None  # the sum is fp32
            GRAD_SLOT.__set__(param, total)

    def finish_transfers(self) -> None:
        """End a backward: keep on the device only gradients whose transfers have not ended. Raises transfer errors."""
        self._in_flight.end_backward()
        for gradients in self._units.values():
            if gradients.shown:  # users may hold views of the flat
                gradients.wait_transfers()

    def end_backward(self) -> None:
        for gradients in self._units.values():
            gradients.arrived.clear()

    def wait_transfers(self) -> None:
        """Block until every gradient so far is at its home, including empty ones."""
        self.homes.wait_transfers()

    def freeze(self, unit: Unit, into: StepGradients) -> None:
        """Detach a unit's gradients for an update that begins in backward; later gradients of this step are refused."""
        gradients = self._units[unit.index]
        self.param_grads.store_shown(gradients)
        gradients.expire_views()
        into.shares[unit.index] = gradients.share()
        gradients.frozen = True

    def keep(self, unit: Unit) -> None:
        """Keep a unit's gradients from NVMe in memory once they are there: the update under way will soon be done with
        them."""
        if (flat := self._units[unit.index].paged) is not None:
            self._accelerator.lane("reduce").submit(partial(flat.windows.keep, flat), waits=False)

    def detach_step(self) -> StepGradients:
        """Return this step's gradients for its update, and begin the next step without gradients. The update reads them
        in place: a unit's next gradient waits for its update, or goes to the spare flat."""
        step = StepGradients()
        for gradients in self._units.values():
            step.shares[gradients.unit.index] = gradients.share()
            gradients.clear()
            if gradients.spare is not None or gradients.paged_spare is not None:
                gradients.swap()
        return step

    def discard(self) -> None:
        """Discard this step's gradients, including those that a failed backward left on parameters, after all transfers
        have ended. Raises the first transfer error."""
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
            self.param_grads.take_unstored()

    def abort(self) -> None:
        """Free what a failed `discard` left behind. The lanes are idle."""
        self._in_flight.clear()

    def zero(self) -> None:
        """Set gradients to 0 instead of None, including those of earlier steps since they were last set to None."""
        for gradients in self._units.values():
            if gradients.present or gradients.earlier or gradients.num_sums:
                self.homes.wait_update(gradients.unit)
                self.free_taken(gradients.waiting)
                gradients.set_zero()

    def reset_zero(self) -> None:
        """Clear the record of what `zero` sets to 0: all gradients were set to None."""
        for gradients in self._units.values():
            gradients.earlier.clear()

    def accumulators(self) -> list[Any]:
        """Return autograd's node that accumulates the gradient of each trainable parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            return [get_gradient_edge(param).node for param in self._places if param.requires_grad]

    # -- reading -----------------------------------------------------------------------------------------------------

    def present(self) -> Sequence[tuple[ParamSpec, torch.Tensor]]:
        """Return the parameters with a gradient, and its [numel] view, in the order of `model.parameters()`."""
        found: list[tuple[ParamSpec, torch.Tensor]] = []
        for gradients, entry in self._found():
            with gradients.opened() as flat:
                part = flat[entry.start : entry.stop]
                found.append((entry.param, part if gradients.paged is None else part.clone()))
        return found

    def norms(self) -> Sequence[tuple[ParamSpec, Norm]]:
        """Return the parameters with a gradient, and its norm, in the order of `model.parameters()`. Computes the norms
        that were not taken on arrival."""
        found = self._found()
        norms: dict[int, Norm] = {}
        missing: dict[int, torch.Tensor] = {}
        on_device: dict[int, torch.Tensor] = {}
        for gradients, entry in found:
            index = entry.param.index
            if index not in gradients.norms or index in gradients.shown:  # a user may have changed the gradient
                if gradients.paged is not None:
                    norms[index] = self._norm_at_home(gradients, entry)
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

    def _norm_at_home(self, gradients: UnitGradients, entry: FlatEntry) -> Norm:
        assert gradients.paged is None or not gradients.frozen, "measured on arrival: the update frees it"
        with gradients.opened() as flat:
            return self._norms.of(flat[entry.start : entry.stop])

    def _found(self) -> list[tuple[UnitGradients, FlatEntry]]:
        """Return the gradients of the step, in the order of `model.parameters()`."""
        found = {}
        for gradients in self._units.values():
            for entry in gradients.unit.entries:
                if entry.param.index in gradients.present:
                    found[entry.param.index] = gradients, entry
        return list(map(found.__getitem__, sorted(found)))

    def close(self) -> None:
        """Drop all gradients. The lanes have ended."""
        self._in_flight.clear()
        self.homes.close()
