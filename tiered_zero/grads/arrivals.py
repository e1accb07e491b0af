"""Pass each gradient that autograd has completed to the gradient store, after the user's hooks have run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from tiered_zero.errors import ModelError
from tiered_zero.grads.reduce import GradientReducer, UseMark
from tiered_zero.grads.store import GRAD_SLOT, GradientStore
from tiered_zero.layout.flat import Unit


@final
@dataclass(eq=False, repr=False)
class GradientArrivals:
    """Passes each gradient that autograd has completed to the gradient store, after the user's own hooks. Used on the
    driver thread, or on autograd's while the driver waits.

    In `param.grad` the user's hooks find the sum of this gradient and those of the step's earlier backwards, as in
    plain PyTorch. If gradients are sharded or already reduced, the hooks find only this gradient. The gradient that the
    hooks leave there is passed to the store at the latest when the next gradient arrives or the backward ends.

    `_reducer`: averages gradients over ranks; None on one rank. `_on_unit_complete`: called with a unit when all its
    gradients of a backward have arrived."""

    _store: GradientStore
    _num_micro_batches: int
    _scales_loss: bool
    _on_unit_complete: Callable[[Unit], None]
    _reducer: GradientReducer | None
    _waiting: list[nn.Parameter] = field(default_factory=list, init=False)
    """Parameters whose gradients are not passed to the store yet, because the user's hooks may still run."""
    _is_engines: bool = field(default=False, init=False)
    _frees_graph: bool = field(default=False, init=False)
    """Whether the engine is running a backward that frees its graph."""
    _is_scaled: bool = field(default=False, init=False)
    num_own_backwards: int = field(default=0, init=False)
    """The number of backwards that produced gradients and that the engine did not start, since the last step() or
    `reset`."""
    _is_counted: bool = field(default=False, init=False)

    @contextmanager
    def engine_backward(self, *, is_last: bool, frees_graph: bool) -> Iterator[None]:
        """A context manager in which the engine runs a backward. `is_last`: whether it is the step's last backward.
        `frees_graph`: whether this backward frees autograd's graph. Raises transfer errors."""
        self._is_engines, self._frees_graph = True, frees_graph
        try:
            self._begin_reduction(is_last)
            yield
            self._take_waiting()
            self._end_reduction()
            self._store.finish_transfers()
        finally:
            self._is_engines = self._frees_graph = False
            self._store.end_backward()

    def take(self, param: nn.Parameter) -> None:
        """Pass `param.grad`, which this backward has completed, to the store after the user's hooks have run."""
        if self._waiting:
            self._take_waiting()
        if not self._is_engines:
            self.num_own_backwards += not self._is_counted
            self._is_counted = True
            self._begin_reduction(is_last=False)
            self._scale(param)
        with torch._C.DisableTorchFunctionSubclass():  # reading hooks is no use of a guarded parameter's bytes
            hooks = param._post_accumulate_grad_hooks
        if hooks is not None and len(hooks) > 1:
            self._store.show_sum(param)
            self._waiting.append(param)
        else:
            self._accumulate(param)

    def refuse(self, param: nn.Parameter) -> None:
        """Drop the gradient in `param.grad`, which comes from a backward that was refused."""
        with torch._C.DisableTorchFunctionSubclass():
            GRAD_SLOT.__set__(param, None)

    def note_use(self, units: Sequence[Unit], inputs: Sequence[Any]) -> None:
        """Record that a module that owns `units` begins a forward with the arguments `inputs`. Called on the driver
        thread, if autograd records the forward or will recompute it."""
        if self._reducer is not None:
            self._reducer.uses.note(units, inputs, self._pass_mark)

    def note_backward(self, unit: Unit) -> None:
        """Record that a backward begins to use a unit. Called before the unit's shards are gathered."""
        if self._reducer is not None and self._reducer.is_open:
            self._take_waiting()
            self._reducer.note_backward(unit)

    def _pass_mark(self, mark: UseMark) -> None:
        """Record that a backward has reached a mark (a hook on a module's input)."""
        if self._reducer is not None and self._reducer.is_open:
            self._take_waiting()
            self._reducer.pass_mark(mark)
        elif self._frees_graph:
            mark.is_met = True  # the graph is freed here: a later backward, which reduces, gets no gradient from it

    def begin_own_backward(self) -> None:
        """Begin a backward that the engine did not start. Also begin to reduce gradients if parameters are gathered and
        this backward produces gradients of parameters."""
        self._is_counted = False
        # Every rank must begin the reduction at the same place among the gathers. The first gradient may come before a
        # gather on one rank and after it on another: the ranks would wait for each other.
        if self._reducer is not None and self._reducer.shards_params and self._brings_gradients():
            self._begin_reduction(is_last=False)

    def _brings_gradients(self) -> bool:
        """Return whether the running backward accumulates gradients of parameters; `torch.autograd.grad` does not."""
        if torch.autograd.Variable._execution_engine.is_checkpoint_valid():  # a plain backward, to every leaf
            return True
        try:
            return any(map(torch._C._will_engine_execute_node, self._store.accumulators()))
        except RuntimeError:  # torch.autograd.grad() with respect to a parameter
            return False

    def expect(self, scaled: torch.Tensor) -> None:
        """Record that `engine.scale` has made the loss `scaled`, so that the gradients of this loss are not divided
        again."""
        scaled.register_hook(self._begin_scaled)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Clear the counts of a step. Called when the step's gradients are dropped, set to 0 or taken by the update."""
        self._waiting.clear()
        self._is_scaled = False
        self.num_own_backwards = 0

    def abort(self) -> None:
        """Clear the counts of the step and the flags of a backward. Called when no backward runs any more."""
        self.reset()
        self._is_engines = self._frees_graph = False

    def _begin_scaled(self, _: torch.Tensor) -> None:
        if self._is_engines:
            raise ModelError(
                "engine.backward() scales the loss itself, and was given one that engine.scale() had scaled. Call "
                ".backward() on that one, or engine.backward() on the loss as the model gives it."
            )
        self._is_scaled = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_scaled)

    def _end_scaled(self) -> None:
        self._is_scaled = False

    def end_own_backward(self) -> None:
        """End a backward that the engine did not start. Raises transfer errors."""
        self._take_waiting()
        self._end_reduction()
        self._store.finish_transfers()
        self._store.end_backward()

    def _scale(self, param: nn.Parameter) -> None:
        """Divide a gradient of the user's own `loss.backward()` by `_num_micro_batches`, as DeepSpeed does. Do nothing
        if `engine.scale` has scaled the loss. Raises ModelError for an unscaled loss with fp16."""
        if self._is_scaled or not (self._scales_loss or self._num_micro_batches > 1):
            return
        with torch._C.DisableTorchFunctionSubclass():
            grad: torch.Tensor | None = GRAD_SLOT.__get__(param)
            if self._scales_loss:
                GRAD_SLOT.__set__(param, None)
                raise ModelError(
                    "Loss scaling is required with fp16.enabled, and loss.backward() does none. Call "
                    "engine.backward(loss), or engine.scale(loss).backward(). A torch.amp.GradScaler is not needed: "
                    "leave it out, or disable fp16 and use it with autocast."
                )
            if grad is not None:
                GRAD_SLOT.__set__(param, grad / self._num_micro_batches)

    def _take_waiting(self) -> None:
        while self._waiting:
            param = self._waiting.pop(0)
            self._accumulate(param)
            with torch._C.DisableTorchFunctionSubclass():
                if param.grad_dtype is None:  # set by `show_sum`
                    param.grad_dtype = param.dtype

    def _accumulate(self, param: nn.Parameter) -> None:
        unit = self._store.accumulate(param)
        if self._reducer is not None:
            self._reducer.reduce_complete()
        if unit is not None:
            self._on_unit_complete(unit)

    def _begin_reduction(self, is_last: bool) -> None:
        if self._reducer is not None:
            self._reducer.begin_backward(is_last=is_last)

    def _end_reduction(self) -> None:
        if self._reducer is not None:
            self._reducer.end_backward()
