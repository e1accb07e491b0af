"""Step with a torch optimizer whose state rests in host memory or swap files."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiered_zero.assembly.open_machine import SHUTDOWN, check_directories, clear_directories, open_machine, open_runtime
from tiered_zero.concurrency.interrupts import Teardown, hold_interrupts
from tiered_zero.config.load import load
from tiered_zero.config.schema import Config
from tiered_zero.engine.entry import end_unreferenced_run
from tiered_zero.errors import ConfigError, ModelError, StoreError
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.hardware.ranks.launcher import local_world_size
from tiered_zero.hardware.runtime import Runtime, build_accelerator
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import AUTO_SUB_GROUP_NUMEL, SubGroup, pack_params
from tiered_zero.native.update import num_kernel_threads
from tiered_zero.optim.state_files import STAND_IN, StateFiles, write_state
from tiered_zero.optim.user_params import UserParameters
from tiered_zero.plan.planner import Plan, make_plan
from tiered_zero.plan.request import PlanRequest, SubGroupSize, limit_of
from tiered_zero.rules.from_config import make_rule
from tiered_zero.rules.rule import UpdateRule
from tiered_zero.rules.state_layout import FollowingMasters, ParamMasters, StateLayout
from tiered_zero.system import OwnProcess
from tiered_zero.telemetry.report import StepReport, build_step_report
from tiered_zero.telemetry.spans import Ledger
from tiered_zero.update.handle import ParamGroupWatch, StateAccess, TierStateOptimizer
from tiered_zero.update.pipeline import UpdatePipeline
from tiered_zero.update.policy import BarrierPolicy
from tiered_zero.update.state_view import ParamShards, ParamState, StateView

logger = logging.getLogger("tiered_zero")

_IN_PLACE_NUMEL = 1 << 26
"""The size limit of a sub-group, in elements, if no bytes pass through staging buffers. With 1 << 24 a step took 5%
longer, because the kernel's threads wait for Python between two sub-groups."""
_SECTION = ("device", "nvme_path", "buffer_count", "pin_memory")
_RUNTIME = ("state_format", "checksums", "host_memory_limit", "io_engine", "io_timeout_s")


