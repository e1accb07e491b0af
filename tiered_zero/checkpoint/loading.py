"""Write a checkpoint to the homes of a run, sub-group by sub-group, whatever the placement that wrote it.

The next sub-groups are read while one is made from what was read. Masters and state are read to where they rest, or to
a staging buffer; parameters become their masters, rounded. Driver thread, while no update runs and nothing is read
ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch

from tiered_zero.checkpoint.matching import Matched
from tiered_zero.checkpoint.pipeline import run_ahead
from tiered_zero.checkpoint.portable import RunState
from tiered_zero.checkpoint.reader import Target, TargetReading, TensorReader
from tiered_zero.checkpoint.tensors import copy_values, in_memory_order, torch_dtype
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import QUANTIZED_BLOCK_NUMEL, ParamPiece
from tiered_zero.rules.quantized import decode, encode
from tiered_zero.rules.state_layout import StateLayout, gaps
from tiered_zero.tiers.inventory import Home
from tiered_zero.update.subgroup_io import SubGroupWork

_BLOCK = QUANTIZED_BLOCK_NUMEL
_CONVERTED_AHEAD = 2
"""Sub-groups that take memory besides their state while they are read."""


class _Placed(NamedTuple):
    """A parameter in a sub-group: from its element `start` on, in elements [first, last) of the sub-group."""

    param: ParamSpec
    start: int
    first: int
    last: int


@dataclass(kw_only=True)
class _Loading:
    """A sub-group that is being read. `masters`: see `StateLoader._masters`; `takes_memory`: whether they are a copy;
    `stepped`: the pieces with state in the checkpoint; `conversions`: what is to be done once all is read."""

    masters: torch.Tensor
    stepped: Sequence[ParamPiece]
    conversions: Sequence[Callable[[], object]]
    reading: TargetReading
    takes_memory: bool


@final
class StateLoader:
    """Writes what `matched` says of a checkpoint to a run. `groups`: the live param groups."""

    def __init__(
        self, state: RunState, reader: TensorReader, matched: Matched, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        self._state = state
        self._view = state.view
        self._io = state.stepper.io
        self._reader = reader
        self._tensors = reader.manifest.tensors
        self._matched = matched
        self._groups = groups
        self._loaded = matched.params.keys()
        self._loading: deque[_Loading] = deque()
        self._joined: list[torch.Tensor] = []
        """Memory for masters that rest as remainders, which is free."""

    def load(self) -> None:
        """Where this raises some values are new and some old. Raises CorruptionError, StoreError, TransferError."""
        run_ahead(self._io, self._view.layouts, self._begin, self._end)
        for unit in self._state.units:
            if unit.index not in self._state.updated_units:
                self._load_unit(unit)
        self._load_buffers()

    # -- masters and state ---------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        """Whether one more sub-group may take memory besides its state."""
        converted = [loading for loading in self._loading if loading.conversions or loading.takes_memory]
        return len(converted) < _CONVERTED_AHEAD

    def _keeps_values(self, layout: StateLayout) -> bool:
        """Whether a parameter of it is not in the checkpoint."""
        units = {segment.unit.index: segment.unit for segment in layout.subgroup.segments}.values()
        return not {entry.param.name for unit in units for entry in unit.entries if entry.param.numel} <= self._loaded

    def _begin(self, layout: StateLayout) -> SubGroupWork | None:
        """Begin to read a sub-group's values; None while no staging buffer is free, or too many take memory besides."""
        if not self._has_room():
            return None
        io, keeps, has_state = self._io, self._keeps_values(layout), self._view.scalars.has_state(layout)
        if (work := io.open_nowait(layout, "param", initialized=has_state, reads=keeps)) is None:
            return None
        try:
            for read in work.reads:
                io.wait(read, work)
            io.bind_outputs(work)
            entries = _entries(layout)
            masters = self._masters(layout, work, keeps, entries)
            stepped = [piece for piece in layout.subgroup.pieces if piece.param.name in self._matched.states]
            layout.clear(work.raw, stepped)
            targets, conversions = self._state_targets(layout, work.raw, stepped)
            reading = self._reader.submit([*self._value_targets(entries, masters), *targets])
        except BaseException:
            io.cancel([work])
            raise
        self._loading.append(
            _Loading(
                masters=masters,
                stepped=stepped,
                conversions=conversions,
                reading=reading,
                takes_memory=layout.masters.needs_params,
            )
        )
        return work

    def _end(self, work: SubGroupWork) -> None:
        """Make the rest of the oldest sub-group from what was read, and begin to write it."""
        loading, layout = self._loading.popleft(), work.layout
        self._reader.wait(loading.reading)
        for convert in loading.conversions:
            convert()
        self._store_masters(layout, work, loading.masters)
        if loading.stepped:
            others = [piece for piece in layout.subgroup.pieces if piece.param.name not in self._matched.states]
            self._view.initialize(layout, work.raw, others, self._groups)
            self._view.scalars.replace(layout, self._matched.scalars(layout))
        else:
            self._view.scalars.drop(layout)
        if layout.masters.needs_params:
            self._joined.append(loading.masters)
        after = self._state.runtime.accelerator.record_compute()
        self._io.write(work, {}, after, masters_alone=not loading.stepped)

    def _masters(
        self, layout: StateLayout, work: SubGroupWork, keeps: bool, entries: Sequence[_Placed]
    ) -> torch.Tensor:
        """[numel] fp32 to be filled: the masters, or a copy of remainders, joined. Zeros, or, where some stay, what
        they are."""
        if not layout.masters.needs_params:
            masters = layout.master(work.raw)
            for start, stop in gaps([(first, last) for _, _, first, last in entries], 0, layout.subgroup.numel):
                masters[start:stop].zero_()
            return masters
        numel, device = layout.subgroup.numel, work.raw.device
        whole = self._joined.pop() if self._joined else torch.empty(numel, device=device)
        if whole.numel() < numel or whole.device != device:
            whole = torch.empty(numel, device=device)
        joined = whole[:numel].zero_()
        for segment, params in zip(layout.subgroup.segments, work.outs, strict=True) if keeps else ():
            joined[segment.start : segment.stop] = layout.masters.join(layout.master_parts(work.raw, segment), params)
        return joined

    def _value_targets(self, entries: Sequence[_Placed], masters: torch.Tensor) -> Iterator[Target]:
        """Every parameter with elements in the sub-group, also those in no param group: their masters follow them."""
        for param, start, first, last in entries:
            if (key := self._matched.params.get(param.name)) is not None:
                yield _target(key, start, masters[first:last], param)

    def _state_targets(
        self, layout: StateLayout, raw: torch.Tensor, stepped: Sequence[ParamPiece]
    ) -> tuple[list[Target], list[Callable[[], object]]]:
        """List targets for the state of pieces, and what converts it, once they are filled, from another format."""
        elementwise, tensors = self._view.rule.elementwise, self._tensors
        targets: list[Target] = []
        conversions: list[Callable[[], object]] = []
        for piece in stepped:
            name = self._matched.params[piece.param.name].partition("/")[2]
            start = piece.param_start if elementwise else 0
            views = layout.state(raw, piece, piece.start, piece.stop)
            for field, shaped in views.items():
                if field.endswith("_scale") and field.removesuffix("_scale") in views:
                    continue  # with its codes
                key, scale, view = f"{field}/{name}", f"{field}_scale", in_memory_order(shaped)
                param = piece.param if elementwise or shaped.shape == piece.param.shape else None
                own_coded, saved_coded = scale in views, f"{scale}/{name}" in tensors
                saved_dtype = torch_dtype(tensors[key].dtype)
                if own_coded == saved_coded and saved_dtype == view.dtype:
                    targets.append(_target(key, start, view, param))
                    if own_coded:
                        targets.append(_target(f"{scale}/{name}", start // _BLOCK, views[scale]))
                    continue
                floats = torch.empty(view.numel(), device=raw.device)
                if saved_coded:
                    codes = torch.empty(view.numel(), dtype=saved_dtype, device=raw.device)
                    scales = torch.empty(-(-view.numel() // _BLOCK), device=raw.device)
                    targets.append(_target(key, start, codes, param))
                    targets.append(_target(f"{scale}/{name}", start // _BLOCK, scales))
                    conversions.append(partial(decode, codes, scales, floats, None))
                else:
                    targets.append(_target(key, start, floats, param))
                if own_coded:
                    conversions.append(partial(encode, view, views[scale], floats, None, None))
                else:
                    conversions.append(partial(view.copy_, floats))
        return targets, conversions

    def _store_masters(self, layout: StateLayout, work: SubGroupWork, masters: torch.Tensor) -> None:
        """Set parameters to their masters, rounded, and what of masters rests in another form."""
        for segment, out in zip(layout.subgroup.segments, work.outs, strict=True):
            own = masters[segment.start : segment.stop]
            if layout.masters.needs_params:
                layout.masters.replace(layout.master_parts(work.raw, segment), own, out)
            else:
                copy_values(out, own)

    # -- parameters without a master, and buffers ----------------------------------------------------------------------

    def _load_unit(self, unit: Unit) -> None:
        """Write the parameters of a unit that no update steps, to every home that it has."""
        inventory = self._state.inventory
        homes = [home for kind in ("param", "param_back") if (home := inventory.find(unit, kind)) is not None]
        if inventory.find(unit, "param") is None:
            self._fill(self._unit_targets(unit, self._state.param_flat(unit), 0))
        for home in homes:
            view = home.tier.view(home.slot)
            if view is not None:
                self._fill(self._unit_targets(unit, view[: home.slot.nbytes].view(unit.dtype), home.start))
            else:
                self._load_windows(unit, home)

    def _load_windows(self, unit: Unit, home: Home) -> None:
        """Read and write a unit on nvme in the parts in which it was written first, so that they are verified."""
        staging = self._state.param_staging
        assert staging is not None, "a tier without views is planned with staging buffers"
        keeps = not {entry.param.name for entry in unit.entries if entry.param.numel} <= self._loaded
        for start in range(0, home.slot.nbytes, staging.buffer_nbytes):
            with staging.lease(min(staging.buffer_nbytes, home.slot.nbytes - start), home.slot.name) as lease:
                if keeps:
                    home.tier.read(home.slot, lease, start).wait()
                else:
                    lease.tensor.zero_()
                flat = lease.tensor.view(unit.dtype)
                self._fill(self._unit_targets(unit, flat, home.start + start // unit.itemsize))
                home.tier.write(home.slot, lease, start).wait()

    def _unit_targets(self, unit: Unit, flat: torch.Tensor, first: int) -> list[Target]:
        """`flat`: the elements of the unit from `first` on."""
        targets = []
        for entry in unit.entries:
            low, high = max(entry.start, first), min(entry.stop, first + flat.numel())
            key = self._matched.params.get(entry.param.name)
            if low < high and key is not None:
                targets.append(_target(key, low - entry.start, flat[low - first : high - first], entry.param))
        return targets

    def _load_buffers(self) -> None:
        for name, buffer in self._state.named_buffers():
            if buffer.numel() and (key := self._matched.buffers.get(name)) is not None:
                value = torch.empty(buffer.shape, dtype=buffer.dtype)
                self._fill([_target(key, 0, value.view(-1))])
                buffer.copy_(value)

    def _fill(self, targets: Sequence[Target]) -> None:
        self._reader.wait(self._reader.submit(targets))


def _target(key: str, start: int, values: torch.Tensor, param: ParamSpec | None = None) -> Target:
    order = None if param is None else param.order
    return Target(key=key, start=start, stop=start + values.numel(), values=values, order=order)


def _entries(layout: StateLayout) -> list[_Placed]:
    """List the parameters with elements in a sub-group."""
    found = []
    for segment in layout.subgroup.segments:
        before = segment.start - segment.unit_start
        for entry, low, high in segment.entries():
            found.append(_Placed(entry.param, low - entry.start, before + low, before + high))
    return found
