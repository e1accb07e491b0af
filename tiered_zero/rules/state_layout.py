"""Define in which format, and at which byte of a sub-group's slot, master weights and optimizer state are stored.

tiered_zero.state_format:

| format | bytes per parameter, the 16-bit parameter included | numbers |
|---|---|---|
| fp32 | 12 + 2 | |
| bf16_remainder | 10 + 2 | the same bits as fp32 |
| lossy_bf16_moments | 8 + 2 | lossy: both moments in bf16, stochastically rounded |
| lossy_8bit_moments | 6.25 + 2 | lossy: both moments in 8 bits, one fp32 scale for 32 of them |

[Note: bf16 and remainder] An fp32 master is stored as its bf16 parameter and 16 more bits: 4 bytes for both instead of
6, with

    master = (bits of the parameter << 16) + remainder + (mark << 16)

The parameter is the master rounded to nearest, ties to even. The remainder is a signed 16-bit number, the low half of
the master. Sixteen bits are not enough, because an even parameter stands for 65,537 masters, both neighbouring ties
included. The mark is the additional bit. It is set if the master is a tie above (in magnitude) its even parameter. The
mark is stored in the sign of Adam's second moment, which is never negative. Infinities are kept. A NaN stays a NaN, but
its other bits may change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from tiered_zero.errors import ConfigError
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import ParamPiece, Segment, SubGroup
from tiered_zero.rules.rule import StateField, UpdateRule
from tiered_zero.sizes import PAGE_NBYTES, align_up

_STEP_NUMEL = 1 << 16
"""The most masters that `RemainderMasters.replace` splits at once. This limits temporary memory."""

_NAN = 0x7FC00000
_WORD = 0xFFFFFFFF
_OFF_THE_DEVICE = "set offload_param.device to cpu or nvme, or offload_optimizer.device to none"


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split fp32 masters into bf16 parameters, int16 remainders and bool marks, each of the same shape. A mark is true
    if the master lay halfway between two bf16 values and was rounded toward 0."""
    bits = torch.where(master.isnan(), _NAN, master.view(torch.int32))
    return bits.view(torch.float32).to(torch.bfloat16), bits.to(torch.int16), (bits & 0x1FFFF) == 0x8000


