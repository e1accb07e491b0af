"""Load a checkpoint: compare it with a run, read its tensors, write them to the run's homes (the slots on its tiers).
Names, shapes and dtypes are checked before the run changes. Checksums are verified during the reads."""

from __future__ import annotations

import ctypes
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, final

import torch

from tiered_zero.checkpoint.driver import from_json
from tiered_zero.checkpoint.index import (
    BUFFER,
    MASTER,
    PARAM,
    SOURCE_ITEMSIZES,
    VALUE_KINDS,
    RunState,
    TagManifest,
    TensorEntry,
    describe_field,
    run_ahead,
    torch_dtype,
)
from tiered_zero.errors import ConfigError, ModelError, StoreError
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import QUANTIZED_BLOCK_NUMEL, ParamPiece
from tiered_zero.record.data_files import RecordReader, Wanted
from tiered_zero.record.files import MOST_INTEGER
from tiered_zero.rules.quantized import dequantize, quantize
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.rules.torch_rule import same
from tiered_zero.tiers.tier import Home
from tiered_zero.update.state_view import StateView
from tiered_zero.update.subgroup_io import SubGroupWork

logger = logging.getLogger("tiered_zero")

_BLOCK = QUANTIZED_BLOCK_NUMEL
_NUM_NAMED = 5
_CONVERTED_AHEAD = 2
"""The largest number of sub-groups in flight that need a conversion. It is low, because a conversion takes additional
memory."""

_STEP_NUMEL = 1 << 15
"""The most elements that `torch.Tensor.copy_` converts on the calling thread alone (at::internal::GRAIN_SIZE)."""

_FACTS = {
    "tiered_zero": "tiered_zero",
    "torch": "torch",
    "kernel": "the update kernel's level",
    "rule": "the update rule",
    "world_size": "a number of ranks of",
    "num_threads": "a number of CPU threads of",
}
"""Field of `WrittenBy` -> its name in messages. If two runs differ in one of these fields, the results of their steps
may not be equal in every bit."""


# -- matching ----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class Matched:
    """The keys of a checkpoint from which a run loads its values. `params`: parameter name -> key; a parameter that is
    not in this dict keeps its value. `buffers`: buffer name -> key. `states`: parameter name -> saved scalars, such as
    the step count; only for parameters that load optimizer state."""

    params: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)

    def scalars(self, layout: StateLayout) -> dict[int, dict[str, Any]]:
        """Return piece index -> saved scalars, for each piece of the sub-group that loads optimizer state."""
        names = {piece.index: piece.param.name for piece in layout.subgroup.pieces}
        return {index: self.states[name] for index, name in names.items() if name in self.states}


def match(state: RunState, manifest: TagManifest, *, strict: bool, with_state: bool, convert: bool) -> Matched:
    """Find the checkpoint's key for each value that the run loads, and check the value's shape and dtype. `strict`:
    refuse missing and unexpected names; False: log them. `with_state`: also load optimizer state. `convert`: allow
    rounding state to the run's format. Raises ModelError for another model, StoreError for values that cannot be read,
    and ConfigError for rounding that is not allowed."""
    tensors, params, missing = manifest.tensors, dict[str, str](), list[str]()
    for spec in state.specs:
        names = (spec.name, *spec.aliases)  # the checkpoint may have a tied parameter under another of its names
        keys = (f"{kind}/{name}" for kind in (MASTER, PARAM) for name in names)
        if spec.numel and (key := next((key for key in keys if key in tensors), None)) is not None:
            params[spec.name] = key
        elif spec.numel:
            missing.append(spec.name)
    own_buffers = state.buffers()
    buffers = {name: key for name in own_buffers if (key := f"{BUFFER}/{name}") in tensors}
    missing += [name for name, buffer in own_buffers.items() if buffer.numel() and name not in buffers]
    _check_names(manifest, missing, {*params.values(), *buffers.values()}, strict=strict)
    for spec in state.specs:
        if (key := params.get(spec.name)) is not None:
            _check_value(key, tensors[key], spec.shape, spec.dtype)
    for name, key in buffers.items():
        _check_value(key, tensors[key], tuple(own_buffers[name].shape), own_buffers[name].dtype)
    states: dict[str, dict[str, Any]] = {}
    if with_state and state.view.layouts:
        states = _match_states(state.view, manifest, params, convert)
    return Matched(params=params, states=states, buffers=buffers)


