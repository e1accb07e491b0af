"""The hooks between a model and the pager: the only file that registers any on modules.

Nothing here computes. Each hook tells the pager what begins or ends; see [Note: Three doors] in the package.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tiered_zero.errors import ModelError, TieredZeroError
from tiered_zero.layout.flat import Unit
from tiered_zero.params.flat_storage import OffloadedParameter
from tiered_zero.params.gather import lend
from tiered_zero.params.outside_modes import runs_outside_modes
from tiered_zero.params.pager import Pager
from tiered_zero.params.slots import ParameterSlots

GradientSink = Callable[[nn.Parameter], None]
"""The first post-accumulate hook: called on autograd's thread when `param.grad` is complete for one pass."""


_NO_TRANSFORM = (
    "torch.func.grad, vjp, jacrev and hessian do not support saved tensor hooks, by which paged parameters are saved "
    "for backward, so they cannot run over a module of the engine, nor inside its forward. Use torch.autograd.grad "
    "(with create_graph=True where the result is differentiated again), or torch.func.jvp."
)


class _Hook:
    """A hook of ours on a module. A copy or a pickle of the module has a callable in its place that does nothing, and
    needs nothing of this package."""

    def __init__(self, owner: ModuleHooks, act: Callable[..., None]) -> None:
        self.owner = owner
        self._act = act

    def __call__(self, *args: Any) -> None:
        self._act(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nullcontext().__exit__  # takes any arguments, returns None, and pickles

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class _ForwardHook(_Hook):
    @property
    def __name__(self) -> str:
        """torch.jit.script asks for it, before anything else."""
        raise ModelError(
            "torch.jit.script cannot compile a module of a tiered_zero engine: its parameters come and go in Python. "
            "Use a model that is built anew, with engine.module.state_dict() loaded."
        )


def _hide_from_compiler() -> None:
    """torch.compile neither compiles what runs between the graphs of a module, or while autograd saves for it, nor
    what that calls. Unlike torch.compiler.disable this costs nothing per call."""
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
    from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
    from torch._C._dynamo.eval_frame import set_code_exec_strategy

    skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    for function in (_Hook.__call__, Pager.pack, Pager.unpack, OffloadedParameter.__torch_function__):
        for code in {function.__code__, inspect.unwrap(function).__code__}:
            set_code_exec_strategy(code, skip)


class ModuleHooks:
    """`install`, once, puts them on a model; `remove` takes everything off again, also what an interrupted `install`
    has left.

    [Note: Frames of modules]
    Modules that own units (and the root) lend them for the length of their forward. Every other module with parameters
    can be called directly, past the root, as `generate()` calls an encoder: it then opens a frame without units, which
    what it demands is lent to. Inside another module's frame its hooks do nothing.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], pager: Pager, on_gradient: GradientSink) -> None:
        self._pager = pager
        self._handles: list[Any] = []
        self._is_partial = False
        """Whether there may be hooks without a handle in `_handles`."""
        self._model = model
        self._units = units
        self._take = runs_outside_modes(on_gradient)
        self._is_open = False
        """Whether a module runs that was called directly, past the engine, and in which thread."""
        self._opener = 0
        self._saving: saved_tensors_hooks | None = None
        self._direct: nn.Module | None = None
        """The module without units that is called directly, and how often it is inside itself."""
        self._direct_depth = 0
        self._slots = ParameterSlots(model)
        self._frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
        _hide_from_compiler()

    def install(self) -> None:
        self._is_partial = True
        modules = dict(self._model.named_modules())
        by_module: dict[str, list[Unit]] = defaultdict(list)
        for unit in self._units:
            by_module[unit.module].append(unit)
        by_module[""] += []  # also a root without parameters of its own: functions that its forward calls demand them
        for name, module in modules.items():
            if name in by_module:
                self._watch_forward(module, tuple(by_module[name]))
            elif next(module.parameters(), None) is not None:
                self._watch_direct_call(module)
        for module in modules.values():
            self._watch_state_dict(module)
        for param in self._model.parameters():
            if param.requires_grad:
                handle = param.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
                hooks = param._post_accumulate_grad_hooks
                assert hooks is not None, "one was just registered"
                hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
                self._handles.append(handle)
        self._is_partial = False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._is_partial:
            self._sweep()
            self._is_partial = False

    def _sweep(self) -> None:
        """Take off every hook of ours that the model has, by what it is: torch registers one before it gives us the
        handle."""
        for module in self._model.modules():
            tables = [table for name, table in vars(module).items() if "_hooks" in name and isinstance(table, dict)]
            own = {key for table in tables for key, hook in table.items() if self._is_own(hook)}
            for table in tables:
                for key in own & table.keys():
                    del table[key]
        for param in self._model.parameters():
            with torch._C.DisableTorchFunctionSubclass():
                hooks = param._post_accumulate_grad_hooks or {}
            for key in [key for key, hook in hooks.items() if hook is self._take]:
                del hooks[key]

    def _is_own(self, hook: Any) -> bool:
        hook = getattr(hook, "hook", hook)  # torch wraps those of load_state_dict
        return isinstance(hook, _Hook) and hook.owner is self

    def abort(self) -> None:
        """No forward runs any more: what one that was interrupted has left on autograd's stack of hooks goes."""
        if self._is_open:
            self._close()
        while self._is_saving():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def _is_saving(self) -> bool:
        """Whether our hooks for saved tensors are the top of this thread's."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and hooks[0] == self._pager.pack

    @contextmanager
    def saving_views(self) -> Iterator[None]:
        """While open, autograd saves views of flats by name instead of by address."""
        self._refuse_tracing()
        self._pager.refuse_changes()
        saving = self._start_saving()
        try:
            yield
        except RuntimeError as error:
            if "saved tensor hooks" in str(error) and not isinstance(error, TieredZeroError):
                raise ModelError(_NO_TRANSFORM) from error
            raise
        finally:
            saving.__exit__()

    def _refuse_tracing(self) -> None:
        if torch._C._get_tracing_state():
            raise ModelError(
                "torch.jit.trace cannot trace a module of a tiered_zero engine: the trace would read parameters while "
                "their bytes rest elsewhere. Use a copy: torch.jit.trace(copy.deepcopy(engine.module), ...)."
            )

    def _start_saving(self) -> saved_tensors_hooks:
        """Check what must hold of the model when the outermost forward or a backward begins; then save by name."""
        self._check_frozen()
        self._pager.check_converted()
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            raise ModelError(_NO_TRANSFORM)
        saving = saved_tensors_hooks(self._pager.pack, self._pager.unpack)
        saving.__enter__()
        return saving

    def check_parameters(self) -> None:
        """Raises ModelError where the model has other parameters than those that are paged."""
        self._slots.check()

    def _check_frozen(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            thawed = next((name for name, param in self._frozen.items() if param.requires_grad), None)
        if thawed is not None:
            raise ModelError(
                f"Parameter {thawed} requires a gradient, but was frozen when the run started: it has no optimizer "
                "state, and would never be updated. Freeze parameters that shall wait after tiered_zero.initialize()."
            )

    def end_interrupted(self) -> None:
        """End what a module that was called directly has left behind, where an interrupt broke it off: torch runs no
        hook then."""
        self._pager.driver.check("A module's forward")
        if self._is_open:
            self._pager.recover()
            self.abort()
            self._pager.abort()

    def _enter(self, module: nn.Module, units: tuple[Unit, ...]) -> None:
        """Open the module's frame; also what the engine's forward opens, where the module is called directly."""
        is_direct = self._pager.is_called_directly()
        if is_direct:
            self._refuse_tracing()
            self._pager.recover()
            self._pager.driver.enter(f"The forward of {type(module).__name__}")
            self._is_open, self._opener = True, threading.get_ident()
        self._pager.enter_frame(units)
        if is_direct:
            self._saving = self._start_saving()

    def _exit(self) -> None:
        self._pager.exit_frame()
        if self._is_open and not self._pager.is_running():
            self._close()

    def _close(self) -> None:
        self._is_open = False
        self._direct = None
        saving, self._saving = self._saving, None
        if self._opener == threading.get_ident():  # else that thread has ended, and with it what autograd held for it
            if saving is not None and self._is_saving():
                saving.__exit__()
            self._pager.driver.leave()

    def _watch_forward(self, module: nn.Module, units: tuple[Unit, ...]) -> None:
        pager, is_root = self._pager, module is self._model

        def before(_module: nn.Module, _args: Any) -> None:
            if is_root:  # which does not run inside itself
                self.end_interrupted()
            self._enter(module, units)

        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            if not pager.driver.is_other():  # else this thread was refused, and its hook is called all the same
                self._exit()

        # a compiled module's graph ends before paging and goes on after it
        self._register(module, torch.compiler.disable(before), torch.compiler.disable(after))  # type: ignore[no-untyped-call]

    def _watch_direct_call(self, module: nn.Module) -> None:
        """See [Note: Frames of modules]."""
        pager = self._pager

        def before(module: nn.Module, _args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if pager.is_running():
                self._direct_depth += self._direct is module
            elif pager.is_called_directly():
                self._direct, self._direct_depth = module, 1
                self._enter(module, ())

        def after(module: nn.Module, _args: Any, _output: Any) -> None:
            if self._direct is not module or torch.compiler.is_compiling() or pager.driver.is_other():
                return
            self._direct_depth -= 1
            if not self._direct_depth:
                self._exit()

        self._register(module, before, after)

    def _register(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        """First of all pre-hooks, so that others find the parameters, and one that raises leaves a frame behind for
        `after`, which is called all the same: a frame ends also when the module raises (or a recomputation stops
        early, which raises too)."""
        self._handles.append(module.register_forward_pre_hook(_ForwardHook(self, before), prepend=True))
        self._handles.append(module.register_forward_hook(_ForwardHook(self, after), always_call=True))

    def _watch_state_dict(self, module: nn.Module) -> None:
        """state_dict() gives CPU copies of real shape; load_state_dict() finds its parameters lent, and writes them
        home.
        """
        pager = self._pager
        params = {name: param for name, param in module._parameters.items() if param is not None}

        def before_save(*_: Any) -> None:
            if module is self._model or any(module._parameters.get(name) is not own for name, own in params.items()):
                self._slots.check()
            pager.start_copying()

        def after_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            for name, param in params.items():
                if prefix + name in state:
                    state[prefix + name] = pager.cpu_copy(param)
            pager.stop_copying()

        def before_load(_module: nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
            if metadata.get("assign_to_params_buffers"):
                raise ModelError(
                    "load_state_dict(assign=True) would put other parameters in the place of those that the engine "
                    "trains. Leave assign out: values are copied to where the parameters rest."
                )
            loans.append(loan := lend(params.values(), modify=True))
            loan.__enter__()

        def after_load(*_: Any) -> None:
            loans.pop().__exit__(None, None, None)

        loans: list[AbstractContextManager[None]] = []
        self._handles.append(module.register_state_dict_pre_hook(_Hook(self, before_save)))  # type: ignore[no-untyped-call]
        self._handles.append(module.register_state_dict_post_hook(_Hook(self, after_save)))  # type: ignore[no-untyped-call]
        if params:
            self._handles.append(module.register_load_state_dict_pre_hook(_Hook(self, before_load)))  # type: ignore[no-untyped-call]
            self._handles.append(module.register_load_state_dict_post_hook(_Hook(self, after_load)))  # type: ignore[no-untyped-call]
