"""Check calls of an engine and the parameters of its model, and count its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any, TypeVar, cast, final

import torch
from torch import nn

from tiered_zero.activations.mover import ActivationMover
from tiered_zero.checkpoint.checkpoints import Checkpoints
from tiered_zero.concurrency.interrupts import Teardown
from tiered_zero.config.schema import Config
from tiered_zero.errors import ModelError
from tiered_zero.grads.check import GradCheck
from tiered_zero.grads.reduce import GradientReducer
from tiered_zero.grads.store import GradientStore
from tiered_zero.hardware.device.accelerator import runs_outside_modes
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.plan.planner import Plan
from tiered_zero.system import OwnProcess
from tiered_zero.telemetry.report import StepReport
from tiered_zero.unit.pager import Pager
from tiered_zero.update.handle import ParamGroupWatch, TieredOptimizer
from tiered_zero.update.policy import UpdatePolicy


@dataclass(frozen=True, kw_only=True)
class Movers:
    """The objects that move bytes. `TrainStep` calls them in order. `reducer`: None with one rank. `activations`: None
    if saved activations stay on the device. `drain`: blocks until lanes and disk are idle. `reclaim`: releases the
    staging buffers that a failed call had leased."""

    pager: Pager
    parameters: ModelParameters
    gradients: GradientStore
    reducer: GradientReducer | None
    policy: UpdatePolicy
    groups: ParamGroupWatch
    activations: ActivationMover | None
    runtime: Runtime
    drain: Callable[[], None]
    reclaim: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The parts of an engine. `optimizer`: None if the engine only evaluates. `observers`: called with each step's
    report."""

    module: nn.Module
    config: Config
    plan: Plan
    optimizer: TieredOptimizer | None
    observers: Sequence[Callable[[StepReport], None]]
    checkpoints: Checkpoints


_Method = TypeVar("_Method", bound=Callable[..., Any])