def differences(written_by: Mapping[str, Any], now: Mapping[str, Any]) -> Sequence[str]:
    """Compare the run that saved with this run. Return a message for each difference, such as another version of torch,
    that can change the bits of later steps. `written_by`, `now`: the fields of both runs' `WrittenBy`."""
    lines = []
    for name, what in _FACTS.items():
        then, here = written_by.get(name), now.get(name)
        if then != here:
            lines.append(f"the checkpoint was written with {what} {then}; this run has {here}: later steps may differ")
    return lines


def _check_names(manifest: TagManifest, missing: Sequence[str], used: set[str], strict: bool) -> None:
    values = {key for key, entry in manifest.tensors.items() if key.partition("/")[0] in VALUE_KINDS and entry.numel}
    unexpected = sorted(key.partition("/")[2] for key in values - used)
    if not missing and not unexpected:
        return
    lines = [f"missing: {_some(missing)}"] if missing else []
    lines += [f"not in the model: {_some(unexpected)}"] if unexpected else []
    text = "; ".join(lines)
    if strict:
        raise ModelError(
            f"The checkpoint {manifest.tag} was expected to hold every parameter and buffer of the model, and no other "
            f"({text}). Load one of this model, or pass load_module_strict=False to keep the values of what is missing "
            "(as with checkpoints saved with exclude_frozen_parameters)."
        )
    logger.warning("checkpoint %s: %s", manifest.tag, text)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more


