"""Matching of a checkpoint to a run, decided and checked before a byte of the run changes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from tiered_zero.checkpoint.index import TagManifest, TensorEntry
from tiered_zero.checkpoint.portable import MASTER, PARAM, VALUE_KINDS, RunState, buffer_key, field_spec
from tiered_zero.checkpoint.tensors import torch_dtype
from tiered_zero.checkpoint.values import decode
from tiered_zero.errors import ConfigError, ModelError, StoreError
from tiered_zero.layout.flat import ParamSpec
from tiered_zero.layout.subgroups import QUANTIZED_BLOCK_NUMEL, ParamPiece
from tiered_zero.rules.optimizer_copy import same
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.update.state_view import StateView

logger = logging.getLogger("tiered_zero")

_NUM_NAMED = 5
_BLOCK = QUANTIZED_BLOCK_NUMEL
_FLOATS = ("float32", "bfloat16")
_CODES = {True: "int8", False: "uint8"}
"""Signed or not -> the dtype of 8-bit codes."""


_FACTS = {
    "tiered_zero": "tiered_zero",
    "torch": "torch",
    "kernel": "the update kernel's level",
    "rule": "the update rule",
    "world_size": "a number of ranks of",
    "num_threads": "a number of CPU threads of",
}
"""What of WrittenBy may change bits, but for `state_format`."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """`strict`: every parameter and buffer is expected, and no other. `with_state`: take over optimizer state, else it
    starts anew. `convert`: state may be rounded to the run's state format."""

    strict: bool = True
    with_state: bool = True
    convert: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class Matched:
    """`params`: parameter name -> the key of its value; without those that keep theirs. `states`: name of a parameter
    whose state is taken over -> its scalars; neighbours with the same ones share an object. `buffers`: name -> key."""

    params: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)

    def scalars(self, layout: StateLayout) -> dict[int, dict[str, Any]]:
        """Return those of a sub-group's pieces whose state is taken over."""
        names = {piece.index: piece.param.name for piece in layout.subgroup.pieces}
        return {index: self.states[name] for index, name in names.items() if name in self.states}


def match(state: RunState, manifest: TagManifest, options: LoadOptions) -> Matched:
    """Raises ModelError if the checkpoint is of another model, StoreError for values that cannot be read, and
    ConfigError where state would be rounded and `convert` does not allow it."""
    tensors = manifest.tensors
    params = {spec.name: key for spec in state.specs if spec.numel and (key := _value_key(spec, tensors)) is not None}
    buffers = {name: buffer_key(name) for name, _ in state.named_buffers() if buffer_key(name) in tensors}
    _check_names(state, manifest, {*params.values(), *buffers.values()}, strict=options.strict)
    for spec in state.specs:
        if (key := params.get(spec.name)) is not None:
            _check_value(key, tensors[key], spec.shape, spec.dtype)
    for name, buffer in state.named_buffers():
        if (key := buffers.get(name)) is not None:
            _check_value(key, tensors[key], tuple(buffer.shape), buffer.dtype)
    states: dict[str, dict[str, Any]] = {}
    if options.with_state and state.view.layouts:
        states = _StateMatcher(state.view, manifest).match(params, options.convert)
    return Matched(params=params, states=states, buffers=buffers)


def differences(written_by: Mapping[str, Any], now: Mapping[str, Any]) -> Sequence[str]:
    """Compare the facts of the run that wrote a checkpoint with those of this run. Returns a line for each difference
    from which bits may differ; `state_format` is the loader's matter."""
    lines = []
    for name, what in _FACTS.items():
        then, here = written_by.get(name), now.get(name)
        if then != here:
            lines.append(f"the checkpoint was written with {what} {then}; this run has {here}: later steps may differ")
    return lines


def _value_key(spec: ParamSpec, tensors: Mapping[str, TensorEntry]) -> str | None:
    """Return the key of a parameter's value: its master if there is one; a tied one may have another of its names."""
    for kind in (MASTER, PARAM):
        for name in (spec.name, *spec.aliases):
            if (key := f"{kind}/{name}") in tensors:
                return key
    return None


def _check_names(state: RunState, manifest: TagManifest, used: Iterable[str], strict: bool) -> None:
    used = set(used)
    found = {key for key, entry in manifest.tensors.items() if key.partition("/")[0] in VALUE_KINDS and entry.numel}
    named = {key.partition("/")[2] for key in used}
    wanted = [spec.name for spec in state.specs if spec.numel] + [
        name for name, buffer in state.named_buffers() if buffer.numel()
    ]
    missing = [name for name in wanted if name not in named and not _is_alias(state, name, named)]
    unexpected = sorted(key.partition("/")[2] for key in found - used)
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


def _is_alias(state: RunState, name: str, named: set[str]) -> bool:
    return any(spec.name == name and not named.isdisjoint(spec.aliases) for spec in state.specs)


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


