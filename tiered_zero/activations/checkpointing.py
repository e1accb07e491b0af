"""Run activation checkpoints as DeepSpeed does: a recomputation draws the random numbers that forward drew, also from
named generator states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.utils.checkpoint import checkpoint

from tiered_zero.errors import ModelError
from tiered_zero.hardware.runtime import find_device

MODEL_PARALLEL = "model-parallel-rng"
"""The name that DeepSpeed and Megatron-LM give to the generator of split modules."""


@final
class RandomStates:
    """Named states of the device's random generator, with the methods of DeepSpeed's CudaRNGStatesTracker."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Drop all states."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return name -> the present state of that name."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Set the states that `get_states` returned."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Create the state `name` from `seed`. Raises ModelError if a state has this name or seed."""
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
        """Inside the block, draw from the state `name`. Raises ModelError if there is none."""
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
    """Yield the torch module with the device's random generator, and restore the generator's state after the block."""
    device = find_device("auto").type
    generator: Any = torch if device == "cpu" else torch.get_device_module(device)
    state = generator.get_rng_state()
    try:
        yield generator
    finally:
        generator.set_rng_state(state)


def seed_generators(states: RandomStates, seed: int, rank: int = 0) -> None:
    """Seed the device's generator with `seed`. Replace all of `states` by one, MODEL_PARALLEL, whose seed differs for
    each model-parallel `rank`."""
    device = find_device("auto").type
    states.reset()
    (torch if device == "cpu" else torch.get_device_module(device)).manual_seed(seed)
    states.add(MODEL_PARALLEL, seed + 2718 + rank)


def run_checkpointed(
    function: Callable[..., Any], args: tuple[Any, ...], states: RandomStates, *, reentrant: bool
) -> Any:
    """Run `function` with `args` now, and again in backward with the same random numbers. `states`: random states that
    the program keeps by name. `reentrant`: whether torch's reentrant kind of checkpoint runs it."""
    return checkpoint(_Tracked(function, states), *args, use_reentrant=reentrant)


@final
class _Tracked:
    """Wraps a function that runs in forward and again in recomputations. A recomputation begins with the named random
    states of the first call. After it the present states are restored."""

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
