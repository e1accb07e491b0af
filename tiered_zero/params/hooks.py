"""The hooks between a model and the pager: the only file that registers any on modules.

Nothing here computes. Each hook tells the pager what begins or ends; see [Note: Three doors] in the package.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import Unit
from tiered_zero.params.lending import lend
from tiered_zero.params.pager import Pager

GradientSink = Callable[[nn.Parameter], None]
"""Called on autograd's thread when `param.grad` is complete for one pass; takes the gradient away."""


class ModuleHooks:
    """Installed once on a model; `remove` takes everything off again."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], pager: Pager, on_gradient: GradientSink) -> None:
        self._pager = pager
        self._handles: list[Any] = []
        self._outermost = ExitStack()
        self._frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
        try:
            self._install(model, units, on_gradient)
        except BaseException:
            self.remove()
            raise

    def _install(self, model: nn.Module, units: Sequence[Unit], on_gradient: GradientSink) -> None:
        modules = dict(model.named_modules())
        by_module: dict[str, list[Unit]] = defaultdict(list)
        for unit in units:
            by_module[unit.module].append(unit)
        by_module[""] += []  # also a root without parameters of its own: functions that its forward calls demand them
        for name, owned in by_module.items():
            self._watch_forward(modules[name], tuple(owned))
        for module in model.modules():
            self._watch_state_dict(module)
        for param in model.parameters():
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(on_gradient))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def saving_views(self) -> Iterator[None]:
        """While open, autograd saves views of flats by name instead of by address."""
        self._check_frozen()
        self._pager.refuse_changes()
        with saved_tensors_hooks(self._pager.pack, self._pager.unpack):
            yield

    def _check_frozen(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            thawed = next((name for name, param in self._frozen.items() if param.requires_grad), None)
        if thawed is not None:
            raise ModelError(
                f"Parameter {thawed} requires a gradient, but was frozen when the run started: it has no optimizer "
                "state, and would never be updated. Freeze parameters that shall wait after tiered_zero.initialize()."
            )

    def _watch_forward(self, module: nn.Module, units: tuple[Unit, ...]) -> None:
        pager = self._pager

        def before(_module: nn.Module, _args: Any) -> None:
            if pager.is_called_directly():
                self._outermost.close()  # what a forward left that was interrupted
                self._outermost.enter_context(self.saving_views())
            pager.enter_frame(units)

        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            pager.exit_frame()
            if pager.is_called_directly():
                self._outermost.close()

        # a compiled module's graph ends before paging and goes on after it; first of all pre-hooks, so that others find
        # the parameters, and one that raises leaves a frame behind for `after`, which is called all the same
        first = torch.compiler.disable(before)  # type: ignore[no-untyped-call]
        self._handles.append(module.register_forward_pre_hook(first, prepend=True))
        # always_call: a frame ends also when the module raises (or a recomputation stops early, which raises too)
        last = torch.compiler.disable(after)  # type: ignore[no-untyped-call]
        self._handles.append(module.register_forward_hook(last, always_call=True))

    def _watch_state_dict(self, module: nn.Module) -> None:
        """state_dict() gives CPU copies of real shape; load_state_dict() finds its parameters lent, and writes them
        home.
        """
        pager = self._pager
        params = {name: param for name, param in module._parameters.items() if param is not None}

        def before_save(*_: Any) -> None:
            pager.start_copying()

        def after_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            for name, param in params.items():
                if prefix + name in state:
                    state[prefix + name] = pager.cpu_copy(param)
            pager.stop_copying()

        def before_load(*_: Any) -> None:
            loans.append(loan := lend(params.values(), modify=True))
            loan.__enter__()

        def after_load(*_: Any) -> None:
            loans.pop().__exit__(None, None, None)

        loans: list[AbstractContextManager[None]] = []
        self._handles.append(module.register_state_dict_pre_hook(before_save))  # type: ignore[no-untyped-call]
        self._handles.append(module.register_state_dict_post_hook(after_save))  # type: ignore[no-untyped-call]
        if params:
            self._handles.append(module.register_load_state_dict_pre_hook(before_load))  # type: ignore[no-untyped-call]
            self._handles.append(module.register_load_state_dict_post_hook(after_load))  # type: ignore[no-untyped-call]
