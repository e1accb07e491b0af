"""Bytes that each unit has on each tier, and what a step reads and writes of them on nvme."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tiered_zero.layout.flat import Unit
from tiered_zero.plan.placement import Placement
from tiered_zero.plan.request import SubGroupSize
from tiered_zero.plan.staging import NUM_GRADIENT_WINDOWS


@dataclass(frozen=True, kw_only=True)
class UnitTraffic:
    """A unit's bytes, at their homes. `numel`: of parameters, without padding; `lookups`: those of embeddings that no
    product reads. `is_tied`: it holds an embedding that is a product's weight too. `params`, `gradients`: the tier, and
    the bytes; "" without gradients. `is_paged`: it leaves the device. `state`: tier -> bytes."""

    numel: int
    lookups: int
    is_tied: bool
    params: tuple[str, int]
    gradients: tuple[str, int]
    is_paged: bool
    state: Mapping[str, int]


def list_traffic(
    units: Sequence[Unit],
    subgroups: Sequence[SubGroupSize],
    tiers: Placement,
    gradient_nbytes: Callable[[Unit], int],
) -> tuple[UnitTraffic, ...]:
    """List the units in the order of a forward. `gradient_nbytes`: of a unit at its home."""
    state: dict[int, Counter[str]] = {unit.index: Counter() for unit in units}
    for subgroup, tier in zip(subgroups, tiers.state, strict=True):
        left_nbytes, left_numel = subgroup.state_nbytes, sum(subgroup.parts.values())
        for index, numel in subgroup.parts.items():
            share = left_nbytes * numel // max(1, left_numel)
            state[index][tier] += share
            left_nbytes, left_numel = left_nbytes - share, left_numel - numel
    found = []
    for unit in units:
        embeddings = [entry.param for entry in unit.entries if entry.param.embedding]
        gradients = (tiers.gradients[unit.index], gradient_nbytes(unit)) if unit.trainable else ("", 0)
        found.append(
            UnitTraffic(
                numel=unit.params_numel,
                lookups=sum(param.numel for param in embeddings if not param.aliases),
                is_tied=any(param.aliases for param in embeddings),
                params=(tiers.params[unit.index], tiers.home_nbytes(unit)),
                gradients=gradients,
                is_paged=not tiers.is_resident(unit),
                state=dict(state[unit.index]),
            )
        )
    return tuple(found)


def written_on_nvme(units: Sequence[UnitTraffic], accumulation: int, *, in_backward: bool) -> dict[str, int]:
    """Return by kind the bytes that a step writes: trained parameters, masters and state, and the gradients that find
    no window. [Note: Gradients on NVMe] `in_backward`: updates start there, and keep the windows of what they need."""
    params = sum(unit.params[1] for unit in units if unit.state and unit.params[0] == "nvme")
    return {
        "param": params,
        "state": sum(unit.state.get("nvme", 0) for unit in units),
        "gradient": sum(_gradient_writes(units, accumulation, in_backward=in_backward)),
    }


def _gradient_writes(units: Sequence[UnitTraffic], accumulation: int, *, in_backward: bool) -> list[int]:
    """Return the bytes of each write of gradients, in the order of backward: the last unit's come first, and each
    backward opens them all anew. The first units' are in windows when the last backward ends, which writes none of
    them, unless the oldest is written ahead of need."""
    sizes = [unit.gradients[1] for unit in reversed(units) if unit.gradients[0] == "nvme"]
    if in_backward:
        return sizes * (accumulation - 1)
    kept = NUM_GRADIENT_WINDOWS - 1
    return (sizes * accumulation)[: max(0, len(sizes) * accumulation - kept)]
