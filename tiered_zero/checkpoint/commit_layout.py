"""A hash of where each byte lies in the slots that the in-place commits of one rank make durable.

A run adopts the commit of another where the two hashes are equal on every rank. Computed from the plan, before anything
is allocated.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiered_zero.config.schema import Config
from tiered_zero.layout.subgroups import ParamPiece
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.plan.planner import Plan
from tiered_zero.plan.slots import PlannedSlot
from tiered_zero.tiers.rack import nvme_needs


def run_fingerprint(config: Config, plan: Plan, slots: Iterable[PlannedSlot], layouts: Sequence[StateLayout]) -> str:
    """Hash the layout of a run with in-place commits."""
    needs = nvme_needs(config, plan)
    durable = [slot for slot in slots if slot.num_durable]
    return _fingerprint(layouts, durable, {paths: needs.get(paths, 0) for paths in committing_paths(config, plan)})


def committing_paths(config: Config, plan: Plan) -> list[tuple[str, ...]]:
    """List the swap paths of the stores that have a part in a commit: that of the state first."""
    zero = config.zero_optimization
    paths = [zero.offload_optimizer.nvme_paths]
    if plan.nbytes("nvme", "commit_param"):
        paths.append(zero.offload_param.nvme_paths)
    return list(dict.fromkeys(paths))


def _fingerprint(
    layouts: Sequence[StateLayout], slots: Sequence[PlannedSlot], needs: Mapping[Sequence[str], int]
) -> str:
    """Hash everything that says where which bytes lie in the records of a run: where it is equal, a run can adopt the
    records of another. `slots`: those that are committed; `needs`: paths of each store that takes part -> its bytes."""
    subgroups = [
        {
            "masters": [str(dtype) for dtype in layout.masters.dtypes],
            "segments": [
                [segment.unit.index, segment.unit_start, segment.start, segment.numel, str(segment.unit.dtype)]
                for segment in layout.subgroup.segments
            ],
            "pieces": [[*_describe(piece), *_names(layout, piece)] for piece in layout.subgroup.pieces],
            "arrays": [
                [array.field.name, list(array.field.shape), str(array.field.dtype), array.piece, array.offset]
                for array in layout.arrays
            ],
        }
        for layout in layouts
    ]
    places = [[slot.name, slot.nbytes, slot.num_durable] for slot in slots]
    stores = sorted([[os.path.abspath(path) for path in paths], nbytes] for paths, nbytes in needs.items())
    text = json.dumps([subgroups, places, stores], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(piece: ParamPiece) -> list[Any]:
    param = piece.param
    return [param.name, param.shape, param.stride, piece.start, piece.param_start, piece.numel]


def _names(layout: StateLayout, piece: ParamPiece) -> list[str]:
    return [field.name for field in layout.fields(piece)]