def _check_shape(key: str, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise ModelError(
            f"{key} was expected to have shape {shape}, as in the model; the checkpoint has {entry.shape}. Load one of "
            "a model of this configuration."
        )


def _check_value(key: str, entry: TensorEntry, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _check_shape(key, entry, shape)
    found = torch_dtype(entry.dtype)
    if found.is_floating_point != dtype.is_floating_point or (not dtype.is_floating_point and found != dtype):
        raise ModelError(
            f"{key} was expected to be {dtype}, as in the model; the checkpoint has {found}. Load one of a model of "
            "this configuration."
        )


def _match_states(
    view: StateView, manifest: TagManifest, params: Mapping[str, str], convert: bool
) -> dict[str, dict[str, Any]]:
    """Check that the run can load the checkpoint's optimizer state. Return parameter name -> saved scalars, for the
    parameters that load state. `params`: parameter name -> key of its values in the checkpoint. `convert`: whether
    state may be rounded to the run's format. Raises ModelError, StoreError, ConfigError."""
    tag, written_by = manifest.tag, manifest.written_by
    if manifest.scalars and written_by.rule != view.rule.name:
        raise ModelError(
            f"The checkpoint {tag} was expected to hold optimizer state of {view.rule.name}; it is that of "
            f"{written_by.rule}. Choose that optimizer, or pass load_optimizer_states=False to start its state anew."
        )
    kinds = {key.partition("/")[0] for key in manifest.tensors} - {*VALUE_KINDS}
    placed: dict[str, tuple[StateLayout, ParamPiece, str]] = {}
    for layout in view.layouts:
        for piece in layout.subgroup.pieces:
            name = params.get(piece.param.name, "").partition("/")[2]
            if name in manifest.scalars:
                placed.setdefault(piece.param.name, (layout, piece, name))
    found: dict[str, dict[str, Any]] = {}
    last: dict[str, Any] = {}
    for own_name, (_, _, name) in placed.items():
        try:
            own = view.rule.load_scalars(from_json(manifest.scalars[name]))
        except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
            raise StoreError(
                f"The step count of {name} in checkpoint {tag} cannot be read ({error}). Load another checkpoint."
            ) from error
        # one object for equal neighbours: the update steps these together
        found[own_name] = last = last if same(last, own) else own
    num_rounded = sum(_check_arrays(view, manifest, *own, kinds) for own in placed.values())
    if num_rounded and not convert:
        raise ConfigError(
            f"tiered_zero.state_format: expected that of the checkpoint {tag}, {written_by.state_format}, or fp32, "
            f"which it becomes without loss; found one that would round {num_rounded} state arrays. Set it so, or "
            'allow that with "tiered_zero": {"checkpoint": {"convert": true}}.'
        )
    if num_rounded:
        logger.warning(
            "optimizer state is rounded from %s to tiered_zero.state_format as it is loaded (%d arrays)",
            written_by.state_format, num_rounded,
        )  # fmt: skip
    return found


def _check_arrays(
    view: StateView, manifest: TagManifest, layout: StateLayout, piece: ParamPiece, name: str, kinds: Iterable[str]
) -> int:
    """Check that this run can load the state arrays of one parameter: they exist, and have fitting shapes and dtypes.
    Return the number of arrays that the run would round. `name`: the parameter's name in the checkpoint. `kinds`: all
    kinds of state arrays in the checkpoint. Raises ModelError."""
    tensors, tag, rule = manifest.tensors, manifest.tag, view.rule
    fields = {own.name: own for own in layout.fields(piece)}
    saved = _arrays({kind for kind in kinds if f"{kind}/{name}" in tensors})
    planned = _arrays(fields.keys())
    if saved.keys() != planned.keys():
        raise ModelError(
            f"{rule.name} was planned with the state arrays {sorted(planned)} of {piece.param.name}; the checkpoint "
            f"{tag} has {sorted(saved)}. Give the optimizer the options that it was saved with (momentum, amsgrad ...)."
        )
    num_rounded = 0
    for kind in sorted(planned):
        entry, is_coded = tensors[f"{kind}/{name}"], saved[kind]
        spec = describe_field(piece.param, fields[kind], rule.elementwise)
        _check_shape(f"{kind}/{name}", entry, spec.shape)
        if is_coded and entry.order != spec.order:
            raise ModelError(
                f"{kind} of {piece.param.name} in checkpoint {tag} has 8 bits, with scales for blocks in another "
                "memory order than this model's. Save it with state_format fp32, and load that."
            )
        if is_coded:
            scale = f"{kind}_scale/{name}"
            _check_shape(scale, tensors[scale], (-(-piece.param.numel // _BLOCK),))
        if entry.dtype == spec.dtype and is_coded == planned[kind]:
            continue
        codes = "int8" if kind == "exp_avg" else "uint8"
        known = entry.dtype == codes if is_coded else entry.dtype in ("float32", "bfloat16")
        if not rule.elementwise or not known:
            raise ModelError(
                f"{kind} of {piece.param.name} was expected to be {spec.dtype}; the checkpoint {tag} has "
                f"{entry.dtype}. Load one that this optimizer has written."
            )
        num_rounded += spec.dtype != "float32"
    return num_rounded


def _arrays(kinds: Iterable[str]) -> dict[str, bool]:
    """Return kind of state array -> whether the array holds 8-bit codes. It does if `kinds` also has its scales,
    `<kind>_scale`. The scales themselves are left out."""
    own = dict.fromkeys(kinds).keys()  # in order
    return {kind: f"{kind}_scale" in own for kind in own if kind.removesuffix("_scale") not in own - {kind}}


# -- reading -----------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A request to fill `values` (1-D, any dtype and device) with elements of the tensor `key`, from element `start`
    on. `order`: the memory order in which elements are counted (see `TensorEntry`)."""

    key: str
    start: int
    values: torch.Tensor
    order: tuple[int, ...] | None = None


@final
class TensorReader:
    """Reads tensors from a tag or an in-place commit. One thread uses it; the end of a `with` block closes it."""

    def __init__(self, manifest: TagManifest, records: RecordReader, resources: ExitStack | None = None) -> None:
        """`records`: reads the bytes. `manifest`: checked by `check_places`. `resources`: closed with the reader."""
        self.manifest = manifest
        self._records = records
        self._resources = resources or ExitStack()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and `resources`. Idempotent."""
        self._records.close()
        self._resources.close()

    def submit(self, targets: Iterable[Target]) -> Callable[[], None]:
        """Begin to fill `targets`. Return a function that waits until they are filled. That function raises
        CorruptionError and TransferError; `submit` raises TransferError and StoreError."""
        wanted: list[Wanted] = []
        copies: list[Callable[[], None]] = []
        for target in targets:
            entry, values, start = self.manifest.tensors[target.key], target.values, target.start
            if entry.order != target.order:  # read the whole tensor, and permute it later
                values, start = torch.empty(entry.numel, dtype=torch_dtype(entry.dtype)), 0
                copies.append(partial(_permute, values, entry, target))
            elif entry.form == "joined" and values.dtype != torch.float32:
                values = torch.empty(values.numel())
                copies.append(partial(copy_values, target.values, values))
            wanted += self._wanted(entry, start, values)
        reading = self._records.submit(wanted)

        def wait() -> None:
            self._records.wait(reading)
            for copy in copies:
                copy()

        return wait

    def fill(self, targets: Iterable[Target]) -> None:
        """Fill the targets, and wait. Raises TransferError, StoreError and CorruptionError."""
        self.submit(targets)()

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return elements [start, stop) of a tensor, in row-major order, as a 1-D CPU tensor. Raises TransferError,
        StoreError and CorruptionError."""
        entry = self.manifest.tensors[key]
        stop = entry.numel if stop is None else stop
        values = torch.empty(stop - start, dtype=torch_dtype(entry.dtype))
        self.fill([Target(key, start, values)])
        return values

    def damage(self) -> list[str]:
        """Read every byte of the data files. Return a text for each range that is damaged or cannot be read."""
        return self._records.damage()

    def _wanted(self, entry: TensorEntry, start: int, values: torch.Tensor) -> list[Wanted]:
        """Return the requests that fill `values` with a tensor's elements from `start` on."""
        found, stop, dtype = [], start + values.numel(), torch_dtype(entry.dtype)
        if entry.form == "joined":
            values.zero_()
        first = max(0, bisect_right(entry.parts, (start, MOST_INTEGER)) - 1)
        for part in islice(entry.parts, first, None):
            if part.start >= stop:
                break
            low, high = max(start, part.start), min(stop, part.stop)
            own = values[low - start : high - start]
            for number, (source, itemsize) in enumerate(zip(part.sources, SOURCE_ITEMSIZES[entry.form], strict=True)):
                nbytes = itemsize or dtype.itemsize
                at = source.offset + (low - part.start) * nbytes
                if entry.form == "joined":
                    take = partial(_add, own.view(torch.int32), *_SUMMANDS[number])
                else:
                    take = partial(_take, own, torch.float32 if entry.form == "rounded" else dtype, dtype, entry.form)
                found.append(Wanted(source.store, source.record, at, at + (high - low) * nbytes, take))
        return found


def _take(
    into: torch.Tensor, read_dtype: torch.dtype, dtype: torch.dtype, form: str, at: int, memory: memoryview
) -> None:
    """Convert the elements in `memory` from `read_dtype` to `dtype`. Copy them to their place in `into`. `into`: the
    memory for the whole request. `form`: the tensor's form; for "magnitude", drop the signs. `at`: how many bytes of
    the request come before `memory`."""
    values = torch.frombuffer(memory, dtype=read_dtype).to(dtype)
    own = into[at // read_dtype.itemsize :][: values.numel()]
    copy_values(own, values)
    if form == "magnitude":
        own.abs_()


_SUMMANDS = ((torch.int16, 0), (torch.int16, 16), (torch.float32, 16))
"""A master's bits are the sum of its remainder, its parameter, and the sign of its second moment ([Note: bf16 and
remainder]). For each of these: the dtype in which it is stored, and by how many bits it is shifted left."""


def _add(bits: torch.Tensor, dtype: torch.dtype, shift: int, at: int, memory: memoryview) -> None:
    """Add a part of one summand (see `_SUMMANDS`) to `bits`, the masters viewed as int32. `memory`: the part's
    elements, of `dtype`. If `dtype` is a float, add only the elements' sign bits. `shift`: how many bits to shift left
    before adding. `at`: the part's first byte in the summand."""
    read = torch.frombuffer(memory, dtype=dtype)
    values, first = read.signbit() if dtype.is_floating_point else read, at // dtype.itemsize
    for start in range(0, values.numel(), _STEP_NUMEL):  # temporaries stay small, and torch starts no threads
        own = values[start : start + _STEP_NUMEL].to(bits.device, torch.int32)
        bits[first + start : first + start + own.numel()].add_(own << shift)


def _permute(whole: torch.Tensor, entry: TensorEntry, target: Target) -> None:
    """Fill `target` with its elements of a tensor, in the target's memory order. `whole`: the tensor's elements, in the
    checkpoint's order."""
    dims = range(len(entry.shape))
    values = whole.view(entry.memory_shape)
    if entry.order is not None:
        values = values.permute([entry.order.index(dim) for dim in dims])
    values = values.permute([*(target.order or dims)]).reshape(-1)
    copy_values(target.values, values[target.start : target.start + target.values.numel()])


def copy_values(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` to `into`; the shapes are equal. Contiguous CPU memory is copied on this thread alone."""
    # copy_ of 2 MiB waits for all of torch's threads: on busy processors it takes 2.5 times as long
    plain = into.is_contiguous() and values.is_contiguous() and into.is_cpu and values.is_cpu
    if plain and into.dtype == values.dtype:
        ctypes.memmove(into.data_ptr(), values.data_ptr(), values.nbytes)
    elif plain:
        for start in range(0, into.numel(), _STEP_NUMEL):
            own = slice(start, start + _STEP_NUMEL)
            into.view(-1)[own].copy_(values.view(-1)[own])
    else:
        into.copy_(values)


# -- writing to the run ------------------------------------------------------------------------------------------------


@final
class StateLoader:
    """Writes the values of a checkpoint to a run. Called on the driver thread, while no update runs and no state is
    read ahead."""

    def __init__(self, state: RunState, reader: TensorReader, matched: Matched) -> None:
        self._state = state
        self._view = state.view
        self._io = state.pipeline.io
        self._reader = reader
        self._matched = matched
        self._num_converted = 0
        """The number of sub-groups in flight that need a conversion (see `_CONVERTED_AHEAD`)."""
        self._joined: list[torch.Tensor] = []
        """Unused fp32 buffers for masters. The next sub-group that stores remainders takes one."""

    @torch.no_grad()
    def load(self) -> None:
        """Write all values of the checkpoint to the run. If this raises, the run has a mix of new values, old values
        and zeros. Raises CorruptionError, StoreError, TransferError."""
        run_ahead(self._io, self._view.layouts, self._begin)
        for unit in self._state.units:
            if unit.index not in self._state.updated_units:
                self._load_unit(unit)
        for name, buffer in self._state.buffers().items():
            if buffer.numel() and (key := self._matched.buffers.get(name)) is not None:
                value = torch.empty(buffer.shape, dtype=buffer.dtype)
                self._reader.fill([Target(key, 0, value.view(-1))])
                buffer.copy_(value)

    def _keeps_values(self, units: Iterable[Unit]) -> bool:
        """Return whether any parameter of these units keeps its value, because the checkpoint does not have the
        parameter."""
        return any(
            entry.param.numel and entry.param.name not in self._matched.params
            for unit in units
            for entry in unit.entries
        )

    # -- masters and state ---------------------------------------------------------------------------------------------

    def _begin(self, layout: StateLayout) -> tuple[SubGroupWork, Callable[[], None]] | None:
        """Begin to load a sub-group. Return its work, and a function that waits for its values and begins to write
        them. Return None if no buffer is free, or if `_CONVERTED_AHEAD` sub-groups in flight need a conversion."""
        if self._num_converted == _CONVERTED_AHEAD:
            return None
        io, has_state = self._io, self._view.scalars.has_state(layout)
        keeps = self._keeps_values(layout.subgroup.units)
        if (work := io.open_nowait(layout, "param", initialized=has_state, reads=keeps)) is None:
            return None
        try:
            for read in work.reads:
                io.wait(read, work)
            io.bind_outputs(work)
            placed = _params_of(layout)
            masters = self._masters(layout, work, keeps)
            stepped = [piece for piece in layout.subgroup.pieces if piece.param.name in self._matched.states]
            work.raw[layout.state_start : layout.nbytes].zero_()
            targets, conversions = self._state_targets(layout, work.raw, stepped)
            for param, start, (first, last) in placed:  # those in no param group too: they have masters
                if (key := self._matched.params.get(param.name)) is not None:
                    targets.append(Target(key, start, masters[first:last], param.order))
            wait = self._reader.submit(targets)
        except BaseException:
            io.cancel([work])
            raise
        is_converted = bool(conversions) or layout.masters.needs_params
        self._num_converted += is_converted

        def end() -> None:
            wait()
            for convert in conversions:
                convert()
            self._end(work, masters, stepped)
            self._num_converted -= is_converted

        return work, end

    def _end(self, work: SubGroupWork, masters: torch.Tensor, stepped: Sequence[ParamPiece]) -> None:
        """Complete a sub-group after its read: compute its parameters, initialize missing state. Then begin to write
        state and parameters. `stepped`: the pieces whose state was loaded."""
        layout = work.layout
        for segment, out in zip(layout.subgroup.segments, work.outs, strict=True):
            own = masters[segment.start : segment.stop]
            if layout.masters.needs_params:
                layout.masters.replace(layout.master_parts(work.raw, segment), own, out)
            else:
                copy_values(out, own)
        if stepped:
            others = [piece for piece in layout.subgroup.pieces if piece.param.name not in self._matched.states]
            self._view.initialize(layout, work.raw, others, self._view.groups)
            self._view.scalars.replace(layout, self._matched.scalars(layout))
        else:
            self._view.scalars.drop(layout)
        if layout.masters.needs_params:
            self._joined.append(masters)
        after = self._state.runtime.accelerator.record_compute()
        self._io.write(work, {}, after, masters_alone=not stepped)

    def _masters(self, layout: StateLayout, work: SubGroupWork, keeps: bool) -> torch.Tensor:
        """Return memory for a sub-group's masters, [numel] fp32: the slot's own, or another buffer if the slot stores
        remainders. `keeps`: True fills the memory with the present masters, False with zeros."""
        numel, device = layout.subgroup.numel, work.raw.device
        if not layout.masters.needs_params:
            masters = layout.master(work.raw)
            return masters if keeps else masters.zero_()
        whole = self._joined.pop() if self._joined else torch.empty(numel, device=device)
        if whole.numel() < numel or whole.device != device:
            whole = torch.empty(numel, device=device)
        joined = whole[:numel].zero_()
        for segment, params in zip(layout.subgroup.segments, work.outs, strict=True) if keeps else ():
            joined[segment.start : segment.stop] = layout.masters.join(layout.master_parts(work.raw, segment), params)
        return joined

    def _state_targets(
        self, layout: StateLayout, raw: torch.Tensor, stepped: Sequence[ParamPiece]
    ) -> tuple[list[Target], list[Callable[[], object]]]:
        """Return (targets, conversions) for the state of the pieces `stepped`. Call the conversions after the targets
        are filled: they convert state that was saved in another format. `raw`: the slot's bytes."""
        elementwise, tensors = self._view.rule.elementwise, self._reader.manifest.tensors
        targets: list[Target] = []
        conversions: list[Callable[[], object]] = []
        for piece in stepped:
            name = self._matched.params[piece.param.name].partition("/")[2]
            start = piece.param_start if elementwise else 0
            views = layout.state(raw, piece)
            for kind, is_coded in _arrays(views).items():
                key, scale_key, shaped = f"{kind}/{name}", f"{kind}_scale/{name}", views[kind]
                view = shaped.as_strided((shaped.numel(),), (1,), shaped.storage_offset())  # flat, in memory order
                order = piece.param.order if elementwise or shaped.shape == piece.param.shape else None
                was_coded, saved_dtype = scale_key in tensors, torch_dtype(tensors[key].dtype)
                values, scales = view, views.get(f"{kind}_scale")
                if (was_coded, saved_dtype) != (is_coded, view.dtype):
                    floats = torch.empty(view.numel(), device=raw.device)
                    values, scales = floats, None
                    if was_coded:
                        values = torch.empty(view.numel(), dtype=saved_dtype, device=raw.device)
                        scales = torch.empty(-(-view.numel() // _BLOCK), device=raw.device)
                        conversions.append(partial(dequantize, values, scales, floats, None))
                    if is_coded:
                        conversions.append(partial(quantize, view, views[f"{kind}_scale"], floats, None, None))
                    else:
                        conversions.append(partial(view.copy_, floats))
                targets.append(Target(key, start, values, order))
                if scales is not None:
                    targets.append(Target(scale_key, start // _BLOCK, scales))
        return targets, conversions

    # -- parameters without a master -----------------------------------------------------------------------------------

    def _load_unit(self, unit: Unit) -> None:
        """Load the parameters of a unit that no update writes, such as a frozen one. Write them to each home of the
        unit, or to the device if the unit has no home."""
        inventory = self._state.view.inventory
        homes = [home for kind in ("param", "param_back") if (home := inventory.find(unit, kind)) is not None]
        if inventory.find(unit, "param") is None:
            self._fill_unit(unit, self._state.device_flat(unit), 0)
        for home in homes:
            view = home.slot.tensor
            if view is not None:
                self._fill_unit(unit, view[: home.slot.nbytes].view(unit.dtype), home.start)
            else:
                self._load_windows(unit, home)

    def _load_windows(self, unit: Unit, home: Home) -> None:
        """Load a unit into its home on nvme, one staging buffer at a time."""
        staging = self._state.param_staging
        assert staging is not None, "a tier without views is planned with staging buffers"
        keeps = self._keeps_values([unit])
        for start in range(0, home.slot.nbytes, staging.buffer_nbytes):  # one checksum covers one whole piece
            with staging.lease(min(staging.buffer_nbytes, home.slot.nbytes - start), home.slot.name) as lease:
                if keeps:
                    home.tier.read(home.slot, lease.tensor, start).wait()
                else:
                    lease.tensor.zero_()
                self._fill_unit(unit, lease.tensor.view(unit.dtype), home.start + start // unit.itemsize)
                home.tier.write(home.slot, lease.tensor, start).wait()

    def _fill_unit(self, unit: Unit, flat: torch.Tensor, first: int) -> None:
        """Fill the 1-D tensor `flat` with the unit's elements from `first` on."""
        targets = []
        for entry in unit.entries:
            low, high = max(entry.start, first), min(entry.stop, first + flat.numel())
            key = self._matched.params.get(entry.param.name)
            if low < high and key is not None:
                own = flat[low - first : high - first]
                targets.append(Target(key, low - entry.start, own, entry.param.order))
        self._reader.fill(targets)


def _params_of(layout: StateLayout) -> list[tuple[ParamSpec, int, tuple[int, int]]]:
    """Return (param, start, (first, last)) for each parameter in a sub-group. Elements [first, last) of the sub-group
    are the parameter's elements from `start` on."""
    found = []
    for segment in layout.subgroup.segments:
        before = segment.start - segment.unit_start
        for entry, low, high in segment.entries():
            found.append((entry.param, low - entry.start, (before + low, before + high)))
    return found
