"""Define the formats and places of master weights and optimizer state in a sub-group's slot.

tiered_zero.state_format:

| format | bytes per parameter, the 16-bit parameter included | numbers |
|---|---|---|
| fp32 | 12 + 2 | |
| bf16_remainder | 10 + 2 | the same bits as fp32 |
| lossy_bf16_moments | 8 + 2 | lossy: both moments in bf16, stochastically rounded |
| lossy_8bit_moments | 6.25 + 2 | lossy: both moments in 8 bits, one fp32 scale for 32 of them |

[Note: bf16 and remainder] A fp32 master is stored as its bf16 parameter and 16 more bits: 4 bytes for both instead of
6, with

    master = (bits of the parameter << 16) + remainder + (mark << 16)

The parameter is the master rounded to nearest, ties to even, as in every other format, and the master loses nothing.
The remainder is a signed 16-bit number, the low half of the master. One bit is missing, because an even parameter
stands for 65,537 masters, including both neighbouring ties. That bit is the mark: set if the master is a tie above (in
magnitude) the even parameter to which it was rounded. The mark is stored in the sign of Adam's second moment, which is
never negative. Infinities are kept; every NaN becomes the same NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from tiered_zero.errors import ConfigError
from tiered_zero.layout.subgroups import ParamPiece, Segment, SubGroup
from tiered_zero.rules.rule import StateField, UpdateRule
from tiered_zero.sizes import PAGE_NBYTES, align_up

_STEP_NUMEL = 1 << 16
"""Masters that are split at once, so that temporaries stay small."""

_NAN = 0x7FC00000
_WORD = 0xFFFFFFFF
_OFF_THE_DEVICE = "set offload_param.device to cpu or nvme, or offload_optimizer.device to none"


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split fp32 masters into bf16 parameters, int16 remainders and bool marks, each of the same shape."""
    bits = torch.where(master.isnan(), _NAN, master.view(torch.int32))
    return bits.view(torch.float32).to(torch.bfloat16), bits.to(torch.int16), (bits & 0x1FFFF) == 0x8000


