"""Find the units of a module tree: by default one per transformer block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from tiered_zero.layout.flat import FlatEntry, ParamSpec, Unit, equal_bounds, place_by_rank, place_params

MAX_UNIT_NUMEL = 1 << 28
"""The most elements of a unit: half a GiB in 16 bits, far more than any link needs to reach its full rate."""

SMALL_NUMEL = 1 << 20
"""Small parts of a block are joined up to this many elements, and up to a 64th of the model. To copy 2 MiB, as many
elements in 16 bits, over PCIe takes as long as the calls that a separate unit costs."""


@dataclass(frozen=True, kw_only=True)
class UnitRules:
    """How to cut a model into units.

    `size_cap_numel`: the most elements of a unit; None: `find_units` chooses (at least four units if possible, at most
    2^28 elements, a compiled block whole). `persistence_numel`: parameters, trainable or frozen, with at most this many
    elements never leave the device, up to `max_persistent_numel` elements in total. `world_size`: with several ranks a
    block is never split into the stacks inside it, because ranks may choose different experts, and must gather the same
    units in the same order. `whole_params`: each rank owns whole parameters, which the update rule steps."""

    size_cap_numel: int | None = None
    persistence_numel: int = 0
    max_persistent_numel: int = 1 << 62
    world_size: int = 1
    whole_params: bool = False


@dataclass(frozen=True, kw_only=True)
class ModuleSpec:
    """One module of a tree. `params`: the indices, in the list of ParamSpecs, of the module's own parameters.

    `is_stack`: it holds blocks, or experts, that run one by one. `is_list`: it is a stack that numbers them. `runs`: it
    has a forward, unlike ModuleList and ModuleDict, of which the model may run only some children. `is_compiled`:
    torch.compile compiles it, and makes one graph of it unless it is cut."""

    name: str = ""
    params: tuple[int, ...] = ()
    children: tuple[ModuleSpec, ...] = ()
    is_stack: bool = False
    is_list: bool = False
    runs: bool = True
    is_compiled: bool = False

    @cached_property
    def all_params(self) -> tuple[int, ...]:
        """The parameters of the whole subtree, each once, in the order of `module.parameters()`."""
        found = [*self.params, *(index for child in self.children for index in child.all_params)]
        return tuple(dict.fromkeys(found))

    @cached_property
    def holds_stack(self) -> bool:
        return self.is_stack or any(child.holds_stack for child in self.children)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The properties that all parameters of a unit share."""

    dtype: Any
    trainable: bool
    persistent: bool


@dataclass(kw_only=True)
class _Part:
    """Parameters that become a unit or join one. `module`: the module whose forward uses them. `block`: the module
    whose small parts are joined; None: these parameters stay separate."""

    module: str
    block: str | None
    kind: _Kind
    params: list[ParamSpec]

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)


