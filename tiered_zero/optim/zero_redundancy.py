"""Split an optimizer's state over the ranks of a process group: each rank steps some parameters and broadcasts them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiered_zero.errors import ConfigError, RankError
from tiered_zero.hardware.ranks.shard_group import Join, Joinable, ShardGroup, StepHook
from tiered_zero.optim.offloaded import OffloadedOptimizer, copy_options
from tiered_zero.rules.torch_rule import on_cpu
from tiered_zero.update.handle import creates_state

logger = logging.getLogger("tiered_zero")


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Steps this rank's part of the parameters with an `optimizer_class`, and broadcasts the new values to the other
    ranks (Rajbhandari et al. 2020, stage 1). Names, results and the split over ranks are those of
    torch.distributed.optim.ZeroRedundancyOptimizer.

    `self.optim` is the local optimizer: a plain one, or with `offload` an `OffloadedOptimizer`.
    `parameters_as_bucket_view` has no effect. Every rank must have the whole gradients, as DDP leaves them. Every rank
    makes each call except `state_dict`, in the same order."""

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
        """Split the parameters over the ranks of `process_group` (None: the default group), and build the local
        optimizer. Raises ConfigError if `overlap_with_ddp` is true, and TypeError and ValueError as torch does. An
        error of the local optimizer is raised too. With `offload`, the other ranks then raise RankError."""
        if overlap_with_ddp:
            raise ConfigError(
                "overlap_with_ddp: expected False; found True, which in torch's class leaves out the first two or "
                "three updates and takes functional optimizers alone. Leave it out; with offload=... broadcasts "
                "overlap the update."
            )
        if isinstance(optimizer_class, type) and not issubclass(optimizer_class, Optimizer):
            raise ValueError(
                f"Passing in a functional optimizer {optimizer_class} when `overlap_with_ddp=False`: expected a class "
                "of torch.optim, or a subclass of torch.optim.Optimizer."
            )
        if parameters_as_bucket_view:
            logger.warning("parameters_as_bucket_view has no effect: each parameter is broadcast from its own memory")
        process_group = defaults.pop("group", process_group)
        self.initialized = False
        Optimizer.__init__(self, params, {})
        if any(type(param).__name__ == "DTensor" for param in params_of(self.param_groups)):
            raise ValueError(
                "ZeroRedundancyOptimizer: expected plain parameters, whole on each rank; found a DTensor, a part "
                "of one on each. Give it to a plain optimizer."
            )
        if other := [param.layout for param in params_of(self.param_groups) if param.layout is not torch.strided]:
            raise ValueError(f"ZeroRedundancyOptimizer: expected dense parameters; found one of layout {other[0]}.")
        Joinable.__init__(self)
        self._ranks = ShardGroup(process_group)
        self.process_group = self._ranks.process_group
        self.rank, self.world_size = self._ranks.rank, self._ranks.world_size
        self.global_rank = self._ranks.global_rank
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._parts = _partition_groups(self.param_groups, self.world_size)
        self._consolidated: dict[int, dict[str, Any]] | None = None
        own = self._parts[self.rank]
        self.optim: Optimizer
        if offload is None:
            self.optim = optimizer_class(own, **defaults)
        else:
            self.optim = _open_together(
                self._ranks, lambda: OffloadedOptimizer(own, optimizer_class, offload, **defaults)
            )
        self.defaults = self.optim.defaults  # which schedulers read
        copy_options(self.optim.param_groups, self.param_groups)
        self.initialized = True

    @property
    def group(self) -> Any:
        """The process group."""
        return self.process_group

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Step this rank's parameters, and broadcast each to the other ranks. Pass `kwargs` to the local optimizer's
        `step`, and return its result. A call without arguments only creates state, without broadcasts, if every lr and
        every gradient is 0 (see `creates_state`)."""
        grads = [param.grad for param in params_of(self.param_groups) if param.grad is not None]
        if closure is None and not kwargs and creates_state(self.param_groups, grads):
            # torch.distributed.checkpoint steps with an lr of 0 to create state, and only on ranks without state: so
            # this rank steps alone, without broadcasts. A rank without parameters has no state at any time.
            copy_options(self.param_groups, self.optim.param_groups)
            self.optim.step()
            return None
        Join.notify_join_context(self)  # this rank still has data
        copy_options(self.param_groups, self.optim.param_groups)
        given = kwargs if closure is None else {"closure": closure, **kwargs}
        broadcasts = _Broadcasts(self._ranks, [_messages_of(groups) for groups in self._parts])
        if isinstance(self.optim, OffloadedOptimizer):
            loss = self.optim.step(**given, on_written=broadcasts.advance)
        else:
            loss = self.optim.step(**given)
        broadcasts.finish()
        copy_options(self.optim.param_groups, self.param_groups)
        others = [param for rank, groups in enumerate(self._parts) if rank != self.rank for param in params_of(groups)]
        torch.autograd.graph.increment_version(others)
        return loss

    def join_hook(self, **_: Any) -> StepHook:
        """Return a hook for torch's Join context. The hook calls `step()` on a rank that has no more data; the rank's
        gradients must be set before that."""
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
        """Return the param groups of each rank: every group, with only the parameters that the rank steps."""
        return _partition_groups(self.param_groups, self.world_size)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch does. Every rank calls this."""
        super().add_param_group(param_group)
        if not self.initialized:
            return
        copy_options(self.param_groups[:-1], self.optim.param_groups)  # what a scheduler has set since the last step
        parts = _partition_groups(self.param_groups, self.world_size)
        try:
            self.optim.add_param_group(parts[self.rank][-1])
        except BaseException:
            del self.param_groups[-1]
            raise
        self._parts = parts
        copy_options(self.optim.param_groups, self.param_groups)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The local optimizer's state. Assigning an empty mapping resets the state of this rank's parameters."""
        return self.optim.state if hasattr(self, "optim") else {}

    @state.setter
    def state(self, value: Any) -> None:
        if hasattr(self, "optim"):  # torch's constructor sets it before
            self.optim.state = value if len(value) else defaultdict(dict)
            self._consolidated = None

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Copy the state of all ranks to host memory of rank `to`. On this rank, `state_dict()` then returns it. Every
        rank calls this."""
        copy_options(self.param_groups, self.optim.param_groups)
        if self.rank != to:
            for param in params_of(self._parts[self.rank]):
                self._ranks.send(on_cpu(self._local_state(param)), to)
            self._consolidated = None
            return
        indices = {id(param): index for index, param in enumerate(params_of(self.param_groups))}
        found: dict[int, dict[str, Any]] = {}
        for rank, groups in enumerate(self._parts):
            for param in params_of(groups):
                state = on_cpu(self._local_state(param)) if rank == self.rank else self._ranks.receive(rank)
                if state:
                    found[indices[id(param)]] = state
        self._consolidated = dict(sorted(found.items()))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters in torch's format, as of the last `consolidate_state_dict`. With one rank,
        that call is not needed. Raises RuntimeError if this rank has only its own part of the state."""
        if self.world_size == 1:
            self.consolidate_state_dict()
        elif self._consolidated is None and self.optim.state:
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank. Please call `consolidate_state_dict(to="
                f"{self.rank})` on all ranks beforehand if you meant to save the global state."
            )
        return {**super().state_dict(), "state": dict(self._consolidated or {})}

    def local_state_dict(self) -> dict[str, Any]:
        """Return the state dict of this rank's local optimizer."""
        copy_options(self.param_groups, self.optim.param_groups)
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state dict of a ZeroRedundancyOptimizer or a plain optimizer. Each rank keeps the state of its
        parameters. Raises ValueError, as torch does, if param groups do not fit."""
        super().load_state_dict({**state_dict, "state": {}})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        key_of = {id(param): key for param, key in zip(params_of(self.param_groups), keys, strict=True)}
        part = self._parts[self.rank]
        own = params_of(part)
        places = {id(param): place for place, param in enumerate(own)}
        state = {place: state_dict["state"].get(key_of[id(param)]) for place, param in enumerate(own)}
        groups = [
            {**group, "params": [places[id(param)] for param in those["params"]]}
            for group, those in zip(self.param_groups, part, strict=True)
        ]
        stepped = {place: values for place, values in state.items() if values}
        self.optim.load_state_dict({"state": stepped, "param_groups": groups})
        self._consolidated = None
        copy_options(self.optim.param_groups, self.param_groups)

    def _local_state(self, param: Tensor) -> Mapping[str, Any]:
        if isinstance(self.optim, OffloadedOptimizer):
            return self.optim.read_state(param)  # type: ignore[arg-type]
        state: Mapping[str, Any] = self.optim.state.get(param, {})
        return state

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the local optimizer if it is an OffloadedOptimizer; its state is lost. Idempotent."""
        if isinstance(self.optim, OffloadedOptimizer):
            self.optim.close()

    def __enter__(self) -> ZeroRedundancyOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_together(ranks: ShardGroup, make: Callable[[], OffloadedOptimizer]) -> OffloadedOptimizer:
    """Make the local optimizer on every rank, or on none. A rank on which `make` fails raises that error; the others
    raise RankError."""
    made: OffloadedOptimizer | Exception
    try:
        made = make()
    except Exception as error:
        made = error
    own = f"{type(made).__name__}: {made}" if isinstance(made, Exception) else ""
    found = ranks.exchange(own)  # else other ranks wait in step() for a failed one
    if isinstance(made, Exception):
        raise made
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(found) if text]:
        made.close()
        raise RankError(f"Every rank was expected to open its optimizer; found on {failed[0]} Build all of them anew.")
    return made


