"""State that the user's optimizer has from former steps (or from its constructor) becomes the run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tiered_zero.hardware.staging import StagingPool
from tiered_zero.layout.subgroups import Piece
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.optim.torch_rule import TorchRule
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.slots import write_slot

Scalars = dict[tuple[int, int], dict[str, Any]]
"""(sub-group, piece) -> the piece's `Run.scalars`."""


def carry_over(
    source: Optimizer,
    layouts: Sequence[StateLayout],
    params: Mapping[str, nn.Parameter],
    inventory: Inventory,
    staging: StagingPool | None,
) -> Scalars:
    """Write the arrays of `source.state`, bit for bit, to the homes of the sub-groups.

    `params`: by name. A sub-group of which no parameter has state is left unborn. Driver thread; blocks. Raises
    ModelError for state that is not as the optimizer's class makes it.
    """
    rule = TorchRule.from_optimizer(source)
    scalars: Scalars = {}
    for layout in layouts:
        exported = {
            piece: rule.export_state(source, params[piece.param.name])
            for piece in layout.subgroup.pieces
            if source.state.get(params[piece.param.name])
        }
        if not exported:
            continue
        raw = torch.zeros(layout.nbytes, dtype=torch.uint8)
        last: dict[str, Any] = {}
        for piece, (arrays, values) in exported.items():
            for name, view in layout.state(raw, piece, piece.start, piece.stop).items():
                if name in arrays:
                    view.copy_(_part(arrays[name], piece, rule))
            last = last if _same(last, values) else values  # neighbours of one history are stepped together
            scalars[layout.subgroup.index, piece.index] = last
        home = inventory.home(layout.subgroup, "state")
        write_slot(home, layout.master_nbytes, raw[layout.master_nbytes :], staging)
    return scalars


def _part(array: torch.Tensor, piece: Piece, rule: TorchRule) -> torch.Tensor:
    return array[piece.param_start : piece.param_start + piece.numel] if rule.elementwise else array


def _same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(_equal(left[name], right[name]) for name in left)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)
