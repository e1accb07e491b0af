"""What surrounds a forward or backward: checks of the model, and the hooks by which autograd saves views of units."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from types import FrameType
from typing import final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tiered_zero.errors import ModelError, TieredZeroError
from tiered_zero.params.pager import Pager

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
        self._model = model
        self._pager = pager
        self._trains = trains
        self._slots = [
            (f"{path}.{name}".lstrip("."), module._parameters, name, param)
            for path, module in model.named_modules()
            for name, param in module._parameters.items()
            if param is not None
        ]
        self._note_modules()
        self._frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
        self.is_direct = False
        """Whether a module runs that was called directly, in thread `_opener`, or did when an interrupt ended it."""
        self._opener = 0
        self._call: FrameType | None = None
        """The frame of torch's call of that module."""
        self._saving: saved_tensors_hooks | None = None
        self._innermost: nn.Module | None = None
        """The module without units that was called directly, and how often it runs inside itself."""
        self._depth = 0

    def is_root(self, module: nn.Module) -> bool:
        return module is self._model

    def runs_directly(self) -> bool:
        """Whether the caller runs inside of a module that was called directly. torch calls no hook where an interrupt
        ends a forward: so `is_direct` may be left of one, and its frame is on the stack no more."""
        frame = sys._getframe(1) if self._call is not None else None
        while frame is not None and frame is not self._call:
            frame = frame.f_back
        return frame is not None

    @contextmanager
    def saving_views(self) -> Iterator[None]:
        """While open, autograd saves views of flats by name instead of by address."""
        self._refuse_tracing()
        self._pager.changes.refuse()
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
        """Raises ModelError where a parameter, or the module that has it, was replaced or removed, or a trainable one
        was added. Called in each call of the engine: compares pointers and counts only."""
        is_changed = any(len(entries) != count for entries, count in self._counts)
        for full_name, params, name, param in self._slots:
            if params.get(name) is not param:
                raise _replaced_error(full_name)
        is_changed |= any(params.get(name) is not other for params, name, other in self._others)
        if any(children.get(name) is not child for children, name, child in self._children):
            held = {id(module._parameters) for module in self._model.modules()}
            for full_name, params, _, _ in self._slots:
                # fine where what replaces the module has them too, as torch.compile's wrapper
                if id(params) not in held:
                    raise _replaced_error(full_name)
            is_changed = True
        if is_changed:
            self._check_added()
            self._note_modules()

    def _check_added(self) -> None:
        """Raises ModelError where a trainable parameter has joined the model; a frozen one must stay frozen."""
        known = {id(param) for _, _, _, param in self._slots}
        for name, param in self._model.named_parameters():
            if id(param) in known:
                continue
            if not param.requires_grad:
                self._frozen[name] = param
            elif self._trains:
                raise ModelError(
                    f"Parameter {name} was added to the model after tiered_zero.initialize(): it has no optimizer "
                    "state, and would be neither updated nor saved. Add it before initialize(), set "
                    "requires_grad=False for it, or keep its module outside of the model."
                )

    def _note_modules(self) -> None:
        """What `check_parameters` compares with: the children of each module, how many it has, and what the model has
        besides the parameters that it began with: frozen ones that were added, and None."""
        modules = list(self._model.modules())
        self._children = [(own._modules, name, child) for own in modules for name, child in own._modules.items()]
        self._counts: list[tuple[Sized, int]] = [
            (entries, len(entries)) for own in modules for entries in (own._modules, own._parameters)
        ]
        first = {(id(params), name) for _, params, name, _ in self._slots}
        self._others = [
            (own._parameters, name, param)
            for own in modules
            for name, param in own._parameters.items()
            if (id(own._parameters), name) not in first
        ]

    # -- modules that are called directly ------------------------------------------------------------------------------

    def begin_direct(self, module: nn.Module) -> None:
        self._refuse_tracing()
        self._pager.driver.enter(f"The forward of {type(module).__name__}")
        self.is_direct, self._opener = True, threading.get_ident()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
            frame = frame.f_back
        self._call = frame

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
        self._check_frozen()
        self._pager.changes.check_converted()
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            raise ModelError(_NO_TRANSFORM)
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if (hooks := self._pager.saved_views.hooks_inside(outer)) is None:
            return None
        saving = saved_tensors_hooks(*hooks)
        saving.__enter__()
        return saving

    def _check_frozen(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            thawed = next((name for name, param in self._frozen.items() if param.requires_grad), None)
        if thawed is not None:
            raise ModelError(
                f"Parameter {thawed} requires a gradient, but was frozen when the run started: it has no optimizer "
                "state, and would never be updated. Freeze parameters that shall wait after tiered_zero.initialize()."
            )

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
