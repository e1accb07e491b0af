"""A checkpoint on its way to the homes of a run: sub-group by sub-group, whatever the placement that wrote it; the next
are read while one is made from what was read.

Masters and state are read to where they rest, or to a staging buffer; parameters become their masters, rounded, as
after an update. Driver thread, while no update runs and nothing is read ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from tiered_zero.checkpoint.matching import Matched
from tiered_zero.checkpoint.planner import Group, Target
from tiered_zero.checkpoint.portable import RunState, field_range, field_spec, in_memory_order, memory_order
from tiered_zero.checkpoint.tag_manifest import TagManifest
from tiered_zero.checkpoint.tensors import copy_values
from tiered_zero.errors import InternalError
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import QUANTIZED_BLOCK_NUMEL, ParamPiece
from tiered_zero.optim.quantized import decode, encode
from tiered_zero.optim.rule import Run
from tiered_zero.optim.state_formats import split_master
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.tiers.inventory import Home
from tiered_zero.update.subgroup_io import SubGroupWork

_BLOCK = QUANTIZED_BLOCK_NUMEL
_STEP_NUMEL = 1 << 16
"""Masters that are split at once: temporaries stay small."""

Groups = Generator[Group | None, None, None]
"""Groups of targets, as they get memory. None: when the next is asked for, all before it are filled."""


@dataclass(kw_only=True)
class _Loading:
    """A sub-group that is being filled. `masters`: see `StateLoader._masters`; `stepped`: the pieces with state in the
    checkpoint; `conversions`: what is to be done once `group` is filled."""

    layout: StateLayout
    work: SubGroupWork
    masters: torch.Tensor | None = None
    stepped: Sequence[ParamPiece] = ()
    conversions: Sequence[Callable[[], object]] = ()
    group: Group | None = None


@final
class StateLoader:
    """Writes what `matched` says of a checkpoint to a run, which the caller reads. `groups`: the live param groups."""

    def __init__(
        self,
        state: RunState,
        manifest: TagManifest,
        matched: Matched,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self._state = state
        self._manifest = manifest
        self._matched = matched
        self._groups = groups
        self._joined: torch.Tensor | None = None

    def steps(self) -> Groups:
        """Yield what is to be read, sub-group by sub-group, and write it to its home. Where this ends early some values
        are new and some old."""
        yield from self._load_subgroups()
        for unit in self._state.units:
            if unit.index not in self._state.updated_units:
                yield from self._load_unit(unit)
        yield from self._load_buffers()

    # -- masters and state ---------------------------------------------------------------------------------------------

    def _load_subgroups(self) -> Groups:
        io, filling, written = self._state.io, deque[_Loading](), deque[SubGroupWork]()
        try:
            for layout in self._state.layouts:
                while (work := self._open(layout)) is None:
                    if written:
                        io.finish(written.popleft())
                    elif filling:
                        yield None
                        self._end_filled(filling, written)
                    else:
                        raise InternalError("A staging buffer was expected to be free for a load; all are in use.")
                filling.append(loading := _Loading(layout=layout, work=work))
                yield self._begin(loading)
                if loading.conversions or layout.masters.needs_params:
                    yield None  # its memory besides the state is of one sub-group at a time
                self._end_filled(filling, written)
                while written and written[0].is_written():
                    io.finish(written.popleft())
            yield None
            self._end_filled(filling, written)
            while written:
                io.finish(written.popleft())
        except BaseException:
            io.cancel([*written, *(loading.work for loading in filling)])
            raise

    def _keeps_values(self, layout: StateLayout) -> bool:
        """Whether a parameter of it is not in the checkpoint."""
        entries = (entry for segment in layout.subgroup.segments for entry in segment.unit.entries)
        return any(entry.param.numel and entry.param.name not in self._matched.params for entry in entries)

    def _open(self, layout: StateLayout) -> SubGroupWork | None:
        has_state, keeps = self._state.stepper.has_state(layout), self._keeps_values(layout)
        return self._state.io.open_nowait(layout, "param", initialized=has_state, reads=keeps)

    def _begin(self, loading: _Loading) -> Group:
        """Make the targets of a sub-group."""
        layout, work = loading.layout, loading.work
        for read in work.reads:
            self._state.io.wait(read, work)
        self._state.io.bind_outputs(work)
        masters = loading.masters = self._masters(layout, work)
        stepped = [piece for piece in layout.subgroup.pieces if piece.param.name in self._matched.states]
        loading.stepped = stepped
        self._clear_state(layout, work.raw, stepped)
        targets, loading.conversions = self._state_targets(layout, work.raw, stepped)
        loading.group = Group(targets=[*self._value_targets(layout, masters), *targets])
        return loading.group

    def _end_filled(self, filling: deque[_Loading], written: deque[SubGroupWork]) -> None:
        """Make the rest of the sub-groups that are filled from what was read, and begin to write them."""
        while filling and filling[0].group is not None and filling[0].group.filled.done():
            layout, work, masters = filling[0].layout, filling[0].work, filling[0].masters
            assert masters is not None, "they are made with the group"
            for convert in filling[0].conversions:
                convert()
            self._store_masters(layout, work, masters)
            if stepped := filling[0].stepped:
                self._initialize_others(layout, work, masters)
                scalars = {piece.index: self._matched.states[piece.param.name] for piece in stepped}
                self._state.stepper.replace_scalars(layout.subgroup, scalars)
            else:
                self._state.stepper.drop_state(layout.subgroup)
            after = self._state.runtime.accelerator.record_compute()
            self._state.io.write(work, {}, after, masters_alone=not stepped)
            written.append(filling.popleft().work)

    def _clear_state(self, layout: StateLayout, raw: torch.Tensor, stepped: Sequence[ParamPiece]) -> None:
        """Set to zero what of the state no target of `stepped` fills: padding, and the pieces without state."""
        if self._state.rule.elementwise and any(len(layout.fields(piece)) < len(layout.arrays) for piece in stepped):
            raw[layout.state_start : layout.nbytes].zero_()
            return
        filled = {piece.index for piece in stepped}
        gaps = _gaps([(piece.start, piece.stop) for piece in stepped], layout.subgroup.numel)
        for array in layout.arrays:
            field, end = array.field, array.offset + array.field.nbytes
            if array.piece is None:
                for start, stop in gaps:
                    first, last = (-(-at // field.block_numel) * field.dtype.itemsize for at in (start, stop))
                    raw[array.offset + first : array.offset + last].zero_()
            elif array.piece not in filled:
                raw[array.offset : end].zero_()
            raw[end : align_up(end, PAGE_NBYTES)].zero_()

    def _masters(self, layout: StateLayout, work: SubGroupWork) -> torch.Tensor:
        """[numel] fp32 to be filled: the masters themselves, or, where they rest as remainders, a copy. Zeros, or what
        they are now where some of them stay."""
        keeps = self._keeps_values(layout)
        if not layout.masters.needs_params:
            masters = layout.master(work.raw)
            for start, stop in _gaps(_entries(layout), layout.subgroup.numel):
                masters[start:stop].zero_()
            return masters
        joined = self._zeros(layout.subgroup.numel, work.raw.device)
        remainder, marks = layout.master(work.raw), layout.marks(work.raw)
        assert marks is not None, "a format that needs parameters keeps marks"
        for segment, params in zip(layout.subgroup.segments, work.outs, strict=True) if keeps else ():
            own = slice(segment.start, segment.stop)
            joined[own] = layout.masters.join((remainder[own], marks[own]), params)
        return joined

    def _zeros(self, numel: int, device: torch.device) -> torch.Tensor:
        """Lend [numel] fp32: the same memory to each sub-group."""
        if self._joined is None or self._joined.numel() < numel or self._joined.device != device:
            self._joined = None
            self._joined = torch.empty(numel, device=device)
        return self._joined[:numel].zero_()

    def _value_targets(self, layout: StateLayout, masters: torch.Tensor) -> Iterator[Target]:
        """Every parameter with elements in the sub-group, also those in no param group: their masters follow them."""
        for segment in layout.subgroup.segments:
            for entry, low, high in segment.entries():
                if (key := self._matched.params.get(entry.param.name)) is not None:
                    first = segment.start + low - segment.unit_start
                    yield self._target(key, low - entry.start, masters[first : first + high - low], entry.param)

    def _target(self, key: str, start: int, values: torch.Tensor, param: ParamSpec | None = None) -> Target:
        entry = self._manifest.tensors[key]
        return Target(
            key=key,
            start=start,
            stop=start + values.numel(),
            shape=entry.shape,
            order=None if param is None else memory_order(param),
            values=values,
        )

    def _state_targets(
        self, layout: StateLayout, raw: torch.Tensor, stepped: Sequence[ParamPiece]
    ) -> tuple[list[Target], list[Callable[[], object]]]:
        """List targets for the state of pieces, and what converts it, once they are filled, from another format."""
        elementwise, tensors = self._state.rule.elementwise, self._manifest.tensors
        targets: list[Target] = []
        conversions: list[Callable[[], object]] = []
        for piece in stepped:
            name = self._matched.params[piece.param.name].partition("/")[2]
            views = layout.state(raw, piece, piece.start, piece.stop)
            for field in layout.fields(piece):
                scale = f"{field.name}_scale"
                if field.name.endswith("_scale") and field.name.removesuffix("_scale") in views:
                    continue  # with its codes
                key, view = f"{field.name}/{name}", in_memory_order(views[field.name])
                start, stop = field_range(piece, field, elementwise)
                spec = field_spec(piece.param, field, elementwise)
                param = piece.param if spec.shape == piece.param.shape else None
                own_coded, saved_coded = scale in views, f"{scale}/{name}" in tensors
                if own_coded == saved_coded and tensors[key].dtype == spec.dtype:
                    targets.append(self._target(key, start, view, param))
                    if own_coded:
                        targets.append(self._target(f"{scale}/{name}", start // _BLOCK, views[scale]))
                    continue
                floats = torch.empty(stop - start, device=raw.device)
                if saved_coded:
                    codes = torch.empty(stop - start, dtype=getattr(torch, tensors[key].dtype), device=raw.device)
                    first, last = start // _BLOCK, -(-stop // _BLOCK)
                    scales = torch.empty(last - first, device=raw.device)
                    targets.append(self._target(key, start, codes, param))
                    targets.append(self._target(f"{scale}/{name}", first, scales))
                    conversions.append(partial(decode, codes, scales, floats, None))
                else:
                    targets.append(self._target(key, start, floats, param))
                if own_coded:
                    conversions.append(partial(encode, view, views[scale], floats, None, None))
                else:
                    conversions.append(partial(view.copy_, floats))
        return targets, conversions

    def _store_masters(self, layout: StateLayout, work: SubGroupWork, masters: torch.Tensor) -> None:
        """Set parameters to their masters, rounded, and what of masters rests in another form."""
        if not layout.masters.needs_params:
            for segment, out in zip(layout.subgroup.segments, work.outs, strict=True):
                copy_values(out, masters[segment.start : segment.stop])
            return
        remainders, marks = layout.master(work.raw), layout.marks(work.raw)
        assert marks is not None, "a format that needs parameters keeps marks"
        for segment, out in zip(layout.subgroup.segments, work.outs, strict=True):
            for first in range(0, segment.numel, _STEP_NUMEL):
                stop = min(first + _STEP_NUMEL, segment.numel)
                own = slice(segment.start + first, segment.start + stop)
                params, remainder, mark = split_master(masters[own])
                out[first:stop].copy_(params)
                remainders[own].copy_(remainder)
                marks[own].copy_(torch.where(mark, -marks[own].abs(), marks[own].abs()))

    def _initialize_others(self, layout: StateLayout, work: SubGroupWork, masters: torch.Tensor) -> None:
        """Make the state of the pieces that have none yet, beside those that have."""
        for piece in layout.subgroup.pieces:
            if piece.param.name not in self._matched.states:
                own = masters[piece.start : piece.stop]
                own = own if self._state.rule.elementwise else piece.param.view(own)
                state = layout.state(work.raw, piece, piece.start, piece.stop)
                self._state.rule.init_state(
                    Run(master=own, grad=own, state=state, scalars={}, hyper=self._groups[piece.group])
                )

    # -- parameters without a master, and buffers ----------------------------------------------------------------------

    def _load_unit(self, unit: Unit) -> Groups:
        """Write the parameters of a unit that no update steps, to every home that it has."""
        inventory = self._state.inventory
        homes = [home for kind in ("param", "param_back") if (home := inventory.find(unit, kind)) is not None]
        if inventory.find(unit, "param") is None:
            yield from _filled(self._unit_targets(unit, self._state.param_flat(unit), 0))
        for home in homes:
            view = home.tier.view(home.slot)
            if view is not None:
                yield from _filled(self._unit_targets(unit, view[: home.slot.nbytes].view(unit.dtype), home.start))
            else:
                yield from self._load_windows(unit, home)

    def _load_windows(self, unit: Unit, home: Home) -> Groups:
        """Read and write a unit on nvme in the parts in which it was written first, so that they are verified."""
        staging = self._state.param_staging
        assert staging is not None, "a tier without views is planned with staging buffers"
        keeps = any(entry.param.numel and entry.param.name not in self._matched.params for entry in unit.entries)
        for start in range(0, home.slot.nbytes, staging.buffer_nbytes):
            with staging.lease(min(staging.buffer_nbytes, home.slot.nbytes - start), home.slot.name) as lease:
                if keeps:
                    home.tier.read(home.slot, lease, start).wait()
                else:
                    lease.tensor.zero_()
                yield from _filled(
                    self._unit_targets(unit, lease.tensor.view(unit.dtype), home.start + start // unit.itemsize)
                )
                home.tier.write(home.slot, lease, start).wait()

    def _unit_targets(self, unit: Unit, flat: torch.Tensor, first: int) -> list[Target]:
        """`flat`: the elements of the unit from `first` on."""
        targets = []
        for entry in unit.entries:
            low, high = max(entry.start, first), min(entry.stop, first + flat.numel())
            key = self._matched.params.get(entry.param.name)
            if low < high and key is not None:
                targets.append(self._target(key, low - entry.start, flat[low - first : high - first], entry.param))
        return targets

    def _load_buffers(self) -> Groups:
        for name, buffer in self._state.named_buffers():
            if buffer.numel() and (key := self._matched.buffers.get(name)) is not None:
                value = torch.empty(buffer.shape, dtype=buffer.dtype)
                yield from _filled([self._target(key, 0, value.view(-1))])
                buffer.copy_(value)


def _filled(targets: Sequence[Target]) -> Groups:
    """Targets that are filled when this is done."""
    yield Group(targets=targets)
    yield None


def _entries(layout: StateLayout) -> list[tuple[int, int]]:
    """(first element in the sub-group, last + 1) of each parameter with elements in it."""
    found = []
    for segment in layout.subgroup.segments:
        for _, low, high in segment.entries():
            found.append((segment.start + low - segment.unit_start, segment.start + high - segment.unit_start))
    return found


def _gaps(ranges: Sequence[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """What disjoint `ranges`, in order, leave of [0, numel)."""
    edges = [0, *(edge for pair in ranges for edge in pair), numel]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
