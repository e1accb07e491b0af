"""The state of a unit, and the one table of its legal changes.

[Note: State of a unit]
Two enums say it; they change together, and only in `PagedUnit`. The rest is a plain fact (`num_users`,
`version`, `fetch`), or the storage knows it: `is_full`, and `is_viewed`, which keeps the memory of a unit that is
OFFLOADED already. A view is held by a node that runs, a tensor that a checkpointed region has
recomputed, an output that is a slice of a weight. So neither eviction nor a wrong prefetch can pull memory from under a
computation; at worst the budget is passed, which raises.

A unit that lives on the device has its storage as its home: it is IN_USE, or CACHED while it waits for its update.
`Pager.abort` leads from each pair of the table back to OFFLOADED, or leaves the unit to the `gathered` block that uses
it, or to its fetch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import nn

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import InternalError
from tiered_zero.layout.flat import Unit
from tiered_zero.unit.flat_storage import FlatStorage
from tiered_zero.unit.param_handlers import FaultHandler


class UnitState(Enum):
    """Which bytes of a unit are on the device.

    OFFLOADED: none; they are in its home. FETCHING: device memory is allocated, a transfer is in flight, and compute
    has not waited for it. CACHED: all, and parameters are guarded. IN_USE: all, and parameters are plain; users hold
    the unit, or backward does until it needs the room.
    """

    __hash__ = object.__hash__  # Enum's own runs in Python, twice for each change
    OFFLOADED = "offloaded"
    FETCHING = "fetching"
    CACHED = "cached"
    IN_USE = "in use"


class WeightState(Enum):
    """Which weights a fetch from the unit's home gives.

    CURRENT: those of the last step; the fetch waits for what of that update is still under way. UPDATING: those of a
    step that is not taken yet, whose update began in backward: any use is refused. STALE: older ones than user code has
    written to the device, which are dropped at the end of their use.
    """

    __hash__ = object.__hash__
    CURRENT = "current"
    UPDATING = "updating"
    STALE = "stale"


State = tuple[UnitState, WeightState]

_OFFLOADED = UnitState.OFFLOADED, WeightState.CURRENT
_OFFLOADED_UPDATING = UnitState.OFFLOADED, WeightState.UPDATING
_FETCHING = UnitState.FETCHING, WeightState.CURRENT
_FETCHING_UPDATING = UnitState.FETCHING, WeightState.UPDATING
_CACHED = UnitState.CACHED, WeightState.CURRENT
_CACHED_UPDATING = UnitState.CACHED, WeightState.UPDATING
_IN_USE = UnitState.IN_USE, WeightState.CURRENT
_IN_USE_STALE = UnitState.IN_USE, WeightState.STALE

LEGAL_CHANGES: dict[tuple[State, State], str] = {
    (_OFFLOADED, _FETCHING): "fetch",
    (_OFFLOADED_UPDATING, _FETCHING_UPDATING): "fetch",  # ahead of use, once the update is done
    (_FETCHING, _IN_USE): "acquire",
    (_CACHED, _IN_USE): "acquire",
    (_IN_USE, _CACHED): "guard",
    (_OFFLOADED, _OFFLOADED): "evict",  # frees what a view had kept
    (_OFFLOADED_UPDATING, _OFFLOADED_UPDATING): "evict",
    (_FETCHING, _OFFLOADED): "evict",
    (_FETCHING_UPDATING, _OFFLOADED_UPDATING): "evict",
    (_CACHED, _OFFLOADED): "evict",
    (_IN_USE, _OFFLOADED): "evict",
    (_IN_USE_STALE, _OFFLOADED): "evict",
    (_IN_USE, _IN_USE_STALE): "write",
    (_OFFLOADED, _OFFLOADED_UPDATING): "block",
    (_CACHED, _CACHED_UPDATING): "block",
    (_OFFLOADED_UPDATING, _OFFLOADED): "unblock",
    (_FETCHING_UPDATING, _FETCHING): "unblock",
    (_CACHED_UPDATING, _CACHED): "unblock",
}
"""(before, after) -> the act that makes this change. No other change is legal."""


@dataclass(eq=False, kw_only=True)
class PagedUnit:
    """The pager's record of one unit. `is_resident`: it lives on the device. `own`: elements of the flat that rest in
    its home, all or this rank's shard. `params`: each one's index in the unit. `handler`: is called where one is used
    while it is guarded.

    `fetch`: the transfer that fills the storage, until compute has waited for it. `num_users`: running modules and
    blocks of `gathered` that use the unit, one more if it lives on the device; with none it may still be IN_USE,
    held for the rest of its backward. `num_gathers`: the blocks among them. `version`: how often its values have
    changed, for graphs that saved earlier ones.
    """

    unit: Unit
    storage: FlatStorage
    is_resident: bool
    own: slice
    params: dict[nn.Parameter, int]
    handler: FaultHandler
    fetch: Transfer | None = None
    num_users: int = 0
    version: int = 0
    num_gathers: int = 0
    state: UnitState = UnitState.OFFLOADED
    weights: WeightState = WeightState.CURRENT

    def __post_init__(self) -> None:
        if self.is_resident:
            self.state = UnitState.CACHED

    # One method an act of LEGAL_CHANGES, and of users and versions: nothing else writes them.

    def begin_fetch(self) -> None:
        self._change(UnitState.FETCHING)

    def begin_use(self) -> None:
        """Let compute use the unit: its bytes have come."""
        self._change(UnitState.IN_USE)
        self.fetch = None

    def guard(self) -> None:
        self._change(UnitState.CACHED)

    def end_residence(self) -> None:
        """The device has no bytes of it that count; the home's are current."""
        self._change(UnitState.OFFLOADED, WeightState.CURRENT if self.weights is WeightState.STALE else None)
        self.fetch = None

    def mark_stale(self) -> None:
        """User code has written to a unit in use. The storage of a unit that lives on the device is its home, and is
        never stale."""
        if (self.state, self.weights) == _IN_USE and not self.is_resident:
            self._change(UnitState.IN_USE, WeightState.STALE)

    def block(self) -> None:
        """Refuse any use: an update has begun, of a step that is not taken yet."""
        if self.weights is not WeightState.UPDATING:  # it was blocked already where backward runs twice
            self._change(self.state, WeightState.UPDATING)

    def unblock(self) -> None:
        if self.weights is WeightState.UPDATING:
            self._change(self.state, WeightState.CURRENT)

    def add_user(self) -> None:
        self.num_users += 1

    def remove_user(self) -> None:
        self.num_users -= 1
        assert self.num_users >= 0, f"{self.unit.name} released more often than acquired"

    def reset_users(self, num_users: int) -> None:
        self.num_users = num_users

    def renew(self) -> None:
        """Its values change: graphs that saved earlier ones are refused."""
        self.version += 1

    def _change(self, state: UnitState, weights: WeightState | None = None) -> None:
        """Enter `state` (and `weights`, where they change too), and guard or unguard the parameters with it.

        Raises InternalError for a change that LEGAL_CHANGES has not, with nothing changed.
        """
        before = self.state, self.weights
        after = state, before[1] if weights is None else weights
        if (before, after) not in LEGAL_CHANGES:
            raise InternalError(
                f"Unit {self.unit.name} cannot change from {_describe(before)} to {_describe(after)}. This is an error "
                "in tiered_zero, not in the model: please report it with this message."
            )
        if state is UnitState.IN_USE and before[0] is not state:
            self.storage.unguard()
        self.state, self.weights = after
        if state is UnitState.OFFLOADED or state is UnitState.CACHED:
            self.storage.guard()

    @property
    def is_idle(self) -> bool:
        """Whether nothing uses it and it can be evicted, as its state says, whatever else holds a view of it."""
        return not self.num_users and self.state is not UnitState.OFFLOADED

    @property
    def waits_for_step(self) -> bool:
        """Whether step() will change it: no update of it has begun in backward."""
        return self.unit.trainable and self.weights is not WeightState.UPDATING

    @property
    def is_kept(self) -> bool:
        """Whether it is offloaded, and a view keeps its memory."""
        return self.state is UnitState.OFFLOADED and self.storage.is_full

    @property
    def is_evictable(self) -> bool:
        """Whether nothing uses it and eviction frees memory. A transfer in flight views the storage too."""
        if self.num_users or not self.storage.is_full:
            return False
        return self.state is UnitState.FETCHING or not self.storage.is_viewed


