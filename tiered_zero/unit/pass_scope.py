"""Scope of a forward or backward: checks of the model, and the hooks by which autograd saves views of units."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tiered_zero.errors import ModelError, TieredZeroError
from tiered_zero.unit.driver_thread import find_call, is_running
from tiered_zero.unit.pager import Pager

_NO_TRANSFORM = (
    "torch.func.grad, vjp, jacrev and hessian do not support saved tensor hooks, by which paged parameters are saved "
    "for backward, so they cannot run over a module of the engine, nor inside its forward. Use torch.autograd.grad "
    "(with create_graph=True where the result is differentiated again), or torch.func.jvp."
)


@final
class PassScope:
    """Saves views of units by name while a pass runs: one of the engine, or of a module that is called directly, past
    the engine. Driver thread.
    """

    def __init__(self, model: nn.Module, pager: Pager, trains: bool) -> None:
        self.model = model
        self._pager = pager
        self._trains = trains
        named = dict(model.named_parameters())
        self._names = list(named)
        self._own = self._seen = list(map(id, named.values()))
        """The identities of the parameters that the run began with, and of those of the last check, in their order."""
        self._params = list(named.values())  # identities stay theirs
        self._frozen = {name: param for name, param in named.items() if not param.requires_grad}
        self.is_direct = False
        """Whether a module runs that was called directly, in thread `_opener`, or did when an interrupt ended it."""
        self._opener = 0
        self._call: FrameType | None = None
        """The frame of torch's call of that module."""
        self._saving: saved_tensors_hooks | None = None
        self._innermost: nn.Module | None = None
        """The module without units that was called directly, and how often it runs inside itself."""
        self._depth = 0

    def runs_directly(self) -> bool:
        """Whether the caller runs inside of a module that was called directly; `is_direct` may be left of one that an
        interrupt has ended."""
        return is_running(self._call)

    @contextmanager
    def saving_views(self) -> Iterator[None]:
        """While open, autograd saves views of flats by name instead of by address."""
        self._refuse_tracing()
        saving = self._start_saving()
        try:
            yield
        except RuntimeError as error:
            if "saved tensor hooks" in str(error) and not isinstance(error, TieredZeroError):
                raise ModelError(_NO_TRANSFORM) from error
            raise
        finally:
            if saving is not None:
                saving.__exit__()

    # -- the model's parameters ------------------------------------------------------------------------------------

    def check_parameters(self) -> None:
        """Raise ModelError where a parameter, or the module that has it, was replaced or removed, a trainable one was
        added, or a frozen one was thawed. Called in `step()` and before weights are saved: compares identities."""
        if (seen := list(map(id, self.model.parameters()))) != self._seen:
            self._check_changed(seen)
            self._seen = seen
        if not (self._frozen and self._trains):
            return
        with torch._C.DisableTorchFunctionSubclass():
            thawed = next((name for name, param in self._frozen.items() if param.requires_grad), None)
        if thawed is not None:
            raise ModelError(
                f"Parameter {thawed} requires a gradient, but was frozen when the run started: it has no optimizer "
                "state, and would never be updated. Freeze parameters that shall wait after tiered_zero.initialize()."
            )

    def _check_changed(self, seen: list[int]) -> None:
        """Raise ModelError unless the model has its first parameters in their order, and besides them frozen ones."""
        own = set(self._own)
        kept = [identity for identity in seen if identity in own]
        if kept != self._own:
            changed = next(at for at, identity in enumerate(self._own) if kept[at : at + 1] != [identity])
            raise _replaced_error(self._names[changed])
        for name, param in self.model.named_parameters():
            if id(param) in own:
                continue
            if not param.requires_grad:
                self._frozen[name] = param
            elif self._trains:
                raise ModelError(
                    f"Parameter {name} was added to the model after tiered_zero.initialize(): it has no optimizer "
                    "state, and would be neither updated nor saved. Add it before initialize(), set "
                    "requires_grad=False for it, or keep its module outside of the model."
                )

    # -- modules that are called directly ------------------------------------------------------------------------------

    def begin_direct(self, module: nn.Module) -> None:
        self._refuse_tracing()
        self._pager.driver.enter(f"The forward of {type(module).__name__}")
        self.is_direct, self._opener = True, threading.get_ident()
        self._call = find_call(nn.Module._call_impl.__code__)

    def save_direct(self) -> None:
        """The module's frame is open: save views by name until `end_direct`."""
        self._saving = self._start_saving()

    def end_direct(self) -> None:
        self.is_direct = False
        self._innermost = self._call = None
        saving, self._saving = self._saving, None
        if self._opener == threading.get_ident():  # else that thread has ended, and with it what autograd held for it
            if saving is not None and self._is_saving():
                saving.__exit__()
            self._pager.driver.leave()

    def enters_direct(self, module: nn.Module) -> bool:
        """Whether the call of `module`, which owns no unit, is a direct one. Pairs with `leaves_direct`."""
        if self._pager.is_running():
            self._depth += self._innermost is module
        elif self._pager.is_called_directly():
            self._innermost, self._depth = module, 1
            return True
        return False

    def leaves_direct(self, module: nn.Module) -> bool:
        """Whether this ends the direct call of `module`."""
        if self._innermost is not module or self._pager.driver.is_other():
            return False
        self._depth -= 1
        return not self._depth

    def abort(self) -> None:
        """No forward runs any more: what one that was interrupted has left on autograd's stack of hooks goes."""
        if self.is_direct:
            self.end_direct()
        while self._is_saving():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_saving(self) -> bool:
        """Whether our hooks for saved tensors are the top of this thread's."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and self._pager.saved_views.is_own(hooks[0])

    def _start_saving(self) -> saved_tensors_hooks | None:
        """Check what must hold of the model when the outermost forward or a backward begins; then save by name."""
        self._pager.changes.check_converted()
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            raise ModelError(_NO_TRANSFORM)
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if (hooks := self._pager.saved_views.hooks_inside(outer)) is None:
            return None
        saving = saved_tensors_hooks(*hooks)
        saving.__enter__()
        return saving

    def _refuse_tracing(self) -> None:
        if torch._C._get_tracing_state():
            raise ModelError(
                "torch.jit.trace cannot trace a module of a tiered_zero engine: the trace would read parameters while "
                "their bytes are elsewhere. Use a copy: torch.jit.trace(copy.deepcopy(engine.module), ...)."
            )


def _replaced_error(name: str) -> ModelError:
    return ModelError(
        f"Parameter {name} is not the one that was handed to tiered_zero.initialize(): it, or a module around it, was "
        "replaced or removed, so that the engine would train and save an orphan. Put the former object back; write new "
        "values into it inside `with tiered_zero.gathered(param, modify=True):` or by load_state_dict() without "
        "assign=True; or make a new engine for a changed model."
    )
