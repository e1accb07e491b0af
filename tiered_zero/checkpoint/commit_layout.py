"""Hash where each byte lies in the slots that one rank's in-place commits make durable, before anything is allocated.

A run adopts the commit of another if the two hashes are equal on every rank.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence

from tiered_zero.config.schema import Config
from tiered_zero.plan.planner import Plan
from tiered_zero.plan.slots import PlannedSlot
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.tiers.rack import nvme_needs


def run_fingerprint(config: Config, plan: Plan, slots: Iterable[PlannedSlot], layouts: Sequence[StateLayout]) -> str:
    """Hash everything that says where which bytes lie in the records of a run with in-place commits."""
    subgroups = [
        {
            "masters": [str(dtype) for dtype in layout.masters.dtypes],
            "segments": [
                [segment.unit.index, segment.unit_start, segment.start, segment.numel, str(segment.unit.dtype)]
                for segment in layout.subgroup.segments
            ],
            "pieces": [
                [param.name, param.shape, param.stride, piece.start, piece.param_start, piece.numel]
                + [field.name for field in layout.fields(piece)]
                for piece in layout.subgroup.pieces
                for param in [piece.param]
            ],
            "arrays": [
                [array.field.name, list(array.field.shape), str(array.field.dtype), array.piece, array.offset]
                for array in layout.arrays
            ],
        }
        for layout in layouts
    ]
    places = [[slot.name, slot.nbytes, slot.num_durable] for slot in slots if slot.num_durable]
    needs = nvme_needs(config, plan)
    own = committing_paths(config, plan)
    stores = sorted([[os.path.abspath(path) for path in paths], needs.get(paths, 0)] for paths in own)
    text = json.dumps([subgroups, places, stores], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def committing_paths(config: Config, plan: Plan) -> list[tuple[str, ...]]:
    """List the swap paths of the stores that have a part in a commit: that of the state first."""
    zero = config.zero_optimization
    paths = [zero.offload_optimizer.nvme_paths]
    if plan.nbytes("nvme", "commit_param"):
        paths.append(zero.offload_param.nvme_paths)
    return list(dict.fromkeys(paths))
