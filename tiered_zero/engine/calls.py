"""The run of an engine: entry and exit of the user's calls, and the end of a run that the user does not close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from tiered_zero.checkpoint.checkpoints import Checkpoints
from tiered_zero.concurrency.teardown import Teardown
from tiered_zero.config.schema import Config
from tiered_zero.engine.train_step import TrainStep
from tiered_zero.hardware.device.outside_modes import runs_outside_modes
from tiered_zero.plan.planner import Plan
from tiered_zero.system.process import OwnProcess
from tiered_zero.telemetry.report import StepReport
from tiered_zero.update.handle import TieredOptimizer


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What an engine trains, and with what. `optimizer`: None if it evaluates. `observers`: called with the report
    of each optimizer step."""

    module: nn.Module
    config: Config
    plan: Plan
    optimizer: TieredOptimizer | None
    lr_scheduler: Any
    observers: Sequence[Callable[[StepReport], None]]
    checkpoints: Checkpoints


class HasStep(Protocol):
    """An engine."""

    _step: TrainStep


_Engine = TypeVar("_Engine", bound=HasStep)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate[_Engine, _Arguments], _Result]


def on_one_thread(method: _Method[_Engine, _Arguments, _Result]) -> _Method[_Engine, _Arguments, _Result]:
    """Refuse a call of `method` while another thread is inside the engine, and inside of a forward, backward or step
    (ModelError). As it ends raise the KeyboardInterrupt that was held back: see [Note: Interrupted calls]."""

    @wraps(method)
    def entered(self: _Engine, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        step, call = self._step, f"engine.{method.__name__}()"
        driver, records = step.pager.driver, torch.is_grad_enabled()
        driver.enter(call)
        try:
            if method.__name__ != "peek":  # which looks at what is there
                step.entrance.check_outside(call, may_recompute=method.__name__ == "forward")
            return method(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            driver.was_broken_off = True
            torch.set_grad_enabled(records)  # a torch.no_grad() may have been broken off as it ended
            raise
        finally:
            driver.leave()
            if step.holds_interrupts:
                step.end_hold()

    return entered


def end_unreferenced_run(process: OwnProcess, resources: Teardown) -> None:
    """End the run of an engine that is garbage, or at exit. Garbage is collected on any thread, perhaps on a lane
    of this run, which cannot wait for itself: so only the main thread ends the run at once."""
    if not process.is_current():
        return  # a forked child owns nothing, and has no lane that could end an update
    if threading.current_thread() is threading.main_thread():
        runs_outside_modes(resources.close)()  # of what ran when the collector came: a compiler's tracing, for one
    else:
        threading.Thread(target=resources.close, name="tiered_zero end").start()


def count_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Elements of `input_ids`, or of the first argument, if they are whole numbers; else 0."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    return ids.numel() if isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32) else 0


def halved(values: Any) -> Any:
    """Cast floating point tensors in lists, tuples and dicts to float16, as DeepSpeed does for fp16.auto_cast."""
    if isinstance(values, torch.Tensor):
        return values.half() if values.is_floating_point() else values
    if isinstance(values, tuple) and hasattr(values, "_fields"):  # a named tuple takes its fields one by one
        return type(values)(*map(halved, values))
    if type(values) in (list, tuple):
        return type(values)(map(halved, values))
    return {name: halved(value) for name, value in values.items()} if type(values) is dict else values