class OffloadedOptimizer(TierStateOptimizer):
    """Steps as `optimizer_class(params, **defaults)` does, and keeps the state in host memory or swap files.

    `offload`: {"device": "cpu" or "nvme", "nvme_path": a directory}, and optionally "state_format", "buffer_count",
    "pin_memory", "checksums", "host_memory_limit", "io_engine", "io_timeout_s", as in the config of an engine. With
    fp32 parameters and fp32 state, the results are those of the plain optimizer on the CPU, bit for bit. 16-bit
    parameters get fp32 masters on the tier. Your code may write to parameters between steps.

    After a failure in the middle of an update, `step()` and each access to the state raise EngineFailedError.
    `close()`, the end of a `with` block, garbage collection and the end of the process free the tiers. Use the
    optimizer from one thread."""

    _end: weakref.finalize[Any, Any]

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        offload: Mapping[str, Any],
        **defaults: Any,
    ) -> None:
        """Build the optimizer and allocate its tiers. Raises TypeError, ConfigError, ModelError, PlanError, StoreError
        or an error of `optimizer_class`; then nothing stays allocated."""
        if not callable(optimizer_class) or (
            isinstance(optimizer_class, type) and not issubclass(optimizer_class, Optimizer)
        ):
            raise TypeError(
                f"optimizer_class: expected a class of torch.optim, or a subclass of torch.optim.Optimizer; found "
                f"{optimizer_class!r}. Its arguments follow by name: OffloadedOptimizer(params, torch.optim.AdamW, "
                "offload, lr=...)."
            )
        self._config = _read_offload(offload)
        self._run: _Run | None = None
        params = list(params) if not isinstance(params, Tensor) else params
        Optimizer.__init__(self, params, {})
        self._source = _plain(optimizer_class, self.param_groups, defaults)
        self.defaults = self._source.defaults
        copy_options(self._source.param_groups, self.param_groups)
        self._process = OwnProcess("optimizer")
        self._step_start_s = time.perf_counter()
        self._awaited_key: str | None = None
        """The `StateFiles.key` of the files that `load_state` must read before the next step; None if no files must be
        read."""
        self.num_steps = 0
        self.step_report: StepReport | None = None
        """The report of the last step: seconds by cause, bytes by link, peak bytes on each tier."""
        self._open()

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        on_written: Callable[[Tensor], None] | None = None,
    ) -> float | None:
        """Update every parameter that has a gradient, wait until all are written, and return the closure's result.

        `on_written`: called with each parameter, in the order of the groups, once the parameter's value is final.
        Parameters without a gradient are included. Later parameters may not be updated yet."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(on_written)
        return loss

    @hold_interrupts()
    def _update(self, on_written: Callable[[Tensor], None] | None) -> None:
        run = self._current()
        self._check_loaded()
        run.params.check_gradients()
        with torch.no_grad(), run.policy.failures.surfacing():
            run.policy.check()
            with run.runtime.recorder.span("compute", "step"):
                if on_written is None:
                    run.policy.apply(run.params, 1.0)
                else:
                    _apply_in_order(run, on_written)
        run.params.release_gradients()
        torch.autograd.graph.increment_version(run.params.stepped())
        self.num_steps += 1
        end_s = time.perf_counter()
        run.runtime.accelerator.add_spans()
        totals, ledger = run.runtime.recorder.take_totals(), run.runtime.ledger
        self.step_report = build_step_report(self.num_steps, totals, end_s - self._step_start_s, ledger)
        self._step_start_s = end_s

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan: the bytes of each kind on each tier. `print` shows it as a table."""
        return self._running().plan

    @property
    def ledger(self) -> Ledger:
        """The object that counts the bytes allocated on each tier."""
        return self._running().runtime.ledger

    # -- groups --------------------------------------------------------------------------------------------------------

    @hold_interrupts()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch does. The tiers are built anew, and the existing state is copied to them."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        if self._run is None:
            return
        try:
            self._source.add_param_group(dict(self.param_groups[-1]))
            copy_options(self._source.param_groups[-1:], self.param_groups[-1:])
            self._open()
        except BaseException:
            del self.param_groups[before:], self._source.param_groups[before:]
            raise

    # -- files ---------------------------------------------------------------------------------------------------------

    @hold_interrupts()
    def save_state(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write `state_dict()` to safetensors files, one parameter at a time; return their paths. Raises StoreError."""
        run = self._current()
        self._check_loaded()
        run.policy.finish(before_write=True)
        return write_state(Path(directory), _MovedState(run.policy.view), self.param_groups)

    @hold_interrupts()
    def load_state(self, directory: str | os.PathLike[str]) -> None:
        """Load the files that `save_state` has written to `directory`, one parameter at a time. Raises StoreError, and
        ModelError if the state does not fit the parameters."""
        self._current()
        with StateFiles(Path(directory), self.param_groups) as files:
            if self._awaited_key not in (None, files.key):
                raise StoreError(
                    f"{directory} was expected to hold the files of the state_dict that was loaded, whose key is "
                    f"{self._awaited_key}; found {files.key}. Name the directory that was saved with it."
                )
            self._replace_state(files, files.groups)
        self._awaited_key = None

    def save_state_dict(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Call `save_state(directory)`, and return a state dict for trainers that pickle one. Instead of tensors, this
        state dict holds a key that identifies the files. After it is loaded, `step()` raises until `load_state()` has
        read the files. A plain torch optimizer refuses it."""
        self.save_state(directory)
        with StateFiles(Path(directory), self.param_groups) as files:
            return {"state": {}, "param_groups": [], STAND_IN: files.key}

    @property
    def awaits_files(self) -> bool:
        """Whether a state dict from `save_state_dict()` was loaded, and `load_state()` has not read its files yet."""
        return self._awaited_key is not None

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state in torch's format, as the base class does. Raises ModelError while `awaits_files`
        is true."""
        self._check_loaded()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class, or of a plain torch optimizer of the user's class. The result of
        `save_state_dict()` holds no state, so after loading such a result, call `load_state` before the next step."""
        if (key := state_dict.get(STAND_IN)) is None:
            super().load_state_dict(state_dict)
        self._awaited_key = key

    def _check_loaded(self) -> None:
        if self._awaited_key is not None:
            raise ModelError(
                f"Optimizer state was expected from files: the state_dict that was loaded stands for those with key "
                f"{self._awaited_key}. Call load_state(directory) first, which "
                "tiered_zero.integrations.trainer.SaveStateCallback does if Trainer has it among its callbacks."
            )

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the tiers: the state is lost, and swap files are removed. Parameters keep their values. Idempotent."""
        if self._run is not None and self._process.is_current():
            self._end.detach()
            self._run.resources.close()

    def __enter__(self) -> OffloadedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the run -------------------------------------------------------------------------------------------------------

    def _running(self) -> _Run:
        if self._run is None:
            raise ModelError("The optimizer is not built: its constructor has raised. Build it anew.")
        return self._run

    def _current(self) -> _Run:
        """Return the run, rebuilt if a parameter's device, dtype, shape or strides changed. Raises ModelError in a
        forked child, if the optimizer is closed, or if `watch` refuses a change of param groups."""
        self._process.check()
        run = self._running()
        if not self._end.alive:
            raise ModelError("The optimizer is closed, and its state is gone. Save state_dict() before close().")
        run.watch.check()
        if run.params.has_moved():
            self._open()
        return self._running()

    def _open(self) -> None:
        """Build a run for the present param groups, copy the state of the last run into it, and close the last run."""
        former = self._run
        if former is not None:
            former.policy.finish(before_write=True)
            former.params.check_shapes(former.policy.view.stepped())
        run = _open_run(self._source, self, self._config)
        try:
            own = self._source.state if former is None else _MovedState(former.policy.view)
            run.policy.view.write(own)
        except BaseException:
            run.resources.close()
            raise
        self._run = run
        self.state = access = StateAccess(run.policy)
        run.resources.add("optimizer", access.close)
        if former is not None:
            self._end.detach()
            former.resources.close()
        self._end = weakref.finalize(self, end_unreferenced_run, self._process, run.resources)  # at exit too
        for values in self._source.state.values():
            values.clear()  # the tier has it


def _apply_in_order(run: _Run, on_written: Callable[[Tensor], None]) -> None:
    """Apply a step, and call `on_written` with every parameter, in order, once its value is final."""
    waiting = deque(run.params.params)

    def written(unit: Unit) -> None:
        while waiting:
            on_written(param := waiting.popleft())
            if param is run.params.params[unit.index]:
                return

    run.policy.apply_in_order(run.params, 1.0, run.units, written)
    for param in waiting:
        on_written(param)


class _MovedState(Mapping[nn.Parameter, ParamState]):
    """Maps each parameter of a run that has state to a copy of its state. A lookup reads the state of one parameter."""

    def __init__(self, view: StateView) -> None:
        self._view = view
        self._last: tuple[nn.Parameter | None, ParamState] = None, {}
        """The parameter read last and its state. They are kept because the writer reads a parameter once for each
        sub-group that holds a part of it."""

    def __getitem__(self, param: nn.Parameter) -> ParamState:
        if self._last[0] is not param:
            self._last = param, self._view.read(param).get(param, {})
        return self._last[1]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._view.stepped())

    def __len__(self) -> int:
        return len(self._view.stepped())


def copy_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copy all option values of each source group, but not its parameters, to the target group of the same index."""
    for values, group in zip(source, target, strict=True):
        group.update({name: value for name, value in values.items() if name not in ("params", "param_names")})


def _plain(kind: type[Optimizer], groups: list[dict[str, Any]], defaults: Mapping[str, Any]) -> Optimizer:
    """Build an optimizer of class `kind` over `groups`, to check the arguments and get the defaults. It is never
    stepped."""

    def build(make: Callable[[Tensor], Tensor]) -> Optimizer:
        given = [
            {**{k: v for k, v in group.items() if k != "param_names"}, "params": [make(p) for p in group["params"]]}
            for group in groups
        ]
        return kind(given, **defaults)

    def on_meta(param: Tensor) -> Tensor:
        return torch.empty_like(param, device="meta").requires_grad_(param.requires_grad)

    try:
        return build(on_meta)  # Adagrad allocates state when it is built
    except Exception:  # wrong arguments raise again
        return build(lambda param: param)


def _read_offload(offload: Mapping[str, Any]) -> Config:
    """Convert `offload`, the argument of `OffloadedOptimizer`, to a config. Raises ConfigError."""
    if not isinstance(offload, Mapping):
        raise ConfigError(
            f'offload: expected a mapping such as {{"device": "nvme", "nvme_path": "/path"}}; found {offload!r}.'
        )
    if unknown := [name for name in offload if name not in (*_SECTION, *_RUNTIME)]:
        raise ConfigError(f"offload: expected keys among {[*_SECTION, *_RUNTIME]}; found {unknown[0]!r}. Correct it.")
    if offload.get("device") not in ("cpu", "nvme"):
        raise ConfigError(
            f'offload["device"]: expected "cpu" or "nvme"; found {offload.get("device")!r}. Take the plain optimizer '
            "to keep state where the parameters are."
        )
    config = load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {
                    "pin_memory": True,
                    **{name: offload[name] for name in _SECTION if name in offload},
                },
            },
            "tiered_zero": {"update": "barrier", **{name: offload[name] for name in _RUNTIME if name in offload}},
        }
    )
    if config.tiered_zero.state_format == "bf16_remainder":
        raise ConfigError(
            'offload["state_format"]: expected fp32, lossy_bf16_moments or lossy_8bit_moments; found bf16_remainder, '
            "whose masters are half in the parameters, which a loop may change unseen. Take fp32."
        )
    return config


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    """Holds the objects that an offloaded optimizer uses while its tiers are open. `resources`: closes these objects.
    `watch`: raises if the user has changed param groups in a way that the run cannot follow."""

    params: UserParameters
    units: Sequence[Unit]
    """The units, in the order of the parameters. A parameter without elements has no unit."""
    plan: Plan
    runtime: Runtime
    policy: BarrierPolicy
    watch: ParamGroupWatch
    resources: Teardown