# -- optimizer state ---------------------------------------------------------------------------------------------------


@final
class _StateMatcher:
    """Matches state arrays, parameter by parameter."""

    def __init__(self, view: StateView, manifest: TagManifest) -> None:
        self._view = view
        self._manifest = manifest
        self._kinds = sorted({key.partition("/")[0] for key in manifest.tensors} - {*VALUE_KINDS})

    def match(self, params: Mapping[str, str], convert: bool) -> dict[str, dict[str, Any]]:
        """Return what `Matched.states` is. `params`: as in `Matched`."""
        stepped = self._manifest.scalars
        self._check_rule()
        found: dict[str, dict[str, Any]] = {}
        last: dict[str, Any] = {}
        num_rounded = 0
        for layout in self._view.layouts:
            for piece in layout.subgroup.pieces:
                name = params.get(piece.param.name, "").partition("/")[2]
                if name not in stepped or piece.param.name in found:
                    continue
                num_rounded += self._check_arrays(layout, piece, name)
                own = self._scalars(stepped[name], name)
                last = last if same(last, own) else own
                found[piece.param.name] = last
        if num_rounded:
            self._check_rounding(num_rounded, convert)
        return found

    def _check_rule(self) -> None:
        manifest, own = self._manifest, self._view.rule.name
        if manifest.scalars and manifest.written_by.rule != own:
            raise ModelError(
                f"The checkpoint {manifest.tag} was expected to hold optimizer state of {own}; it is that of "
                f"{manifest.written_by.rule}. Choose that optimizer, or pass load_optimizer_states=False to start its "
                "state anew."
            )

    def _check_rounding(self, num_rounded: int, convert: bool) -> None:
        tag, form = self._manifest.tag, self._manifest.written_by.state_format
        if not convert:
            raise ConfigError(
                f"tiered_zero.state_format: expected that of the checkpoint {tag}, {form}, or fp32, which it becomes "
                f"without loss; found one that would round {num_rounded} state arrays. Set it so, or allow that with "
                '"tiered_zero": {"checkpoint": {"convert": true}}.'
            )
        logger.warning(
            "optimizer state is rounded from %s to tiered_zero.state_format as it is loaded (%d arrays)",
            form, num_rounded,
        )  # fmt: skip

    def _scalars(self, encoded: Any, name: str) -> dict[str, Any]:
        try:
            decoded = decode(encoded)
            return self._view.rule.load_scalars(decoded)
        except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
            raise StoreError(
                f"The step count of {name} in checkpoint {self._manifest.tag} cannot be read ({error}). Load another "
                "checkpoint."
            ) from error

    def _check_arrays(self, layout: StateLayout, piece: ParamPiece, name: str) -> int:
        """Return how many arrays are rounded. Raises ModelError if others are needed, or of other shapes."""
        tensors, tag = self._manifest.tensors, self._manifest.tag
        fields = {own.name: own for own in layout.fields(piece)}
        kinds = {kind for kind in self._kinds if f"{kind}/{name}" in tensors}
        saved = {kind for kind in kinds if kind.removesuffix("_scale") not in kinds - {kind}}
        planned = {kind for kind in fields if kind.removesuffix("_scale") not in fields.keys() - {kind}}
        if saved != planned:
            raise ModelError(
                f"{self._view.rule.name} was planned with the state arrays {sorted(planned)} of {piece.param.name}; "
                f"the checkpoint {tag} has {sorted(saved)}. Give the optimizer the options that it was saved with "
                "(momentum, amsgrad ...)."
            )
        num_rounded = 0
        for kind in sorted(planned):
            entry, own = tensors[f"{kind}/{name}"], fields[kind]
            spec = field_spec(piece.param, own, self._view.rule.elementwise)
            is_coded = f"{kind}_scale" in kinds
            _check_shape(f"{kind}/{name}", entry, spec.shape)
            if is_coded and entry.order != spec.order:
                raise ModelError(
                    f"{kind} of {piece.param.name} in checkpoint {tag} has 8 bits, with scales for blocks in another "
                    "memory order than this model's. Save it with state_format fp32, and load that."
                )
            if is_coded:
                scale = f"{kind}_scale/{name}"
                _check_shape(scale, tensors[scale], (-(-piece.param.numel // _BLOCK),))
            if entry.dtype == spec.dtype and is_coded == (f"{kind}_scale" in fields):
                continue
            known = entry.dtype == _CODES.get(kind == "exp_avg") if is_coded else entry.dtype in _FLOATS
            if not self._view.rule.elementwise or not known:
                raise ModelError(
                    f"{kind} of {piece.param.name} was expected to be {spec.dtype}; the checkpoint {tag} has "
                    f"{entry.dtype}. Load one that this optimizer has written."
                )
            num_rounded += spec.dtype != "float32"
        return num_rounded


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more
