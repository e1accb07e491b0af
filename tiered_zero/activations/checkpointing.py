"""Provide DeepSpeed's checkpoints: recompute with forward's random numbers, and split saved inputs over ranks.

The numbers may come from generators that a program keeps separately. The ranks are a model-parallel group, all with the
same inputs (ZeRO-R).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.utils.checkpoint import checkpoint

from tiered_zero.errors import ModelError
from tiered_zero.hardware.device.select import find_device
from tiered_zero.hardware.ranks.model_parallel import ModelParallelRanks

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the dtype in which its bits are summed."""

MODEL_PARALLEL = "model-parallel-rng"
"""The name that DeepSpeed and Megatron-LM give to the generator of split modules."""


@final
class RandomStates:
    """Named states of the device's random generator, for parts of a model that draw from their own. Method names are
    those of DeepSpeed's CudaRNGStatesTracker. Used on the threads of forward and of backward.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Drop all states."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return name -> present state."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Set the states that `get_states` returned."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Create a state from `seed`. Raises ModelError if the name or the seed is taken."""
        if name in self._states or seed in self._seeds:
            what, found = ("name", name) if name in self._states else ("seed", seed)
            raise ModelError(
                f"RNG tracker: expected a {what} that has no state yet; found {found!r}. Take another, or reset()."
            )
        with _kept_state() as generator:
            generator.manual_seed(seed)
            self._states[name] = generator.get_rng_state()
        self._seeds.add(seed)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the state `name` inside the block. Raises ModelError if there is none."""
        if name not in self._states:
            raise ModelError(
                f"RNG tracker: expected one of the states {sorted(self._states)}; found {name!r}. Call "
                "model_parallel_cuda_manual_seed(seed) first, or add(name, seed)."
            )
        with _kept_state() as generator:
            generator.set_rng_state(self._states[name])
            try:
                yield
            finally:
                self._states[name] = generator.get_rng_state()


@contextmanager
def _kept_state() -> Iterator[Any]:
    """Yield torch's module for the device's generator, and restore its state after the block."""
    device = find_device("auto").type
    generator: Any = torch if device == "cpu" else torch.get_device_module(device)
    state = generator.get_rng_state()
    try:
        yield generator
    finally:
        generator.set_rng_state(state)


def seed_generators(states: RandomStates, seed: int, rank: int = 0) -> None:
    """Seed the device's generator, and the state of split modules differently for each model-parallel `rank`."""
    device = find_device("auto").type
    states.reset()
    (torch if device == "cpu" else torch.get_device_module(device)).manual_seed(seed)
    states.add(MODEL_PARALLEL, seed + 2718 + rank)


def run_checkpointed(
    function: Callable[..., Any], args: tuple[Any, ...], states: RandomStates, *, reentrant: bool
) -> Any:
    """Run `function` now, and again in backward with the present generators and `states`."""
    return checkpoint(_Tracked(function, states), *args, use_reentrant=reentrant)


@final
class _Tracked:
    """A function whose later calls, in recomputations, use `states` as the first call did."""

    def __init__(self, function: Callable[..., Any], states: RandomStates) -> None:
        self._function, self._states = function, states
        self._first: dict[str, torch.Tensor] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._first is None:
            self._first = self._states.get_states()
            return self._run(args)
        now = self._states.get_states()
        self._states.set_states(self._first)
        try:
            return self._run(args)
        finally:
            self._states.set_states(now)

    def _run(self, args: tuple[Any, ...]) -> Any:
        outputs = self._function(*args)
        return tuple(outputs) if isinstance(outputs, list) else outputs


@final
class _Part:
    """This rank's part of a tensor, and the sum of the whole tensor. `size`, `stride`: those of the whole tensor."""

    __slots__ = ("device", "memory", "numel", "size", "stride", "sum")

    def __init__(self, tensor: torch.Tensor, memory: torch.Tensor, total: torch.Tensor) -> None:
        self.memory, self.sum, self.device = memory, total, tensor.device
        self.size, self.stride, self.numel = tensor.size(), tensor.stride(), tensor.numel()


@final
@dataclass(kw_only=True)
class _Checks:
    """The comparisons of one backward: for each gathered tensor, whether it is equal (on its device), and its size.
    `graph_task`: -1 outside a backward."""

    graph_task: int
    found: list[tuple[torch.Tensor, torch.Size]] = field(default_factory=list)

    def finish(self) -> None:
        """Wait once for the device. Raises ModelError if a tensor differed."""
        device = self.found[-1][0].device
        flags = torch.stack([equal.to(device) for equal, _ in self.found]).tolist()
        for (_, size), equal in zip(self.found, flags, strict=True):
            if not equal:
                raise ModelError(
                    "checkpointing: partition_activations expected the inputs of a checkpoint to be equal on all ranks "
                    f"of the model-parallel group; found other values of one of shape {list(size)}. Set "
                    "partition_activations to false, or give checkpoints inputs that are not split."
                )


@final
class PartitionedInputs:
    """Hooks for `torch.autograd.graph.saved_tensors_hooks`, around checkpoints."""

    def __init__(self, ranks: ModelParallelRanks, *, in_cpu: bool = False) -> None:
        """`in_cpu`: keep parts in host memory."""
        self.ranks, self.in_cpu = ranks, in_cpu
        self._checks = _Checks(graph_task=-1)

    def hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Return (pack, unpack). Tensors that stay whole go to the hooks that are active now, if there are any."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is None:
            return self.pack, self.unpack
        pack, unpack = outer

        def pack_inside(tensor: torch.Tensor) -> Any:
            packed = self.pack(tensor)
            return packed if isinstance(packed, _Part) else pack(tensor)

        return pack_inside, lambda packed: self.unpack(packed) if isinstance(packed, _Part) else unpack(packed)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Part:
        """Return this rank's part of a tensor. Parameters, and tensors that are not plain memory or too small, stay
        whole."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.numel() < self.ranks.size:
            return tensor
        if tensor.itemsize not in _INTEGERS or tensor.is_conj() or tensor.is_neg():
            return tensor
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return tensor
        tensor = tensor.detach()
        flat = tensor.as_strided((tensor.numel(),), (1,))
        length = -(-flat.numel() // self.ranks.size)
        part = flat[self.ranks.rank * length :][:length]
        memory = torch.zeros(length, dtype=tensor.dtype, device="cpu" if self.in_cpu else tensor.device)
        memory[: part.numel()].copy_(part)
        return _Part(tensor, memory, _sum(flat))

    def unpack(self, packed: torch.Tensor | _Part) -> torch.Tensor:
        """Gather the whole tensor. All ranks of the group must run backward in the same order. If the ranks' inputs
        differ, backward raises ModelError at its end, so that it waits for the device only once."""
        if not isinstance(packed, _Part):
            return packed
        whole = self.ranks.gather(packed.memory.to(packed.device))[: packed.numel]
        self._compare(_sum(whole) == packed.sum, packed.size)
        return whole.as_strided(packed.size, packed.stride)

    def _compare(self, equal: torch.Tensor, size: torch.Size) -> None:
        graph_task = torch._C._current_graph_task_id()
        if graph_task == -1:
            _Checks(graph_task=-1, found=[(equal, size)]).finish()
            return
        if self._checks.graph_task != graph_task:
            self._checks = _Checks(graph_task=graph_task)
            torch.autograd.Variable._execution_engine.queue_callback(self._checks.finish)
        self._checks.found.append((equal, size))


def _sum(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements' bits as integers, which does not depend on the order."""
    return flat.view(_INTEGERS[flat.itemsize]).sum(dtype=torch.int64)