def find_units(root: ModuleSpec, specs: Sequence[ParamSpec], rules: UnitRules) -> list[Unit]:
    """Cut the tree into groups, and each group into units by dtype, `requires_grad` and persistence. `specs`: all
    parameters of the model.

    The walk descends while a module holds a stack of blocks or is larger than the cap. A module at which it stops is a
    group. If it descends into a module, the module's own parameters are a group. Small parts of one block are joined. A
    tied parameter belongs to the first group that has it. Units are in the order of the walk, which is the order of use
    in most models."""
    total = sum(spec.numel for spec in specs)
    cap = rules.size_cap_numel or min(MAX_UNIT_NUMEL, max(1, total // 4))
    parts = _join_small(_cut_parts(root, specs, cap, rules), min(SMALL_NUMEL, cap, total // 64))
    units: list[Unit] = []
    for part in parts:
        kind = part.kind
        words = [part.module or "<root>", str(kind.dtype).removeprefix("torch.")]
        words += [] if kind.trainable else ["frozen"]
        words += ["persistent"] if kind.persistent else []
        entries, bounds = _place(part.params, kind.dtype.itemsize, rules)
        if entries[-1].stop == 0:  # only empty parameters: there is nothing to store or move
            continue
        units.append(
            Unit(
                index=len(units),
                name=":".join(words),
                module=part.module,
                dtype=kind.dtype,
                trainable=kind.trainable,
                persistent=kind.persistent,
                entries=entries,
                bounds=bounds,
            )
        )
    return units


def _cut_parts(root: ModuleSpec, specs: Sequence[ParamSpec], cap: int, rules: UnitRules) -> Iterator[_Part]:
    placed: set[int] = set()
    persistent_numel = 0
    for module, params, block in _walk(root, specs, cap, rules):
        groups: dict[_Kind, list[ParamSpec]] = {}
        for index in params:
            if index in placed:
                continue
            placed.add(index)
            spec = specs[index]
            persistent = (
                0 < spec.numel <= rules.persistence_numel
                and persistent_numel + spec.numel <= rules.max_persistent_numel
            )
            persistent_numel += spec.numel if persistent else 0
            kind = _Kind(dtype=spec.dtype, trainable=spec.trainable, persistent=persistent)
            groups.setdefault(kind, []).append(spec)
        for kind, members in groups.items():
            yield _Part(module=module, block=block, kind=kind, params=members)


def _join_small(parts: Iterable[_Part], most_numel: int) -> list[_Part]:
    """Join parts of one block and one kind, in the place of the first part, up to `most_numel` elements together. The
    limit bounds fetches without need: of parameters that a batch does not use, such as some experts."""
    joined: list[_Part] = []
    open_parts: dict[tuple[str, _Kind], _Part] = {}
    for part in parts:
        first = None if part.block is None else open_parts.get((part.block, part.kind))
        if first is not None and part.block is not None and first.numel + part.numel <= most_numel:
            first.module = part.block
            first.params += part.params
            continue
        joined.append(part)
        if part.block is not None and part.numel < most_numel and first is None:
            open_parts[part.block, part.kind] = part
    return joined


def _place(
    params: Sequence[ParamSpec], itemsize: int, rules: UnitRules
) -> tuple[tuple[FlatEntry, ...], tuple[int, ...]]:
    if rules.whole_params:
        return place_by_rank(params, itemsize, rules.world_size)
    entries = place_params(params)
    return entries, equal_bounds(entries[-1].stop, itemsize, rules.world_size)


def _walk(
    module: ModuleSpec, specs: Sequence[ParamSpec], cap: int, rules: UnitRules, above: tuple[ModuleSpec, ...] = ()
) -> Iterator[tuple[str, tuple[int, ...], str | None]]:
    """Yield (module name, its parameters, the block to which they belong) for each group.

    With several ranks the walk stops at a block of a list that holds stacks, even if the block is a stack itself,
    unless the block runs all of its children in order. `cap`: the most elements of a unit. `above`: the modules around
    `module`, root first."""
    numel = sum(specs[index].numel for index in module.all_params)
    in_list = any(outer.is_list for outer in above)
    is_whole = rules.world_size > 1 and in_list and module.holds_stack and not (module.is_stack and module.runs)
    fits = numel <= cap or (module.is_compiled and bool(above) and rules.size_cap_numel is None)
    if not module.children or is_whole or (fits and not module.holds_stack):
        yield module.name, module.all_params, _block(above)
        return
    above = (*above, module)
    if module.params:
        yield module.name, module.params, _block(above)
    for child in module.children:
        yield from _walk(child, specs, cap, rules, above)


def _block(above: Sequence[ModuleSpec]) -> str | None:
    """Return the name of the innermost module in `above` that is a block of a list, runs, and holds a stack for which
    it is cut; None if there is none."""
    blocks = [
        module.name
        for outer, module in pairwise(above)
        if outer.is_list and module.runs and module.holds_stack and not module.is_stack
    ]
    return blocks[-1] if blocks else None
