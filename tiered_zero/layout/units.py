"""Find the units of a module tree: by default one transformer block each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tiered_zero.layout.flat import FlatEntry, ParamSpec, Unit, equal_bounds, place_by_rank, place_params

MAX_UNIT_NUMEL = 1 << 28
"""A quarter of a billion elements: half a GiB in 16 bit, far past the size at which any link is at full rate."""


@dataclass(frozen=True, kw_only=True)
class UnitRules:
    """`size_cap_numel`: None lets the walk choose (at least four units where the model has them, 2^28 elements at
    most).

    `persistence_numel`: trainable or frozen parameters of at most this many elements never leave the device, up to
    `max_persistent_numel` of them in all. With more ranks than one a block is never split into the stacks inside it:
    ranks may choose other experts, and must gather the same units in the same order. `whole_params`: ranks own whole
    parameters, which the update rule steps.
    """

    size_cap_numel: int | None = None
    persistence_numel: int = 0
    max_persistent_numel: int = 1 << 62
    world_size: int = 1
    whole_params: bool = False


@dataclass(frozen=True, kw_only=True)
class ModuleSpec:
    """One module of a tree. `params`: places in the list of ParamSpecs of the parameters that it owns itself.

    `is_stack`: holds blocks, or experts, that run one by one. `is_list`: a stack that holds them by number.
    """

    name: str = ""
    params: tuple[int, ...] = ()
    children: tuple[ModuleSpec, ...] = ()
    is_stack: bool = False
    is_list: bool = False

    @cached_property
    def all_params(self) -> tuple[int, ...]:
        """Of the whole subtree, each once, in the order of `module.parameters()`."""
        found = [*self.params, *(index for child in self.children for index in child.all_params)]
        return tuple(dict.fromkeys(found))

    @cached_property
    def holds_stack(self) -> bool:
        return self.is_stack or any(child.holds_stack for child in self.children)


def find_units(root: ModuleSpec, specs: Sequence[ParamSpec], rules: UnitRules) -> list[Unit]:
    """Cut the tree into groups and each group into units by dtype, `requires_grad` and persistence.

    The walk descends while a module holds a stack of blocks or is larger than the cap; what it stops at becomes a
    group; parameters that a descended module owns itself become a group of that module. A tied parameter belongs to the
    first group that meets it. Order: that of the walk, which is the order of use in most models.
    """
    total = sum(spec.numel for spec in specs)
    cap = rules.size_cap_numel or min(MAX_UNIT_NUMEL, max(1, total // 4))
    placed: set[int] = set()
    units: list[Unit] = []
    persistent_numel = 0
    for module, params in _walk(root, specs, cap, rules.world_size > 1):
        groups: dict[tuple[Any, bool, bool], list[ParamSpec]] = {}
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
            groups.setdefault((spec.dtype, spec.trainable, persistent), []).append(spec)
        for (dtype, trainable, persistent), members in groups.items():
            parts = [module or "<root>", str(dtype).removeprefix("torch.")]
            parts += [] if trainable else ["frozen"]
            parts += ["persistent"] if persistent else []
            entries, bounds = _place(members, dtype.itemsize, rules)
            if entries[-1].stop == 0:  # only empty parameters: nothing rests anywhere, nothing moves
                continue
            units.append(
                Unit(
                    index=len(units),
                    name=":".join(parts),
                    module=module,
                    dtype=dtype,
                    trainable=trainable,
                    persistent=persistent,
                    entries=entries,
                    bounds=bounds,
                )
            )
    return units


def _place(
    params: Sequence[ParamSpec], itemsize: int, rules: UnitRules
) -> tuple[tuple[FlatEntry, ...], tuple[int, ...]]:
    if rules.whole_params:
        return place_by_rank(params, itemsize, rules.world_size)
    entries = place_params(params)
    return entries, equal_bounds(entries[-1].stop, itemsize, rules.world_size)


def _walk(
    module: ModuleSpec, specs: Sequence[ParamSpec], cap: int, whole_blocks: bool, in_list: bool = False
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name of the module, its parameters) of each group. `whole_blocks`: end at a block of a list (`in_list`) that
    holds stacks itself."""
    numel = sum(specs[index].numel for index in module.all_params)
    is_whole = whole_blocks and in_list and module.holds_stack and not module.is_stack
    if not module.children or is_whole or (numel <= cap and not module.holds_stack):
        yield module.name, module.all_params
        return
    if module.params:
        yield module.name, module.params
    for child in module.children:
        yield from _walk(child, specs, cap, whole_blocks, in_list or module.is_list)