class _Broadcasts:
    """Starts the broadcasts of one step, in the same order on all ranks. In a round, each rank broadcasts its next
    parameter. `messages`: for each rank the tensors that it broadcasts, as `_messages_of` returns them."""

    def __init__(self, ranks: ShardGroup, messages: Sequence[Sequence[tuple[int, Tensor]]]) -> None:
        self._ranks = ranks
        self._messages = messages
        self._num_written = self._num_rounds = 0
        self._under_way: list[tuple[Any, Tensor, Tensor]] = []

    def advance(self, _param: Tensor) -> None:
        """Count a parameter that this rank has written. Then start rounds, as long as this rank has written its
        parameter of the next round."""
        self._num_written += 1
        own = self._messages[self._ranks.rank]
        while self._num_rounds < len(own) and own[self._num_rounds][0] <= self._num_written:
            self._start_round()

    def finish(self) -> None:
        """Start the remaining broadcasts, and wait until all have ended."""
        while self._num_rounds < max(map(len, self._messages)):
            self._start_round()
        for work, tensor, room in self._under_way:
            work.wait()
            if room is not tensor:
                tensor.copy_(room)

    def _start_round(self) -> None:
        for source, messages in enumerate(self._messages):
            if self._num_rounds < len(messages):
                _, tensor = messages[self._num_rounds]
                room = tensor.contiguous()  # gloo takes any tensor for contiguous memory, and writes past its view
                self._under_way.append((self._ranks.broadcast(room, source), tensor, room))
        self._num_rounds += 1


