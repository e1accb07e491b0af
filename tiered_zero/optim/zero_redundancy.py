"""An optimizer whose state is split over the ranks of a process group: each steps some parameters, and broadcasts."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiered_zero.errors import ConfigError
from tiered_zero.hardware.ranks.shard_group import Joinable, ShardGroup, StepHook, notify_join_context
from tiered_zero.optim.consolidate import consolidate
from tiered_zero.optim.offloaded import OffloadedOptimizer
from tiered_zero.optim.partition import (
    BucketKind,
    Message,
    build_buckets,
    messages_of,
    params_of,
    partition_groups,
    sync_groups,
)
from tiered_zero.update.state_access import creates_state

logger = logging.getLogger("tiered_zero")


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Steps `optimizer_class` over this rank's parameters, and broadcasts each to the other ranks (Rajbhandari et al.
    2020, stage 1). Names, partition and numbers are those of torch.distributed.optim's class.

    `self.optim` is the local optimizer: plain, or with `offload` an `OffloadedOptimizer`, whose broadcasts run under
    the update of the parameters behind. `parameters_as_bucket_view`: a rank's parameters are views of one tensor, and
    neighbours are broadcast together. Gradients are whole on every rank, as DDP leaves them. Every rank makes each call
    but `state_dict`, in the same order.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        offload: Mapping[str, Any] | None = None,
        **defaults: Any,
    ) -> None:
        """Raises TypeError and ValueError as torch's class, and what the local optimizer raises."""
        if overlap_with_ddp:
            raise ConfigError(
                "overlap_with_ddp: expected False; found True, which in torch's class leaves out the first two or "
                "three updates and takes functional optimizers alone. Leave it out; with offload=... broadcasts "
                "overlap the update."
            )
        given = _checked(params)
        if isinstance(optimizer_class, type) and not issubclass(optimizer_class, Optimizer):
            raise ValueError(
                f"Passing in a functional optimizer {optimizer_class} when `overlap_with_ddp=False`: expected a class "
                "of torch.optim, or a subclass of torch.optim.Optimizer."
            )
        process_group = defaults.pop("group", process_group)
        self.initialized = False
        Optimizer.__init__(self, given, {})
        Joinable.__init__(self)
        self._ranks = ShardGroup(process_group)
        self.process_group = self._ranks.process_group
        self.rank, self.world_size = self._ranks.rank, self._ranks.world_size
        self.global_rank = self._ranks.global_rank
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._parts = partition_groups(self.param_groups, self.world_size)
        self._trainable = self._trainable_mask()
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self.buckets: dict[BucketKind, list[Tensor]] = {}
        """Device and dtype -> the tensor of each rank that its parameters are views of; empty without bucket views."""
        self._build_buckets()
        own = self._parts[self.rank]
        self.optim: Optimizer
        if offload is None:
            self.optim = optimizer_class(own, **defaults)
        else:
            self.optim = _ShardOptimizer(self._ranks, own, optimizer_class, offload, **defaults)
        self.defaults = self.optim.defaults  # which schedulers read
        sync_groups(self.optim.param_groups, self.param_groups)
        self.initialized = True

    @property
    def group(self) -> Any:
        """The process group."""
        return self.process_group

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Step this rank's parameters, and exchange all. Returns what the local step returns; `kwargs` are its own."""
        grads = [param.grad for param in params_of(self.param_groups) if param.grad is not None]
        if closure is None and not kwargs and creates_state(self.param_groups, grads):
            # alone: torch.distributed.checkpoint calls it on ranks without state, and a rank without parameters never
            # has any; groups and gradients are those of every rank, and at an lr of 0 weights stay
            sync_groups(self.param_groups, self.optim.param_groups)
            self.optim.step()
            return None
        notify_join_context(self)
        if (trainable := self._trainable_mask()) != self._trainable:
            logger.warning(
                "ZeroRedundancyOptimizer detected that the trainable parameters changed; rebuilding the parameter "
                "buckets if enabled"
            )
            self._trainable = trainable
            self._build_buckets()
        sync_groups(self.param_groups, self.optim.param_groups)
        given = kwargs if closure is None else {"closure": closure, **kwargs}
        broadcasts = _Broadcasts(self._ranks, [list(messages_of(groups)) for groups in self._parts])
        if isinstance(self.optim, OffloadedOptimizer):
            loss = self.optim.step(**given, on_written=broadcasts.advance)
        else:
            loss = self.optim.step(**given)
        broadcasts.finish()
        sync_groups(self.optim.param_groups, self.param_groups)
        others = [param for rank, groups in enumerate(self._parts) if rank != self.rank for param in params_of(groups)]
        torch.autograd.graph.increment_version(others)
        return loss

    def join_hook(self, **_: Any) -> StepHook:
        """Return what torch's Join context runs on ranks without data. Gradients are set before."""
        return StepHook(self.step)

    @property
    def join_device(self) -> torch.device:
        device: torch.device = params_of(self.param_groups)[0].device
        return device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    # -- groups --------------------------------------------------------------------------------------------------------

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Return the param groups of every rank, as they are now, each with the parameters that the rank steps."""
        return partition_groups(self.param_groups, self.world_size)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does; every rank calls it."""
        super().add_param_group(param_group)
        if not self.initialized:
            return
        sync_groups(self.param_groups[:-1], self.optim.param_groups)  # what a scheduler has set since the last step
        parts = partition_groups(self.param_groups, self.world_size)
        try:
            self.optim.add_param_group(parts[self.rank][-1])
        except BaseException:
            del self.param_groups[-1]
            raise
        self._parts = parts
        self._trainable = self._trainable_mask()
        self._build_buckets()
        sync_groups(self.optim.param_groups, self.param_groups)

    def _build_buckets(self) -> None:
        if self.parameters_as_bucket_view:
            self.buckets = build_buckets(self._parts)

    def _trainable_mask(self) -> list[bool]:
        return [param.requires_grad for param in params_of(self.param_groups)]

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The local optimizer's. Set it to an empty mapping to start the state of this rank's parameters anew."""
        return self.optim.state if hasattr(self, "optim") else {}

    @state.setter
    def state(self, value: Any) -> None:
        if hasattr(self, "optim"):  # torch's constructor sets it before
            self.optim.state = value if len(value) else defaultdict(dict)
            self._consolidated = None

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring all state to rank `to`, in host memory, a tensor at a time; `state_dict()` then has it. Every rank
        calls it."""
        sync_groups(self.param_groups, self.optim.param_groups)
        parts, indices = list(map(params_of, self._parts)), self._indices()
        self._consolidated = consolidate(self._ranks, parts, indices, self._local_state, to)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters in torch's format, as consolidated last; "partition" lists each rank's
        indices.

        Without a consolidation the state of one rank is all of it. Raises RuntimeError if this rank has a part of it.
        """
        if self.world_size == 1:
            self.consolidate_state_dict()
        elif self._consolidated is None and self.optim.state:
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank. Please call `consolidate_state_dict(to="
                f"{self.rank})` on all ranks beforehand if you meant to save the global state."
            )
        whole, indices = super().state_dict(), self._indices()
        whole["state"] = dict(self._consolidated or {})
        whole["partition"] = [
            [[indices[id(param)] for param in group["params"]] for group in groups] for groups in self._parts
        ]
        return whole

    def local_state_dict(self) -> dict[str, Any]:
        """Return the state dict of this rank's local optimizer."""
        sync_groups(self.param_groups, self.optim.param_groups)
        return self.optim.state_dict()

    @staticmethod
    def rank_local_state_dict(rank: int, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `local_state_dict` of a rank from the state dict of all. Also from those whose "partition" is a
        range of param groups for each rank, and whose "state" is a list by rank."""
        own = state_dict["partition"][rank]
        if len(own) == 2 and all(isinstance(bound, int) for bound in own):
            return {"state": state_dict["state"][rank], "param_groups": state_dict["param_groups"][own[0] : own[1]]}
        return _local(state_dict, own)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of all parameters, of any such optimizer or a plain one: each rank keeps what is its own.
        Raises ValueError as torch does where groups do not fit."""
        super().load_state_dict({**state_dict, "state": {}})
        indices = self._indices()
        own = [[indices[id(param)] for param in group["params"]] for group in self._parts[self.rank]]
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        by_index = dict(enumerate(saved))
        state = {index: state_dict["state"].get(key) for index, key in by_index.items()}
        groups = [{**group, "params": []} for group in self.param_groups]
        self.optim.load_state_dict(_local({"state": state, "param_groups": groups}, own))
        self._consolidated = None
        sync_groups(self.optim.param_groups, self.param_groups)

    def _indices(self) -> dict[int, int]:
        """Id of a parameter -> its index in a state dict."""
        return {id(param): index for index, param in enumerate(params_of(self.param_groups))}

    def _local_state(self, param: Tensor) -> Mapping[str, Any]:
        if isinstance(self.optim, OffloadedOptimizer):
            return self.optim.read_state(param)  # type: ignore[arg-type]
        state: Mapping[str, Any] = self.optim.state.get(param, {})
        return state

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free what an offloaded local optimizer holds. Idempotent."""
        if isinstance(self.optim, OffloadedOptimizer):
            self.optim.close()

    def __enter__(self) -> ZeroRedundancyOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OpeningRanks:
    """The ranks of a group while all of them open tiers; at other times, as when parameters have moved, this one."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self._is_awaited = False

    @property
    def world_size(self) -> int:
        return self._group.world_size if self._is_awaited else 1

    def exchange(self, data: bytes, what: str = "") -> list[bytes]:
        self._is_awaited = False
        return self._group.exchange(data)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Every rank opens its tiers inside; one that fails before says that it needs nothing."""
        self._is_awaited = True
        try:
            yield
        finally:
            if self._is_awaited:
                self.exchange(b"[]")


class _ShardOptimizer(OffloadedOptimizer):
    """The local optimizer of a rank: what the ranks of a host need of its disks counts together."""

    def __init__(self, group: ShardGroup, *arguments: Any, **defaults: Any) -> None:
        self._ranks = self._opening = _OpeningRanks(group)
        with self._opening.opening():
            super().__init__(*arguments, **defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._pipeline is None:  # torch's constructor calls it
            super().add_param_group(param_group)
            return
        with self._opening.opening():
            super().add_param_group(param_group)


class _Broadcasts:
    """The broadcasts of one step, in rounds of one message of every rank: all ranks issue them in the same order."""

    def __init__(self, ranks: ShardGroup, messages: Sequence[Sequence[Message]]) -> None:
        self._ranks = ranks
        self._messages = messages
        self._num_written = self._num_rounds = 0
        self._under_way: list[tuple[Any, Tensor, Tensor]] = []

    def advance(self, _param: Tensor) -> None:
        """Start the rounds for which this rank's parameters are written; one more is."""
        self._num_written += 1
        own = self._messages[self._ranks.rank]
        while self._num_rounds < len(own) and own[self._num_rounds].num_params <= self._num_written:
            self._start_round()

    def finish(self) -> None:
        """Start what is left, and wait for all of it."""
        while self._num_rounds < max(map(len, self._messages)):
            self._start_round()
        for work, tensor, room in self._under_way:
            work.wait()
            if room is not tensor:
                tensor.copy_(room)

    def _start_round(self) -> None:
        for source, messages in enumerate(self._messages):
            if self._num_rounds < len(messages):
                tensor = messages[self._num_rounds].tensor
                room = tensor.contiguous()  # gloo takes any tensor for contiguous memory, and writes past its view
                self._under_way.append((self._ranks.broadcast(room, source), tensor, room))
        self._num_rounds += 1


def _local(state_dict: Mapping[str, Any], own: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Cut a rank's state dict out of the whole. `own`: its indices, group by group."""
    place = {index: place for place, index in enumerate(index for indices in own for index in indices)}
    state = {place[index]: values for index, values in state_dict["state"].items() if index in place and values}
    groups = [
        {**group, "params": [place[index] for index in indices]}
        for group, indices in zip(state_dict["param_groups"], own, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _checked(params: Iterable[Any]) -> list[Any]:
    """List tensors, or param groups of such, as torch's class takes them. Raises TypeError and ValueError."""
    if isinstance(params, Tensor):
        raise TypeError(f"`params` argument should be an iterable of Tensors, but got {torch.typename(params)}")
    try:
        given = list(params)
    except TypeError as error:
        raise TypeError(
            f"`params` argument should be an iterable of Tensors or dicts, but got {torch.typename(params)}"
        ) from error
    if not given:
        raise ValueError("ZeroRedundancyOptimizer got an empty parameter list")
    tensors = given
    if all(isinstance(group, dict) for group in given):
        if any("params" not in group for group in given):
            raise ValueError(
                "Each parameter group passed-in via `params` must have a 'params' key mapping to the parameters in the "
                "group"
            )
        given = [{**group, "params": _listed(group["params"])} for group in given]
        tensors = params_of(given)
    if not all(isinstance(param, Tensor) for param in tensors):
        raise TypeError("`params` argument should be an iterable of Tensors or dicts")
    if other := [str(param.layout) for param in tensors if param.layout is not torch.strided]:
        raise ValueError(f"ZeroRedundancyOptimizer: expected dense parameters; found one of layout {other[0]}.")
    return given


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)