def _describe(state: State) -> str:
    return f"{state[0].name}/{state[1].name}"


@dataclass(kw_only=True)
class Frame:
    """A running module, or the engine's forward, on `thread`. `held`: units that stay for its whole length, used by
    the pass `pass_name`. `faulted`: units of functions called in it; any of them is evicted when room is short and no
    view is held, and fetched again when the next function is called with it. `is_inside_hooks`: hooks for saved
    tensors were set as it began. `disables_cast_cache`: autocast's, while it runs. [Note: Casts of weights]"""

    thread: int
    pass_name: str = ""
    held: list[PagedUnit] = field(default_factory=list)
    faulted: list[PagedUnit] = field(default_factory=list)
    is_inside_hooks: bool = False
    disables_cast_cache: bool = False


@dataclass(eq=False, kw_only=True)
class UnitTable:
    """Every unit of a model, by index, by parameter and by the identity of its storage."""

    by_index: dict[int, PagedUnit] = field(default_factory=dict)
    by_param: dict[nn.Parameter, PagedUnit] = field(default_factory=dict)
    by_storage: dict[int, PagedUnit] = field(default_factory=dict)

    def add(
        self,
        unit: Unit,
        storage: FlatStorage,
        params: Sequence[nn.Parameter],
        handler: FaultHandler,
        own: slice | None,
    ) -> None:
        """`own`: None of a unit that lives on the device."""
        indices = {param: i for i, param in enumerate(params)}
        paged = PagedUnit(
            unit=unit,
            storage=storage,
            is_resident=own is None,
            own=own or slice(0, unit.numel),
            params=indices,
            handler=handler,
        )
        self.by_index[unit.index] = paged
        self.by_storage[storage.key] = paged
        self.by_param.update(dict.fromkeys(params, paged))

    def renew_storages(self) -> None:
        self.by_storage = {paged.storage.key: paged for paged in self}

    def __iter__(self) -> Iterator[PagedUnit]:
        return iter(self.by_index.values())