def on_one_thread(method: _Method) -> _Method:
    """Decorate a method of the engine. The method then raises ModelError if another thread uses the engine. Unless it
    is `peek`, it also raises ModelError if a forward, backward or step is running. See [Note: Interrupted calls]."""

    @wraps(method)
    def entered(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        step, call = self._step, f"engine.{method.__name__}()"
        try:
            with step.pager.driver.entered(call):
                if method.__name__ != "peek":  # it only reads
                    step.check_outside(call, may_recompute=method.__name__ == "forward")
                return method(self, *args, **kwargs)
        finally:
            if step.hold is not None:
                step.end_hold()  # raises a KeyboardInterrupt that was held back

    return cast("_Method", entered)


@final
class ModelParameters:
    """Checks that a model keeps the parameters with which its run began."""

    def __init__(self, model: nn.Module, trains: bool) -> None:
        self.model = model
        self._trains = trains
        self._params = list(model.parameters())  # kept alive, so that no new object gets their identity
        self._names = {id(param): name for name, param in model.named_parameters()}
        """id() of each parameter -> its name, in the order of the model."""
        self._trainable = {id(param) for param in self._params if param.requires_grad}

    def check(self) -> None:
        """Raise ModelError if a parameter was replaced or removed. In a run that trains, also raise ModelError if a
        parameter requires a gradient but did not when the run began."""
        named = dict(self.model.named_parameters())
        kept = [id(param) for param in named.values() if id(param) in self._names]
        for place, (identity, name) in enumerate(self._names.items()):
            if kept[place : place + 1] != [identity]:
                raise ModelError(
                    f"Parameter {name} is not the one that was handed to tiered_zero.initialize(): it, or a module "
                    "around it, was replaced or removed, so that the engine would train and save an orphan. Put the "
                    "former object back; write new values into it inside `with tiered_zero.gathered(param, "
                    "modify=True):` or by load_state_dict() without assign=True; or make a new engine for a changed "
                    "model."
                )
        if not self._trains:
            return
        with torch._C.DisableTorchFunctionSubclass():
            new = next(
                (n for n, param in named.items() if param.requires_grad and id(param) not in self._trainable), None
            )
        if new is not None:
            raise ModelError(
                f"Parameter {new} requires a gradient, but was frozen, or not in the model, when the run started: it "
                "has no optimizer state, and would never be updated. Freeze parameters that shall wait after "
                "tiered_zero.initialize(). Add others before it, set requires_grad=False for them, or keep their "
                "module outside of the model."
            )


@final
class StepCounts:
    """Counts backward passes, micro-batches and steps. Decides whether a `step()` is a boundary, which means that it
    updates the weights. Used on the driver thread."""

    def __init__(self, num_micro_batches: int, *, managed: bool = True) -> None:
        """`managed`: managed_gradient_accumulation of the config. If False, every `step()` updates the weights."""
        self.num_micro_batches = num_micro_batches
        self._managed = managed
        self.micro_steps = 0
        self.global_steps = 0
        self.grad_check: GradCheck | None = None
        """The result of the last gradient check; None before the first."""
        self.boundary: bool | None = None
        """The user's setting. True: each `step()` is a boundary. False: no `step()` is. None: every
        `num_micro_batches`-th `step()` is."""
        self.num_backwards = 0
        """The number of `engine.backward()` calls since the last `step()`."""
        self.is_accumulating = False
        """Whether the last `step()` only counted a micro-batch."""
        self.was_applied = False
        """Whether the last `step()` updated the weights."""
        self._one_backward_each = True
        """Whether every micro-batch so far had one backward, and no weights were used between backward and `step()`."""
        self._num_uses = 0
        """The pager's count of uses of weights when the last backward ended."""

    def is_boundary(self) -> bool:
        """Return whether the next `step()` updates the weights."""
        if not self._managed:
            return True
        return (self.micro_steps + 1) % self.num_micro_batches == 0 if self.boundary is None else self.boundary

    def begin_backward(self, retain_graph: bool) -> bool:
        """Count an `engine.backward()`. Return whether it is probably the only backward of its micro-batch."""
        self.num_backwards += 1
        # with `retain_graph` another backward of the graph will follow
        return self.num_backwards == 1 and self._one_backward_each and not retain_graph

    def end_backward(self, num_uses: int) -> None:
        self._num_uses = num_uses

    def check_managed(self, num_own_backwards: int) -> None:
        """Raise ModelError if the user's loop accumulates gradients itself, because its loss would be divided twice.
        `num_own_backwards`: calls of `loss.backward()` since the last `step()`."""
        num_backwards = self.num_backwards + num_own_backwards
        if self._managed and self.boundary is None and 1 < self.num_micro_batches <= num_backwards:
            raise ModelError(
                f"optimizer.step() came after {num_backwards} backwards and gradient_accumulation_steps is "
                f"{self.num_micro_batches}: the loop accumulates by itself, and the loss would be divided twice. Leave "
                "gradient_accumulation_steps out of the config (1), or call engine.step() after each backward."
            )

    def begin_step(self, num_uses: int) -> bool:
        """Begin a `step()`. Return whether it updates the weights. `num_uses`: how often the pager has brought units
        into use so far."""
        used = self.num_backwards and num_uses != self._num_uses  # weights were used after the backward
        self._one_backward_each &= self.num_backwards == 1 and not used  # else no update begins in backward any more
        self.is_accumulating = not self.is_boundary()
        self.was_applied = False
        return not self.is_accumulating

    @property
    def next_micro_steps(self) -> int:
        """The value to which `end_step` sets `micro_steps`."""
        return self.micro_steps + (1 if self._managed else max(1, self.num_backwards))

    def end_step(self, check: GradCheck | None = None) -> None:
        """Count a micro-batch. At a boundary, also count a step, and keep `check`, the result of its gradient check."""
        self.micro_steps = self.next_micro_steps
        self.num_backwards = 0
        if check is not None:
            self.global_steps += 1
            self.grad_check = check

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain values. Call it right after a `step()` that updates."""
        return {
            "micro_steps": self.micro_steps,
            "global_steps": self.global_steps,
            "boundary": self.boundary,
            "one_backward_each": self._one_backward_each,
            "was_applied": self.was_applied,
            "grad_check": asdict(self.grad_check) if self.grad_check is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the counts to `state`, a result of `state_dict()`. The caller has checked `state`."""
        self.micro_steps, self.global_steps = state["micro_steps"], state["global_steps"]
        self.boundary, self.was_applied = state["boundary"], state["was_applied"]
        if self._managed and self.boundary is None:  # saved with another number of micro-batches
            self.micro_steps -= self.micro_steps % self.num_micro_batches
        self._one_backward_each = state["one_backward_each"]
        self.grad_check = GradCheck(**state["grad_check"]) if state["grad_check"] is not None else None
        self.num_backwards = self._num_uses = 0
        self.is_accumulating = False

    def drop(self) -> None:
        """Set the count of micro-batches back to its value at the last boundary."""
        self.num_backwards = 0
        if self._managed:
            self.micro_steps -= self.micro_steps % self.num_micro_batches
        self.is_accumulating = False


def end_unreferenced_run(process: OwnProcess, resources: Teardown) -> None:
    """Close the `resources` of a run that the user did not close. Do nothing in a process other than `process`, which
    built the run."""
    if not process.is_current():
        return  # a forked child owns nothing, and has no lane that could end an update
    if threading.current_thread() is threading.main_thread():
        runs_outside_modes(resources.close)()  # garbage collection may run inside a mode, such as a compiler's tracing
    else:  # perhaps a lane of this run, which cannot wait for itself
        threading.Thread(target=resources.close, name="tiered_zero end").start()