def join_master(parameter: torch.Tensor, remainder: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    """Invert `split_master`: return the fp32 masters, bit for bit except the bits of NaNs."""
    high = (parameter.view(torch.int16).to(torch.int32) + mark) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def hash_noise(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return 16 random bits, as int32, for each fp32 value: a hash of the value and `seed`, as in the native kernel."""
    noise = values.view(torch.int32) ^ _signed(seed)  # no positions: arrays may be cut anywhere
    noise = (noise ^ ((noise >> 16) & 0xFFFF)) * _signed(0x85EBCA6B)
    noise = (noise ^ ((noise >> 13) & 0x7FFFF)) * _signed(0xC2B2AE35)
    return (noise ^ (noise >> 16)) & 0xFFFF


def round_randomly(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Round fp32 values to bf16 stochastically, with noise from `hash_noise`: the nearer neighbour is more probable."""
    rounded = ((values.view(torch.int32) + hash_noise(values, seed)) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, values.to(torch.bfloat16))


def _signed(word: int) -> int:
    """Return the low 32 bits of `word`, read as a signed number."""
    return ((word & _WORD) ^ 0x80000000) - 0x80000000


Parts = Sequence[torch.Tensor]
"""The arrays in which a format stores n masters: one [n] array for each dtype in `MasterFormat.dtypes`."""


class MasterFormat(ABC):
    """Defines how masters are stored in a slot."""

    dtypes: tuple[torch.dtype, ...]  # of the stored arrays: `Slice.master` and, if two, the rule's unsigned field
    needs_params: bool  # an update reads the old parameters in addition to the slot
    follows_params: bool = False  # an update adopts the parameters that user code has changed

    def bind(self, master: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """Return the array, [n], that the update steps as masters. `master`: the stored array, [n]. `params`: the
        memory to which the update writes the new parameters, [n]. If `follows_params`, this memory holds the present
        parameters. Those that user code has changed are first copied to the masters."""
        return master

    @abstractmethod
    def join(self, parts: Parts, params: torch.Tensor | None) -> torch.Tensor:
        """Compute the masters, fp32 [n], from the stored arrays `parts`. `params`: the parameters, [n]; may be None if
        the format stores whole masters."""

    @abstractmethod
    def replace(self, parts: Parts, master: torch.Tensor, params: torch.Tensor | None = None) -> None:
        """Store `master`, fp32 [n], in the arrays `parts`. Write the rounded values to `params`, if given."""

    @abstractmethod
    def follow(self, parts: Parts, new: torch.Tensor, old: torch.Tensor | None) -> Parts | None:
        """Return the new stored arrays after user code has changed parameters; None if no array changes. The new value
        of a changed parameter becomes its master. `parts`: the present stored arrays. `old`, `new`: the parameters
        before and after the change, [n]; `old` may be None if `needs_params` is false."""

    @abstractmethod
    def copy_unstepped(self, masters: Parts, outs: Parts) -> None:
        """Round `masters`, which this update does not step, and write the results to `outs`, the memory of their
        parameters."""


class FullMasters(MasterFormat):
    """Stores fp32 masters."""

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
    """Stores fp32 masters of 16-bit parameters. If user code has changed parameters, an update first copies the new
    values to the masters."""

    follows_params = True

    def bind(self, master: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        (followed,) = self.follow((master,), params, None) or (master,)
        return master if followed is master else master.copy_(followed)

    def copy_unstepped(self, masters: Parts, outs: Parts) -> None:
        """Do nothing: `outs` hold the parameters already, and `bind` has copied changed ones to the masters."""


@final
class ParamMasters(MasterFormat):
    """Stores nothing: fp32 parameters are their own masters, and the update steps them in place."""

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
    """Stores each master of a bf16 parameter as an int16 remainder and one more bit, the mark. The mark is stored in
    the sign of the second moment. See [Note: bf16 and remainder]."""

    dtypes = (torch.int16, torch.float32)
    needs_params = True

    def join(self, parts: Parts, params: torch.Tensor | None) -> torch.Tensor:
        assert params is not None, "remainders come with their parameters"
        return join_master(params, parts[0], parts[1].signbit())

    def replace(self, parts: Parts, master: torch.Tensor, params: torch.Tensor | None = None) -> None:
        """Split `master` (see `split_master`). Write the remainders to `parts[0]`, and the marks as signs of the second
        moments to `parts[1]`. Write the rounded masters to `params`, if given."""
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
        """Do nothing: the update has read the parameters into `outs` already (`needs_params`)."""


def master_format(name: str) -> MasterFormat:
    return RemainderMasters() if name == "bf16_remainder" else FullMasters()


@dataclass(frozen=True, kw_only=True)
class StateArray:
    """One state array in a slot."""

    field: StateField
    piece: int | None  # index of the piece (part of a parameter) with this state; None: the whole sub-group
    offset: int  # first byte in the slot


class StateLayout:
    """Lays out a sub-group's slot: first the masters, then each state array, each at the start of a memory page.

    For an elementwise rule each state array covers the whole sub-group. For any other rule each piece (here a whole
    parameter) has its own arrays.
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
        self.master_nbytes = sum(dtype.itemsize for dtype in self.masters.dtypes) * subgroup.numel  # with their marks
        self.arrays: list[StateArray] = []
        self._arrays_of: defaultdict[int | None, list[StateArray]] = defaultdict(list)
        self._shared_of_group: dict[int, list[StateArray]] = {}
        self.initial_nbytes = 0 if self.masters.follows_params else self.master_nbytes  # valid before the first update
        self._end = self.state_start = sum(dtype.itemsize for dtype in self.masters.dtypes[:1]) * subgroup.numel
        if rule.elementwise:
            merged: dict[str, StateField] = {}
            held = {piece.group for piece in subgroup.pieces}
            names: dict[int, set[str]] = {}
            # a slot of padding alone (the last rank's, for a small unit) has no groups: group 0 gives the marks' array
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
        """Whether the slot stores masters that follow the parameters: if user code has changed a parameter, an update
        first copies the new value to the master. Such masters are saved with the optimizer state."""
        return self.masters.follows_params and bool(self.masters.dtypes)

    def _append(self, field: StateField, piece: int | None) -> None:
        array = StateArray(field=field, piece=piece, offset=self._end)
        self.arrays.append(array)
        self._arrays_of[piece].append(array)
        self._end += align_up(field.nbytes, PAGE_NBYTES)

    def master(self, raw: torch.Tensor) -> torch.Tensor:
        """Return a view of the stored masters, [numel], in `raw`, the slot's bytes. It is empty if the slot stores
        none."""
        if not self.masters.dtypes:
            return raw[:0].view(torch.float32)
        dtype = self.masters.dtypes[0]
        return raw[: dtype.itemsize * self.subgroup.numel].view(dtype)

    def initialize(self, raw: torch.Tensor) -> None:
        """Set the state in `raw`, the slot's bytes, to zero before the first update. Set masters that follow the
        parameters to NaN: the first update then copies all parameters to them."""
        if self.masters.follows_params:
            self.master(raw).fill_(float("nan"))  # differs from every parameter: the first update takes them all
        raw[self.master_nbytes :].zero_()

    def master_spans(self, segment: Segment) -> list[tuple[int, int, torch.dtype]]:
        """Return (first byte in the slot, number of bytes, dtype) of the part of `segment` in each array that stores
        masters."""
        spans, start = [], 0
        for dtype in self.masters.dtypes:
            spans.append((start + dtype.itemsize * segment.start, dtype.itemsize * segment.numel, dtype))
            start += dtype.itemsize * self.subgroup.numel
        return spans

    def master_parts(self, raw: torch.Tensor, segment: Segment) -> list[torch.Tensor]:
        """Return the masters of `segment` as views of `raw`, the slot's bytes: one view for each array that the master
        format stores."""
        return [raw[start : start + nbytes].view(dtype) for start, nbytes, dtype in self.master_spans(segment)]

    def marks(self, raw: torch.Tensor) -> torch.Tensor | None:
        """Return the state array, [numel], whose signs store the marks of RemainderMasters, one bit of each master;
        None for another master format."""
        return _view(raw, self.arrays[0]) if len(self.masters.dtypes) > 1 else None

    def views(self, raw: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return offset -> view of each state array in `raw`, the slot's bytes."""
        return {array.offset: _view(raw, array) for array in self.arrays}  # takes microseconds for each view

    def state(
        self,
        raw: torch.Tensor,
        piece: ParamPiece,
        stop: int | None = None,
        views: Mapping[int, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return name -> view of a piece's state in `raw`, the slot's bytes. `stop`: for an elementwise rule, the
        element of the sub-group at which the views end; None: at the piece's end. `views`: the result of the method
        `views` for `raw`; None: views are made."""
        state = {}
        for array in self.arrays_for(piece):
            view = _view(raw, array) if views is None else views[array.offset]
            if array.piece is None:
                view = view[_part(array.field, piece.start, stop or piece.stop)]
            else:
                view = _shaped(piece, array.field, view)
            state[array.field.name] = view
        return state

    def fields(self, piece: ParamPiece) -> list[StateField]:
        """Return the `StateField` of each array that holds the piece's state. For an elementwise rule, each array
        covers the whole sub-group instead of only the piece."""
        return [array.field for array in self.arrays_for(piece)]

    def arrays_for(self, piece: ParamPiece) -> list[StateArray]:
        """Return the arrays that hold a piece's state. For an elementwise rule these are the sub-group's arrays that
        the piece's param group needs. For other rules they are the piece's own arrays."""
        return self._shared_of_group.get(piece.group, []) + self._arrays_of.get(piece.index, [])


def _shaped(piece: ParamPiece, field: StateField, memory: torch.Tensor) -> torch.Tensor:
    """Return `memory` as a view in the field's shape. A field with the parameter's shape gets the parameter's strides,
    unless it has strides of its own."""
    if field.stride is not None:
        return memory.as_strided(field.shape, field.stride)
    return piece.param.view(memory) if field.shape == piece.param.shape else memory.view(field.shape)


def _part(field: StateField, start: int, stop: int) -> slice:
    return slice(start // field.block_numel, -(-stop // field.block_numel))


def _view(raw: torch.Tensor, array: StateArray) -> torch.Tensor:
    """Return the bytes of `array` as a 1-D view in the array's dtype. `raw`: all bytes of the slot."""
    return raw[array.offset : array.offset + array.field.nbytes].view(array.field.dtype)


def check_params(
    masters: MasterFormat, subgroups: Iterable[SubGroup], param_tiers: Mapping[Unit, str], state_tiers: Sequence[str]
) -> None:
    """Raise ConfigError if the format needs the parameters (`needs_params`) but cannot use them: if a parameter is not
    bf16, or if only one of parameter and state rests on the device. `param_tiers`: unit -> tier. `state_tiers`: the
    tier of each sub-group's state."""
    held = ((segment.unit, state_tiers[subgroup.index]) for subgroup in subgroups for segment in subgroup.segments)
    for unit, state_tier in held if masters.needs_params else ():
        if unit.dtype != torch.bfloat16:
            raise ConfigError(
                "tiered_zero.state_format bf16_remainder: expected bfloat16 parameters, half of each fp32 master; "
                f"found {str(unit.dtype).removeprefix('torch.')} ({unit.entries[0].param.name}). Set "
                "bf16.enabled, or write fp32."
            )
        if (param_tiers[unit] == "device") != (state_tier == "device"):
            place, cure = (
                ("on the device and its optimizer does not", _OFF_THE_DEVICE)
                if param_tiers[unit] == "device"
                else ("off the device and its optimizer on it", "set offload_optimizer.device to cpu or nvme")
            )
            raise ConfigError(
                "tiered_zero.state_format bf16_remainder: expected parameters where the update can read them, as they "
                f"are half of the master; {unit.entries[0].param.name} rests {place}, so it would cross the link "
                f"once more in each step. In zero_optimization, {cure}; or write fp32."
            )
