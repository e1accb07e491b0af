"""What is known of a unit's stay on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import final
from weakref import WeakSet

import torch
from torch import nn

from tiered_zero.layout.flat import Unit
from tiered_zero.params.flat_storage import FlatStorage
from tiered_zero.transfer import Transfer


class UnitState(Enum):
    """AWAY: no bytes on the device; they rest at the unit's home. READY: bytes are there or on their way, but
    parameters are
    guarded (prefetched, or kept for reuse). LENT: compute may use them; parameters are plain."""

    AWAY = auto()
    READY = auto()
    LENT = auto()


# A unit's bytes leave only while nobody holds a view of them (`FlatStorage.is_viewed`): a node that runs, a tensor that
# a checkpointed region has recomputed, an output that is a slice of a weight. So neither eviction nor a wrong guess can
# pull memory from under a computation; at worst the budget is passed, which raises.


@dataclass
class Residency:
    """What the pager knows of one unit. `fetch`: the transfer that fills it, until compute has waited for it.

    `num_lends`: running modules and `loans` that use it; with none it may still be LENT, held for the rest of its
    backward. `clock`: when it was last used. `version`: how often its values have changed, for graphs that saved
    earlier ones. `is_changed`: its bytes on the device are no longer its home's.
    """

    unit: Unit
    storage: FlatStorage
    state: UnitState = UnitState.AWAY
    fetch: Transfer | None = None
    num_lends: int = 0
    clock: int = 0
    version: int = 0
    is_changed: bool = False
    params: dict[nn.Parameter, int] = field(default_factory=dict)
    loans: WeakSet[Loan] = field(default_factory=WeakSet)


@final
class Loan:
    """A block of user code that may use a unit. An interrupt may keep the block's end from running: then the last
    reference to its loan goes with it."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency


@dataclass
class Frame:
    """A running module or lender. `lent`: stay for its whole length. `demanded`: by functions called in it; any of them
    goes when room is short and nobody views it, and comes back when the next function is called with it."""

    lent: list[Residency] = field(default_factory=list)
    demanded: list[Residency] = field(default_factory=list)


@dataclass(frozen=True)
class SavedView:
    """What autograd keeps instead of a view of a flat: which unit in which version, and the view's geometry in
    elements."""

    unit_index: int
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class HeldWrapper:
    """What autograd keeps of a view of a flat inside a torch.func transform: the transform's wrapper cannot be made
    anew, so its bytes stay. `view`: keeps them there (`FlatStorage.is_viewed`), for the wrapper itself does not."""

    wrapper: torch.Tensor
    view: torch.Tensor
    inner: SavedView