def _open_run(source: Optimizer, owner: Optimizer, config: Config) -> _Run:
    """Plan and allocate the tiers for the state of `owner.param_groups`. `source`: a plain optimizer; its class decides
    the update rule. Raises ConfigError, ModelError, PlanError or StoreError, and then keeps nothing allocated."""
    groups = owner.param_groups
    params = UserParameters(groups)
    threads = num_kernel_threads(shares_cores=params.device.type == "cpu")
    rule = make_rule(source, config.tiered_zero.state_format, num_threads=threads)
    layouts = _lay_out(params, rule, groups, config)
    plan = _plan(params, layouts, config)
    offload = config.zero_optimization.offload_optimizer
    keys = {offload.nvme_paths: "offload.nvme_path"} if offload.device == "nvme" else {}
    for line in (*check_directories(keys), *clear_directories(keys)):
        logger.warning("%s", line)
    with Teardown(SHUTDOWN) as resources:
        accelerator = build_accelerator(str(params.device))
        runtime = open_runtime(plan, rule, accelerator, Collectives(), resources)
        params.connect(accelerator)
        name = type(source).__name__
        machine = open_machine(config, plan, runtime, layouts, resources, model_name=name)
        by_index = {s.unit.index: s.unit for layout in layouts for s in layout.subgroup.segments}
        units = [unit for _, unit in sorted(by_index.items())]
        named = {spec.name: param for param, (spec, _) in zip(params.params, params.specs, strict=True)}
        shards = ParamShards(Collectives(), units, frozenset(named), is_sharded=False)
        staging = machine.tiers.state_staging
        view = StateView(layouts, rule, machine.inventory, staging, groups, named, shards)  # type: ignore[arg-type]
        pipeline = UpdatePipeline(view, runtime, params)
        resources.add("prefetch", pipeline.cancel_prefetch)
        return _Run(
            params=params,
            units=units,
            plan=plan,
            runtime=runtime,
            policy=BarrierPolicy(pipeline, None),
            watch=ParamGroupWatch([owner]),
            resources=resources,
        )


