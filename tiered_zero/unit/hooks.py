"""Register all hooks of a model: on modules, `state_dict()` and gradients. They call the engine's `TrainStep` and its
pager. [Note: Entry points]"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import Unit
from tiered_zero.unit.gathered import gather
from tiered_zero.unit.guard import OffloadedParameter
from tiered_zero.unit.pager import Pager
from tiered_zero.unit.quantized_layers import Forward4bit, is_4bit
from tiered_zero.unit.saved_views import SAVED_TENSOR_HOOKS


class ForwardEvents(Protocol):
    """Receives what the hooks report. The engine's TrainStep implements it. Called on the driver thread, and in
    backward also on autograd's threads."""

    pager: Pager

    def pre_state_dict(self, module: nn.Module, *, checks: bool) -> None:
        """Prepare for the state_dict of `module`. `checks`: whether to raise if the model's parameters were
        replaced."""

    def pre_forward(
        self, units: Sequence[Unit], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Make `units` usable until `post_forward`. Called when the forward of `module` begins, with the arguments of
        that forward."""

    def post_forward(self, *_: Any) -> None:
        """End the innermost running module's use of its units. The module has ended or raised."""

    def grad_ready(self, param: nn.Parameter) -> None:
        """Take `param.grad`, which is complete for one backward. Called by the parameter's first post-accumulate
        hook."""


class _Hook(partial[None]):
    """A hook of this package on a module. In a copy or a pickle of the module, a function that does nothing takes its
    place."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nullcontext().__exit__  # takes any arguments, returns None, and pickles without this package

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class _ForwardHook(_Hook):
    @property
    def __name__(self) -> str:
        """Raise ModelError, to refuse torch.jit.script, which reads this name first."""
        raise ModelError(
            "torch.jit.script cannot compile a module of a tiered_zero engine: its parameters are paged by Python. "
            "Use a model that is built anew, with engine.module.state_dict() loaded."
        )


def _hide_from_compiler(*functions: Any) -> None:
    """Keep torch.compile from compiling `functions` and what they call. They run as plain Python."""
    # torch.compiler.disable would cost time in each call
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
    from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
    from torch._C._dynamo.eval_frame import set_code_exec_strategy

    skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    for function in (*functions, *SAVED_TENSOR_HOOKS, OffloadedParameter.__torch_function__):
        for code in {function.__code__, inspect.unwrap(function).__code__}:
            set_code_exec_strategy(code, skip)


class ModuleHooks:
    """Registers hooks on a model (`install`, once), and removes them (`remove`).

    [Note: Frames of modules] A frame is an entry in the pager's stack of running modules. The root, and each module
    that owns units, opens a frame for the length of its forward. Any other module with parameters opens a frame only if
    the user calls it directly, as `generate()` calls an encoder. That frame begins without units; units are added when
    functions need them."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], events: ForwardEvents) -> None:
        self._events = events
        self._handles: list[RemovableHandle] = []
        self._layers_4bit: list[nn.Module] = []
        """Layers quantized to 4 bits that have a `Forward4bit` as their `forward`."""
        self._key: int | None = None
        """The key of the engine's forward hooks and pre-hooks in every module's tables of hooks; None before the first
        hook."""
        self._model = model
        self._units = units
        # torch.compile ends a module's graph before these calls, and begins a new one after them
        self._before: Callable[..., None] = torch.compiler.disable(events.pre_forward)  # type: ignore[no-untyped-call]
        self._after: Callable[..., None] = torch.compiler.disable(events.post_forward)  # type: ignore[no-untyped-call]
        _hide_from_compiler(
            ModuleHooks._before_direct, ModuleHooks._after_direct, ModuleHooks._before_save, ModuleHooks._after_save,
            ModuleHooks._before_load, ModuleHooks._after_load, type(events).grad_ready,
        )  # fmt: skip

    def install(self) -> None:
        modules = dict(self._model.named_modules())
        by_module: dict[str, list[Unit]] = defaultdict(list)
        for unit in self._units:
            by_module[unit.module].append(unit)
        by_module[""] += []  # a root without parameters needs a frame too: its forward may call functions with some
        for name, module in modules.items():
            if name in by_module:
                self._register(module, _ForwardHook(self._before, tuple(by_module[name])), _ForwardHook(self._after))
            elif next(module.parameters(), None) is not None:
                self._register(module, _ForwardHook(self._before_direct), _ForwardHook(self._after_direct))
        for module in modules.values():
            self._watch_state_dict(module)
            if is_4bit(module) and "forward" not in module.__dict__:
                module.forward = Forward4bit(module)
                self._layers_4bit.append(module)
        for param in self._model.parameters():
            if param.requires_grad:
                handle = param.register_post_accumulate_grad_hook(self._events.grad_ready)  # type: ignore[no-untyped-call]
                self._handles.append(handle)  # at once, so that `remove` finds the hook after Ctrl-C
                hooks = param._post_accumulate_grad_hooks
                assert hooks is not None, "one was just registered"
                hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for layer in self._layers_4bit:
            layer.__dict__.pop("forward", None)  # the `forward` of the layer's class serves again
        self._layers_4bit.clear()

    def _before_direct(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward pass if the user calls the module directly. [Note: Frames of modules]"""
        pager = self._events.pager
        if not torch.compiler.is_compiling() and not pager.is_running() and pager.is_called_directly():
            self._events.pre_forward((), module, args, kwargs)

    def _after_direct(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling() and self._events.pager.ends_direct(module):
            self._events.post_forward()

    def _register(self, module: nn.Module, before: _ForwardHook, after: _ForwardHook) -> None:
        """Register `before` as the module's first pre-hook, and `after` as a forward hook that runs even if the module
        raises."""
        handle = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self._handles.append(handle)
        self._share_key(handle, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        # first: the user's pre-hooks find the parameters on the device
        module._forward_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        # always: torch.utils.checkpoint raises to stop a recomputation early
        handle = module.register_forward_hook(after, always_call=True)
        self._handles.append(handle)
        self._share_key(handle, module._forward_hooks, module._forward_hooks_always_called)

    def _share_key(self, handle: RemovableHandle, *tables: dict[int, Any]) -> None:
        """Give the hook of `handle` the same key in every module. `tables`: the module's tables that hold the hook."""
        # torch.compile compares these keys. With other keys, blocks of one class do not share compiled code, and those
        # after the eighth (torch._dynamo.config.recompile_limit) are not compiled.
        if self._key is None:
            self._key = handle.id
        for table in tables:
            table[self._key] = table.pop(handle.id)
        handle.id = self._key

    def _watch_state_dict(self, module: nn.Module) -> None:
        """Make state_dict() return CPU copies, and load_state_dict() write to the parameters' homes."""
        params = {name: param for name, param in module._parameters.items() if param is not None}
        before_save, after_save = _Hook(self._before_save, params), _Hook(self._after_save, params)
        self._handles.append(module.register_state_dict_pre_hook(before_save))  # type: ignore[no-untyped-call]
        self._handles.append(module.register_state_dict_post_hook(after_save))  # type: ignore[no-untyped-call]
        if params:
            before_load, after_load = _Hook(self._before_load, params.values()), _Hook(self._after_load)
            self._handles.append(module.register_load_state_dict_pre_hook(before_load))  # type: ignore[no-untyped-call]
            self._handles.append(module.register_load_state_dict_post_hook(after_load))  # type: ignore[no-untyped-call]

    def _before_save(self, params: dict[str, nn.Parameter], module: nn.Module, *_: Any) -> None:
        is_changed = any(module._parameters.get(name) is not own for name, own in params.items())
        self._events.pre_state_dict(module, checks=module is self._model or is_changed)

    def _after_save(
        self, params: dict[str, nn.Parameter], _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        copies = self._events.pager.copies
        for name, param in params.items():
            if prefix + name in state:
                state[prefix + name] = copies.take(param)
        copies.stop()

    def _before_load(
        self,
        params: Iterable[nn.Parameter],
        _module: nn.Module,
        _state: Any,
        _prefix: str,
        metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise ModelError(
                "load_state_dict(assign=True) would put other parameters in the place of those that the engine "
                "trains. Leave assign out: values are copied to the parameters' homes."
            )
        block = gather(params, modify=True)
        block.__enter__()
        self._events.pager.loading.append(block)

    def _after_load(self, *_: Any) -> None:
        self._events.pager.loading.pop().__exit__(None, None, None)