def _partition_groups(groups: Sequence[Mapping[str, Any]], world_size: int) -> list[list[dict[str, Any]]]:
    """Split each param group over ranks. Give each parameter, the largest first, to the rank with the fewest elements
    so far. Groups added later do not change the split of earlier ones."""
    sizes = [0] * world_size
    parts: list[list[dict[str, Any]]] = [[] for _ in range(world_size)]
    for group in groups:
        of_rank: list[list[Tensor]] = [[] for _ in range(world_size)]
        for param in sorted(group["params"], key=torch.numel, reverse=True):
            rank = sizes.index(min(sizes))
            of_rank[rank].append(param)
            sizes[rank] += param.numel()
        for rank, params in enumerate(of_rank):
            parts[rank].append({**group, "params": params})
    return parts


def params_of(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return [param for group in groups for param in group["params"]]


def _messages_of(groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, Tensor]]:
    """Return (number, elements) for each parameter that a rank broadcasts. The rank may send `elements` once its first
    `number` parameters are written. `groups`: the rank's param groups."""
    messages = []
    for number, param in enumerate(params_of(groups), 1):
        if param.numel():
            # in memory order, which is the same on every rank
            is_dense = torch.ops.aten.is_non_overlapping_and_dense(param)
            flat = param.detach().as_strided((param.numel(),), (1,)) if is_dense else param.detach()
            messages.append((number, flat))
    return messages