def _plan(params: UserParameters, layouts: Sequence[StateLayout], config: Config) -> Plan:
    """Plan the tiers within this process's share of host memory. Raises PlanError."""
    staged = [params.staged(layout.subgroup.segments) for layout in layouts]
    in_buffers = [
        SubGroupSize(state_nbytes=layout.nbytes, parts={segment.unit.index: segment.numel for segment in segments})
        for layout, segments in zip(layouts, staged, strict=True)
    ]
    free = available_host_nbytes() // local_world_size()
    source = "this process's share of the free memory of the machine and its cgroup"
    limits = limit_of("host", free, source, config.tiered_zero.host_memory_limit, prefix="")
    request = PlanRequest(config=config, limits=limits, shares_cores=params.device.type == "cpu")
    units = {segment.unit.index: segment.unit for segments in staged for segment in segments}
    plan = make_plan(list(units.values()), in_buffers, request)
    plan.check()
    return plan


def _lay_out(
    params: UserParameters, rule: UpdateRule, groups: Sequence[Mapping[str, Any]], config: Config
) -> list[StateLayout]:
    """Return the layout of each sub-group's state. fp32 parameters are their own masters. 16-bit parameters have
    masters on the tier, and sub-groups of their own."""
    streams = config.zero_optimization.offload_optimizer.device == "nvme" or not params.are_in_place
    size = AUTO_SUB_GROUP_NUMEL if streams else _IN_PLACE_NUMEL
    layouts: list[StateLayout] = []
    for masters, is_full in ((ParamMasters(), True), (FollowingMasters(), False)):
        alike = [(spec, group) for spec, group in params.specs if (spec.dtype == torch.float32) == is_full]
        subgroups: list[SubGroup] = pack_params(alike, size, elementwise=rule.elementwise, first_index=len(layouts))
        layouts += [StateLayout(subgroup, rule, groups, masters) for subgroup in subgroups]
        if alike and not is_full:
            logger.warning(
                "%d 16-bit parameters get fp32 master weights in addition to their state: 4 bytes for each element",
                len(alike),
            )
    return layouts
