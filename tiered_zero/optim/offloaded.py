"""A torch optimizer whose state rests in host memory or swap files."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiered_zero.assembly.disk_space import Ranks
from tiered_zero.concurrency.interrupts import INTERRUPTS, call_open, protected, shielded
from tiered_zero.engine.calls import end_unreferenced_run
from tiered_zero.errors import ModelError
from tiered_zero.hardware.ranks.collectives import SingleRank
from tiered_zero.layout.flat import Unit
from tiered_zero.optim.pipeline import Pipeline, open_pipeline, read_offload
from tiered_zero.optim.state_files import StateFiles, write_state
from tiered_zero.plan.planner import Plan
from tiered_zero.system.process import OwnProcess
from tiered_zero.telemetry.ledger import Ledger
from tiered_zero.telemetry.report import StepReport, build_step_report
from tiered_zero.update.optimizer_state import OptimizerState
from tiered_zero.update.state_access import StateAccess
from tiered_zero.update.state_calls import TierStateOptimizer, replace_values
from tiered_zero.update.state_view import ParamState


class OffloadedOptimizer(TierStateOptimizer):
    """`optimizer_class(params, **defaults)` with its state on the tier of `offload`: the same numbers, bit for bit.

    `offload`: {"device": "cpu" or "nvme", "nvme_path": a directory}, and "state_format", "buffer_count", "pin_memory",
    "checksums", "host_memory_limit", "io_engine", "io_timeout_s", as in the config of an engine. fp32 parameters are
    stepped where they lie; those of 16 bits get fp32 masters on the tier. Changes of parameters between steps are seen.
    Clipping, accumulation, loss scaling and schedules stay the loop's own.

    A failure inside `step()` latches: state is rewritten in place. `close()` frees the tiers, as does the end of a
    `with` block, of the object and of the process. One thread.
    """

    _end: weakref.finalize[Any, Any]
    _ranks: Ranks = SingleRank()
    """Those that open tiers at the same time."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        offload: Mapping[str, Any],
        **defaults: Any,
    ) -> None:
        """Raises what `optimizer_class` raises, ConfigError, ModelError, PlanError, StoreError; nothing is left behind
        then."""
        if not callable(optimizer_class) or (
            isinstance(optimizer_class, type) and not issubclass(optimizer_class, Optimizer)
        ):
            raise TypeError(
                f"optimizer_class: expected a class of torch.optim, or a subclass of torch.optim.Optimizer; found "
                f"{optimizer_class!r}. Its arguments follow by name: OffloadedOptimizer(params, torch.optim.AdamW, "
                "offload, lr=...)."
            )
        self._config = read_offload(offload)
        self._pipeline: Pipeline | None = None
        params = list(params) if not isinstance(params, Tensor) else params
        Optimizer.__init__(self, params, {})
        self._source = _plain(optimizer_class, self.param_groups, defaults)
        self.defaults = self._source.defaults
        for group, values in zip(self.param_groups, self._source.param_groups, strict=True):
            group.update({name: value for name, value in values.items() if name != "params"})
        self._process = OwnProcess("optimizer")
        self._step_start_s = time.perf_counter()
        self.num_steps = 0
        self.step_report: StepReport | None = None
        """Of the last step: seconds by cause, bytes by link, the most on each tier."""
        INTERRUPTS.install()
        try:
            self._open()
        finally:
            INTERRUPTS.uninstall()  # unless it is open

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        on_written: Callable[[Tensor], None] | None = None,
    ) -> float | None:
        """Update every parameter that has a gradient; return what the closure returned. All of it is written then.

        `on_written`: called on this thread with each parameter of the groups, in their order, once it has its new value
        or where it keeps the old one, while those behind are updated.
        """
        INTERRUPTS.install()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = call_open(closure)
        self._update(on_written)
        return loss

    @shielded
    def _update(self, on_written: Callable[[Tensor], None] | None) -> None:
        pipeline = self._current()
        pipeline.params.check_gradients()
        with torch.no_grad(), pipeline.policy.failures.surfacing():
            pipeline.policy.check()
            with pipeline.runtime.recorder.span("compute", "step"):
                if on_written is None:
                    pipeline.policy.apply(pipeline.params, 1.0)
                else:
                    _apply_in_order(pipeline, on_written)
        pipeline.params.release_gradients()
        torch.autograd.graph.increment_version(pipeline.params.stepped())
        self.num_steps += 1
        end_s = time.perf_counter()
        pipeline.runtime.accelerator.add_spans()
        totals, ledger = pipeline.runtime.recorder.take_totals(), pipeline.runtime.ledger
        self.step_report = build_step_report(self.num_steps, totals, end_s - self._step_start_s, ledger)
        self._step_start_s = end_s

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Every byte on every tier; `print` shows it as a table."""
        return self._running().plan

    @property
    def ledger(self) -> Ledger:
        """The account of the bytes that are allocated."""
        return self._running().runtime.ledger

    # -- groups --------------------------------------------------------------------------------------------------------

    @protected
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does. State moves to tiers with room for theirs, parameter by parameter."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        if self._pipeline is None:
            return
        try:
            self._source.add_param_group(dict(self.param_groups[-1]))
            values = self._source.param_groups[-1]
            self.param_groups[-1].update({name: value for name, value in values.items() if name != "params"})
            self._open()
        except BaseException:
            del self.param_groups[before:], self._source.param_groups[before:]
            raise

    # -- files ---------------------------------------------------------------------------------------------------------

    @protected
    def save_state(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write `state_dict()` to safetensors files, one parameter at a time; return their paths. Raises StoreError."""
        pipeline = self._current()
        pipeline.policy.check()
        pipeline.stepper.cancel_prefetch()
        return write_state(Path(directory), _MovedState(pipeline.state, self.param_groups), self.param_groups)

    @shielded
    def load_state(self, directory: str | os.PathLike[str]) -> None:
        """Load what `save_state` has written, one parameter at a time. Raises StoreError and ModelError if it does not
        fit."""
        self._current()
        with StateFiles(Path(directory), self.param_groups) as files:
            self.state.replace(files, files.groups)
            replace_values(self.param_groups, files.groups)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the tiers: state is gone, swap files are removed; parameters keep their values. Idempotent."""
        if self._pipeline is not None and self._process.is_current():
            self._end.detach()
            self._pipeline.resources.close()

    def __enter__(self) -> OffloadedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the pipeline --------------------------------------------------------------------------------------------------

    def _running(self) -> Pipeline:
        if self._pipeline is None:
            raise ModelError("The optimizer is not built: its constructor has raised. Build it anew.")
        return self._pipeline

    def _current(self) -> Pipeline:
        """Return the pipeline of the parameters as they lie now. Raises ModelError once closed, or for groups changed
        by hand."""
        self._process.check()
        pipeline = self._running()
        if not self._end.alive:
            raise ModelError("The optimizer is closed, and its state is gone. Save state_dict() before close().")
        pipeline.watch.check()
        if pipeline.params.has_moved():
            self._open()
        return self._running()

    def _open(self) -> None:
        """Build the pipeline of the present groups; state moves into it from the one before, which is closed."""
        former = self._pipeline
        if former is not None:
            former.policy.check()
            former.stepper.cancel_prefetch()
            former.params.check_shapes(former.state.stepped())
        pipeline = open_pipeline(self._source, self, self._config, self._ranks)
        try:
            own = self._source.state if former is None else _MovedState(former.state, self.param_groups)
            pipeline.state.write(own, self.param_groups)
        except BaseException:
            pipeline.resources.close()
            raise
        self._pipeline = pipeline
        self.state = access = StateAccess(pipeline.state, pipeline.policy, self.param_groups)
        pipeline.resources.add("state", access.close)
        if former is not None:
            self._end.detach()
            former.resources.close()
        self._end = weakref.finalize(self, end_unreferenced_run, self._process, pipeline.resources)  # at exit too
        for values in self._source.state.values():
            values.clear()  # the tier has it


def _apply_in_order(pipeline: Pipeline, on_written: Callable[[Tensor], None]) -> None:
    """Apply a step; call `on_written` for every parameter: those without a gradient, before the next that has one."""
    waiting = deque(pipeline.params.params)

    def written(unit: Unit) -> None:
        while waiting:
            on_written(param := waiting.popleft())
            if param is pipeline.params.params[unit.index]:
                return

    pipeline.policy.apply_in_order(pipeline.params, 1.0, pipeline.units, written, pipeline.runtime)
    for param in waiting:
        on_written(param)


class _MovedState(Mapping[nn.Parameter, ParamState]):
    """The state of a pipeline that another takes the place of, read one parameter at a time."""

    def __init__(self, state: OptimizerState, groups: list[dict[str, Any]]) -> None:
        self._state = state
        self._groups = groups
        self._last: tuple[nn.Parameter | None, ParamState] = None, {}
        """A parameter in many sub-groups is asked for once for each."""

    def __getitem__(self, param: nn.Parameter) -> ParamState:
        if self._last[0] is not param:
            self._last = param, self._state.read(self._groups, only=param).get(param, {})
        return self._last[1]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._state.stepped())

    def __len__(self) -> int:
        return len(self._state.stepped())


def _plain(kind: type[Optimizer], groups: list[dict[str, Any]], defaults: Mapping[str, Any]) -> Optimizer:
    """Build a plain optimizer over these groups, for its class's checks and defaults; it is never stepped. Over
    parameters without memory, where the class takes them: Adagrad makes its state as it is built."""

    def build(make: Callable[[Tensor], Tensor]) -> Optimizer:
        given = [
            {**{k: v for k, v in group.items() if k != "param_names"}, "params": [make(p) for p in group["params"]]}
            for group in groups
        ]
        return kind(given, **defaults)

    def on_meta(param: Tensor) -> Tensor:
        return torch.empty_like(param, device="meta").requires_grad_(param.requires_grad)

    try:
        return build(on_meta)
    except Exception:  # what is wrong with the arguments themselves is raised again
        return build(lambda param: param)