def join_master(parameter: torch.Tensor, remainder: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    """Return the fp32 masters, bit for bit."""
    high = (parameter.view(torch.int16).to(torch.int32) + mark) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def hash_noise(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return 16 random bits for each fp32 value, as int32, equal to the native kernel's. They are a hash of value and
    seed, not of a position, so cuts do not change them. The seed differs for each step and array."""
    noise = values.view(torch.int32) ^ _signed(seed)
    noise = (noise ^ ((noise >> 16) & 0xFFFF)) * _signed(0x85EBCA6B)
    noise = (noise ^ ((noise >> 13) & 0x7FFFF)) * _signed(0xC2B2AE35)
    return (noise ^ (noise >> 16)) & 0xFFFF


def round_randomly(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Round fp32 to bf16 stochastically."""
    rounded = ((values.view(torch.int32) + hash_noise(values, seed)) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, values.to(torch.bfloat16))


def _signed(word: int) -> int:
    """Return 32 bits as an int32."""
    return ((word & _WORD) ^ 0x80000000) - 0x80000000


Parts = Sequence[torch.Tensor]
"""The arrays that store a run of masters, one for each of `MasterFormat.dtypes`, each [n]."""


class MasterFormat(ABC):
    """How masters are stored.

    `dtypes`: dtypes of the stored arrays. The first is a rule's `Run.master`; the second, if any, is the rule's
    unsigned field. `needs_params`: the update needs the old parameters in addition to the slot. `follows_params`: each
    update adopts parameters that changed since the last one, so nothing has to watch them; the first update makes the
    masters, and the slot holds none before.
    """

    dtypes: tuple[torch.dtype, ...]
    needs_params: bool
    follows_params: bool = False

    def bind(self, master: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """Return the masters [n] that an update steps. `params`: [n], where the update writes the new parameters; if
        masters follow parameters, it holds the present ones."""
        return master

    @abstractmethod
    def join(self, parts: Parts, params: torch.Tensor | None) -> torch.Tensor:
        """Return the masters, fp32 [n]."""

    @abstractmethod
    def replace(self, parts: Parts, master: torch.Tensor, params: torch.Tensor | None = None) -> None:
        """Set the stored masters to `master`, fp32 [n], in place, and `params`, if given, to their rounded values."""

    @abstractmethod
    def follow(self, parts: Parts, new: torch.Tensor, old: torch.Tensor | None) -> Parts | None:
        """Return new stored masters after parameters were set to `new` [n] by hand: those that changed take that value.
        None if nothing changed. `old`: the former parameters, if needed.
        """

    @abstractmethod
    def copy_unstepped(self, masters: Parts, outs: Parts) -> None:
        """Write to `outs` the parameters of masters that are not stepped: their rounded values."""


class FullMasters(MasterFormat):
    """fp32 masters."""

    dtypes = (torch.float32,)
    needs_params = False

    def join(self, parts: Parts, params: torch.Tensor | None) -> torch.Tensor:
        return parts[0]

    def replace(self, parts: Parts, master: torch.Tensor, params: torch.Tensor | None = None) -> None:
        parts[0].copy_(master)
        if params is not None:
            params.copy_(master)

    def follow(self, parts: Parts, new: torch.Tensor, old: torch.Tensor | None) -> Parts | None:
        (master,) = parts
        changed = master.to(new.dtype) != new  # a NaN differs from everything, so it is adopted
        return (torch.where(changed, new.to(torch.float32), master),) if changed.any() else None

    def copy_unstepped(self, masters: Parts, outs: Parts) -> None:
        torch._foreach_copy_(list(outs), list(masters))


@final
class FollowingMasters(FullMasters):
    """fp32 masters of 16-bit parameters that their user may change at any time between updates."""

    follows_params = True

    def bind(self, master: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        (followed,) = self.follow((master,), params, None) or (master,)
        return master if followed is master else master.copy_(followed)

    def copy_unstepped(self, masters: Parts, outs: Parts) -> None:
        """Do nothing: `outs` already hold the parameters, which the masters follow."""


@final
class ParamMasters(MasterFormat):
    """fp32 parameters that are their own masters: the update steps them in place, and no tier holds masters."""

    dtypes = ()
    needs_params = False
    follows_params = True

    def bind(self, master: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        return params

    def join(self, parts: Parts, params: torch.Tensor | None) -> torch.Tensor:
        assert params is not None, "the parameters are the masters"
        return params

    def replace(self, parts: Parts, master: torch.Tensor, params: torch.Tensor | None = None) -> None:
        assert params is not None, "the parameters are the masters"
        params.copy_(master)

    def follow(self, parts: Parts, new: torch.Tensor, old: torch.Tensor | None) -> Parts | None:
        return None

    def copy_unstepped(self, masters: Parts, outs: Parts) -> None:
        """Do nothing: masters and parameters are the same memory."""


@final
class RemainderMasters(MasterFormat):
    """int16 remainders, with the marks in the signs of the fp32 second moments: see [Note: bf16 and remainder]."""

    dtypes = (torch.int16, torch.float32)
    needs_params = True

    def join(self, parts: Parts, params: torch.Tensor | None) -> torch.Tensor:
        assert params is not None, "remainders come with their parameters"
        return join_master(params, parts[0], parts[1].signbit())

    def replace(self, parts: Parts, master: torch.Tensor, params: torch.Tensor | None = None) -> None:
        """Set the masters as `MasterFormat.replace` says. The second moments keep their values."""
        for start in range(0, master.numel(), _STEP_NUMEL):
            own = slice(start, start + _STEP_NUMEL)
            rounded, remainder, mark = split_master(master[own])
            parts[0][own] = remainder
            parts[1][own] = torch.where(mark, -parts[1][own].abs(), parts[1][own].abs())
            if params is not None:
                params[own] = rounded

    def follow(self, parts: Parts, new: torch.Tensor, old: torch.Tensor | None) -> Parts | None:
        remainder, square = parts
        assert old is not None, "changes by hand come with what was before"
        changed = old.view(torch.int16) != new.view(torch.int16)
        if not changed.any():
            return None
        return torch.where(changed, 0, remainder), torch.where(changed, square.abs(), square)

    def copy_unstepped(self, masters: Parts, outs: Parts) -> None:
        """Do nothing: `outs` hold the parameters as they were read."""


def master_format(name: str) -> MasterFormat:
    return RemainderMasters() if name == "bf16_remainder" else FullMasters()


@dataclass(frozen=True, kw_only=True)
class StateArray:
    """A state array in a slot. `piece`: the index of its piece; None if it spans the sub-group. `offset`: its first
    byte."""

    field: StateField
    piece: int | None
    offset: int


class StateLayout:
    """The slot of a sub-group: masters [numel], then each state array, each starting at a page.

    `masters`: their format. If it includes a state array, that is the first one, and `master_nbytes` counts both.
    `state_start`: the first byte of the state arrays. `initial_nbytes`: what a slot holds from the start. For an
    elementwise rule each array spans the sub-group, so that a run is a slice of it; a field that only some param groups
    have exists for all. For any other rule each piece (a whole parameter) has its own arrays.
    """

    def __init__(
        self,
        subgroup: SubGroup,
        rule: UpdateRule,
        groups: Sequence[Mapping[str, Any]],
        masters: MasterFormat | None = None,
    ) -> None:
        self.subgroup = subgroup
        self.masters = masters or FullMasters()
        self.master_nbytes = sum(dtype.itemsize for dtype in self.masters.dtypes) * subgroup.numel
        self.arrays: list[StateArray] = []
        self._arrays_of: defaultdict[int | None, list[StateArray]] = defaultdict(list)
        self._shared_of_group: dict[int, list[StateArray]] = {}
        self.initial_nbytes = 0 if self.masters.follows_params else self.master_nbytes
        self._end = self.state_start = sum(dtype.itemsize for dtype in self.masters.dtypes[:1]) * subgroup.numel
        if rule.elementwise:
            merged: dict[str, StateField] = {}
            held = {piece.group for piece in subgroup.pieces}
            names: dict[int, set[str]] = {}
            # a slot of padding alone (the last rank's, of a small unit) still has masters in each of these arrays
            for group in sorted(held or range(len(self.masters.dtypes) - 1)):
                fields = rule.state_fields((subgroup.numel,), groups[group])
                names[group] = {field.name for field in fields}
                merged.update({field.name: field for field in fields})
            for field in sorted(merged.values(), key=lambda field: field.name != rule.unsigned_field):
                self._append(field, None)
            for group, own in names.items():
                self._shared_of_group[group] = [array for array in self.arrays if array.field.name in own]
        else:
            for index, piece in enumerate(subgroup.pieces):
                for field in rule.state_fields(piece.param.shape, groups[piece.group]):
                    self._append(field, index)
        self.nbytes = self._end

    @property
    def has_own_masters(self) -> bool:
        """Whether masters follow their parameters and are stored in the slot: nothing else saves them."""
        return self.masters.follows_params and bool(self.masters.dtypes)

    def _append(self, field: StateField, piece: int | None) -> None:
        array = StateArray(field=field, piece=piece, offset=self._end)
        self.arrays.append(array)
        self._arrays_of[piece].append(array)
        self._end += align_up(field.nbytes, PAGE_NBYTES)

    def master(self, raw: torch.Tensor) -> torch.Tensor:
        """Return a view of the masters in `raw`, the slot's bytes: [numel], the `Run.master` of all its elements."""
        if not self.masters.dtypes:
            return raw[:0].view(torch.float32)
        dtype = self.masters.dtypes[0]
        return raw[: dtype.itemsize * self.subgroup.numel].view(dtype)

    def initialize(self, raw: torch.Tensor) -> None:
        """Initialize a slot that was never stepped: state with zeros, and masters that follow their parameters with
        NaN, which differs from every parameter, so that the next update adopts them."""
        if self.masters.follows_params:
            self.master(raw).fill_(float("nan"))
        raw[self.master_nbytes :].zero_()

    def master_spans(self, segment: Segment) -> list[tuple[int, int, torch.dtype]]:
        """Return the places of a segment's masters: (first byte in the slot, bytes, dtype) for each of the format's
        arrays."""
        spans, start = [], 0
        for dtype in self.masters.dtypes:
            spans.append((start + dtype.itemsize * segment.start, dtype.itemsize * segment.numel, dtype))
            start += dtype.itemsize * self.subgroup.numel
        return spans

    def master_parts(self, raw: torch.Tensor, segment: Segment) -> list[torch.Tensor]:
        """Return views of a segment's masters in `raw`, one for each of the format's arrays."""
        return [raw[start : start + nbytes].view(dtype) for start, nbytes, dtype in self.master_spans(segment)]

    def clear(self, raw: torch.Tensor, kept: Iterable[ParamPiece]) -> None:
        """Set the state in `raw` to zero, except the arrays of the pieces `kept`, which are filled next."""
        filled = []
        for piece in kept:
            for array in self.arrays_for(piece):
                start, stop = array.offset, array.offset + array.field.nbytes
                if array.piece is None:
                    itemsize, block = array.field.dtype.itemsize, array.field.block_numel
                    start, stop = start + piece.start // block * itemsize, start + -(-piece.stop // block) * itemsize
                filled.append((start, stop))
        for start, stop in gaps(sorted(filled), self.state_start, self.nbytes):
            raw[start:stop].zero_()

    def marks(self, raw: torch.Tensor) -> torch.Tensor | None:
        """Return a view of the state array whose signs belong to the masters, [numel]; None if there is none."""
        return _view(raw, self.arrays[0]) if len(self.masters.dtypes) > 1 else None

    def views(self, raw: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return views of all state arrays, by offset. Make them once for many pieces: a view takes microseconds."""
        return {array.offset: _view(raw, array) for array in self.arrays}

    def state(
        self,
        raw: torch.Tensor,
        piece: ParamPiece,
        start: int,
        stop: int,
        views: Mapping[int, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return views of the state of elements [start, stop) of the sub-group (elementwise), or of `piece` in its own
        shapes. `views`: views of all arrays in `raw`, if the caller has them."""
        state = {}
        for array in self.arrays_for(piece):
            view = _view(raw, array) if views is None else views[array.offset]
            is_shared = array.piece is None
            state[array.field.name] = (
                view[_part(array.field, start, stop)] if is_shared else _shaped(piece, array.field, view)
            )
        return state

    def fields(self, piece: ParamPiece) -> list[StateField]:
        """Return the state arrays of a piece; an array over the whole sub-group has the sub-group's shape."""
        return [array.field for array in self.arrays_for(piece)]

    def arrays_for(self, piece: ParamPiece) -> list[StateArray]:
        """Return the state arrays that hold a piece's state: those over the whole sub-group, and its own."""
        return self._shared_of_group.get(piece.group, []) + self._arrays_of.get(piece.index, [])


def gaps(ranges: Iterable[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Return the parts of [first, last) that disjoint `ranges`, in order, do not cover."""
    found = []
    for start, stop in (*ranges, (last, last)):
        if first < start:
            found.append((first, start))
        first = stop
    return found


def _shaped(piece: ParamPiece, field: StateField, memory: torch.Tensor) -> torch.Tensor:
    """Return `memory` in the field's shape. If that is the parameter's shape it gets its strides, as by torch's
    zeros_like()."""
    if field.stride is not None:
        return memory.as_strided(field.shape, field.stride)
    return piece.param.view(memory) if field.shape == piece.param.shape else memory.view(field.shape)


def _part(field: StateField, start: int, stop: int) -> slice:
    return slice(start // field.block_numel, -(-stop // field.block_numel))


def _view(raw: torch.Tensor, array: StateArray) -> torch.Tensor:
    """Return a view of the array, [n] of the field's dtype."""
    return raw[array.offset : array.offset + array.field.nbytes].view(array.field.dtype)


def check_params(
    masters: MasterFormat, subgroups: Iterable[SubGroup], param_tiers: Mapping[int, str], state_tiers: Sequence[str]
) -> None:
    """Raise ConfigError if the update cannot read parameters that it needs to make masters."""
    held = ((segment.unit, state_tiers[subgroup.index]) for subgroup in subgroups for segment in subgroup.segments)
    for unit, state_tier in held if masters.needs_params else ():
        if unit.dtype != torch.bfloat16:
            raise ConfigError(
                "tiered_zero.state_format bf16_remainder: expected bfloat16 parameters, half of each fp32 master; "
                f"found {str(unit.dtype).removeprefix('torch.')} ({unit.entries[0].param.name}). Set "
                "bf16.enabled, or write fp32."
            )
        if (param_tiers[unit.index] == "device") != (state_tier == "device"):
            place, cure = (
                ("on the device and its optimizer does not", _OFF_THE_DEVICE)
                if param_tiers[unit.index] == "device"
                else ("off the device and its optimizer on it", "set offload_optimizer.device to cpu or nvme")
            )
            raise ConfigError(
                "tiered_zero.state_format bf16_remainder: expected parameters where the update can read them, as they "
                f"are half of the master; {unit.entries[0].param.name} rests {place}, so it would cross the link "
                f"once more in each step. In zero_optimization, {cure}; or write fp32."
            )
