"""Build an engine from a run's specification: open device and files, make the objects that move bytes, place the
model."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tiered_zero.activations.mover import ActivationMover, HostPlace, NvmePlace, Place
from tiered_zero.assembly.choice import predicted_seconds, save_choice
from tiered_zero.assembly.open_machine import SHUTDOWN, OpenMachine, Source, find_source, open_machine, open_runtime
from tiered_zero.assembly.spec import RunSpec, planning_notices
from tiered_zero.checkpoint.checkpoints import Checkpoints, check_async
from tiered_zero.checkpoint.driver import DriverState
from tiered_zero.checkpoint.in_place import Commits, run_fingerprint
from tiered_zero.checkpoint.index import RunState
from tiered_zero.checkpoint.save import written_by
from tiered_zero.concurrency.interrupts import Teardown, once
from tiered_zero.config.schema import Config, SchedulerSection
from tiered_zero.data import TrainingLoader
from tiered_zero.engine.engine import Engine
from tiered_zero.engine.entry import EngineParts, ModelParameters, Movers
from tiered_zero.engine.train_step import TrainStep
from tiered_zero.errors import ConfigError, add_note
from tiered_zero.grads.check import OverflowGuard
from tiered_zero.grads.gradient import InFlightGradients, UnitGradients
from tiered_zero.grads.reduce import GradientReducer, Reduction
from tiered_zero.grads.store import GradientStore
from tiered_zero.hardware.memory.host_memory import trim_malloc
from tiered_zero.hardware.ranks.collectives import Collectives, agree
from tiered_zero.hardware.runtime import Runtime, build_accelerator
from tiered_zero.layout.buckets import Bucket, cut_buckets
from tiered_zero.layout.flat import Unit
from tiered_zero.native.norms import GradNorm
from tiered_zero.native.update import num_kernel_threads
from tiered_zero.plan.planner import Plan
from tiered_zero.plan.request import PlanRequest
from tiered_zero.rules.lr import build_scheduler
from tiered_zero.rules.native_rules import open_kernel
from tiered_zero.system import processor_name
from tiered_zero.telemetry.monitors import Monitors, Open, StepLog, csv_in, tensorboard_in, wandb_of
from tiered_zero.telemetry.report import StepReport
from tiered_zero.telemetry.runlog import RunHeader, RunObserver
from tiered_zero.tiers.step_gradients import FlatWindows
from tiered_zero.tiers.tier import own_bytes
from tiered_zero.unit.hooks import ModuleHooks
from tiered_zero.unit.materialize import Materializer, UnitPlacer, materialize_model
from tiered_zero.unit.offloaded import OffloadedParams
from tiered_zero.unit.pager import Pager, WholeWeights
from tiered_zero.update.handle import ParamGroupWatch, TieredOptimizer, restored_on_error
from tiered_zero.update.pipeline import UpdatePipeline
from tiered_zero.update.policy import (
    BarrierPolicy,
    DelayedPolicy,
    GatheringPolicy,
    OverlappedPolicy,
    UpdatePolicy,
)
from tiered_zero.update.state_view import ParamShards, StateView
from tiered_zero.update.subgroup_io import UnitParameters

logger = logging.getLogger("tiered_zero")

_BUILD_ANEW = "initialize() had begun to move the model's parameters or to load them: build the model anew."


def build(
    run_spec: RunSpec, lr_scheduler: Any, collectives: Collectives, loader: TrainingLoader | None = None
) -> Engine:
    """Allocate what the plan says, make the engine, and move every parameter to its home. If this raises, everything is
    freed. The model is then unchanged, unless a note on the error says to build the model anew. `loader`: checkpoints
    save its position."""
    agree(collectives, "the limits of the plan", run_spec.plan.check)
    check_async(run_spec.config, run_spec.plan)
    source = find_source(run_spec, collectives)
    for line in source.found.lines if source.found is not None else ():
        logger.warning("%s", line)
    with restored_on_error(run_spec.source.param_groups), Teardown(SHUTDOWN) as resources:
        handle = TieredOptimizer(run_spec.source) if run_spec.trains else None
        scheduler = _make_scheduler(lr_scheduler, run_spec.config.scheduler, handle)
        runtime = _open_runtime(run_spec, collectives, resources)
        _announce(run_spec, source.warnings, collectives)
        observers = _make_observers(run_spec, runtime, resources)  # a file that cannot be made costs no model
        machine = open_machine(
            run_spec.config,
            run_spec.plan,
            runtime,
            run_spec.layouts,
            resources,
            model_name=type(run_spec.model).__name__,
            adopted=source.directories,
        )
        step, state = _make_step(run_spec, machine, handle, resources)
        commits = _make_commits(run_spec, machine, state)
        if source.adoption is None:
            state.view.check(run_spec.source.state, run_spec.source.param_groups)
        driver = DriverState(
            counts=step.counts,
            overflow=step.overflow,
            policy=step.policy,
            optimizer=handle,
            lr_scheduler=scheduler,
            loader=loader,
            module=run_spec.model,
        )
        checkpoints = Checkpoints(
            state,
            step.policy,
            driver,
            written_by(run_spec.rule, run_spec.config, runtime),
            config=run_spec.config,
            commits=commits,
        )
        resources.add("saves", once(checkpoints.async_save.wait))
        run = EngineParts(
            module=run_spec.model,
            config=run_spec.config,
            plan=run_spec.plan,
            optimizer=handle,
            observers=observers,
            checkpoints=checkpoints,
        )
        engine = Engine(run, step, resources)
        own_state = run_spec.source.state  # the handle hides it once it is connected
        if handle is not None:
            handle.connect(engine, step.policy, partial(resources.add, "optimizer"))
        has_begun = False

        def place() -> None:
            nonlocal has_begun
            has_begun = True
            _place_model(run_spec, source, step, commits, own_state, resources)

        try:
            if source.found is not None:
                checkpoints.resume(source.found, source.adoption, place)
            else:
                place()
            runtime.recorder.take_spans()  # drop the spans of the start: no trace shows them
            trim_malloc()
            step.meter.begin()
        except BaseException as error:
            if has_begun:
                add_note(error, _BUILD_ANEW)
            raise
        if handle is not None:
            own_state.clear()  # the optimizer has it again when the engine ends
    return engine


def _announce(run_spec: RunSpec, warnings: Sequence[str], collectives: Collectives) -> None:
    """Log what a user should know before the run starts, most of it on rank 0 only. Also save the config that placement
    "auto" chose."""
    if collectives.rank == 0:
        for line in (*run_spec.config.notices, *warnings, *save_choice(run_spec), *planning_notices(run_spec)):
            logger.warning("%s", line)
        if run_spec.trains:
            run_spec.rule.announce()
    if not run_spec.trains:
        logger.warning("There is no optimizer: this engine evaluates, and does not train.")
    if collectives.rank == 0:
        logger.info("%s", run_spec.plan.update_policy.text)


def _open_runtime(run_spec: RunSpec, collectives: Collectives, resources: Teardown) -> Runtime:
    """Open the device and the runtime, and start the threads of the lanes."""
    settings, plan = run_spec.config.tiered_zero, run_spec.plan
    accelerator = build_accelerator(settings.device, settings.debug_poison, settings.debug_delay_seed)
    runtime = open_runtime(plan, run_spec.rule, accelerator, collectives, resources)
    for lane in ("fetch", "reduce", "update", *(["activations"] if plan.activations is not None else [])):
        accelerator.lane(lane)  # a thread that cannot be started fails here, not in mid-run
    return runtime


def _make_scheduler(given: Any, section: SchedulerSection | None, handle: TieredOptimizer | None) -> Any:
    """Return the run's learning rate scheduler, or None. `given`: the user's scheduler, or a callable that makes one
    from the optimizer; None: build the scheduler that `section` of the config names. `handle`: the optimizer; None if
    the run does not train. Raises ConfigError."""
    if handle is None:
        if given is not None:
            raise ConfigError(
                "lr_scheduler needs an optimizer, and there is none. Pass one to initialize(optimizer=...), or leave "
                "lr_scheduler out to evaluate."
            )
        return None
    if given is None:
        return build_scheduler(section, handle) if section else None
    scheduler = given(handle) if callable(given) else given
    handle.check_scheduler(scheduler)
    if section is not None:
        logger.warning("config: scheduler %s is not used, for initialize() was given an lr_scheduler", section.type)
    return scheduler


def _place_model(
    run_spec: RunSpec,
    source: Source,
    step: TrainStep,
    commits: Commits | None,
    own_state: Mapping[Any, Any],
    resources: Teardown,
) -> None:
    """Move every parameter with its first value to its home, and install the module hooks. `commits`: gives the values
    if the run adopts a commit. `own_state`: state that the user's optimizer already has; copied to the tiers unless a
    commit is adopted. If this raises, the model must be built anew."""
    runtime, view = step.runtime, step.policy.view
    materializer = Materializer(run_spec.model, source.weights, run_spec.specs)
    placer = UnitPlacer(
        pager=step.pager,
        events=step,
        store_masters=view.store_masters,
        ranks=runtime.collectives,
        resumed=None if commits is None or source.adoption is None else commits.copies.committed,
    )
    materialize_model(materializer, run_spec.units, run_spec.params_of, placer)
    materializer.move_buffers(runtime.accelerator.device, runtime.collectives)
    step.gradients.serve()
    hooks = ModuleHooks(run_spec.model, run_spec.units, step)
    resources.add("hooks", hooks.remove)
    hooks.install()
    if source.adoption is None:
        view.write(own_state)
    elif any(own_state.values()):
        logger.warning("the optimizer's own state is left out: the run goes on with what was committed")


def _make_step(
    run_spec: RunSpec, machine: OpenMachine, handle: TieredOptimizer | None, resources: Teardown
) -> tuple[TrainStep, RunState]:
    """Build the objects that move bytes, and the `TrainStep` that calls them. Return the `TrainStep`, and the
    `RunState` that saves and loads use."""
    config, plan = run_spec.config, run_spec.plan
    runtime, tiers, inventory = machine.runtime, machine.tiers, machine.inventory
    is_sharded, groups = plan.request.shards_state, run_spec.source.param_groups
    shards = ParamShards(runtime.collectives, run_spec.units, run_spec.trained, is_sharded=is_sharded)
    named = {spec.name: param for param, spec in run_spec.specs.items()}
    view = StateView(run_spec.layouts, run_spec.rule, inventory, tiers.state_staging, groups, named, shards)
    cuts = view.cuts if view.need_params else None
    offloaded_params = OffloadedParams(inventory, tiers.param_staging, runtime, view.follow, cuts)
    activations = _make_activations(run_spec, machine, resources)
    pager = Pager(runtime, inventory, offloaded_params, plan.pager_limits, activations)
    resources.add("pager", pager.close)
    overflow = OverflowGuard.from_config(config)
    gradients, reducer = _make_gradients(run_spec, machine, overflow)
    resources.add("gradients", gradients.close)
    if reducer is not None:
        resources.add("gradients", reducer.close)
    params = UnitParameters(inventory, runtime, lambda unit: pager.storage(unit).flat)
    pipeline = UpdatePipeline(view, runtime, params, _paged_gradients(plan))
    whole = _make_whole(run_spec, runtime, pager)
    policy = _make_policy(run_spec, pipeline, pager, whole, gradients)
    resources.add("prefetch", pipeline.cancel_prefetch)

    def drain() -> None:
        runtime.accelerator.synchronize()
        pipeline.wait_held()  # an asynchronous save leases buffers
        tiers.drain()

    step = TrainStep(
        Movers(
            pager=pager,
            parameters=ModelParameters(run_spec.model, run_spec.trains),
            gradients=gradients,
            reducer=reducer,
            policy=policy,
            groups=ParamGroupWatch([handle, run_spec.source] if handle is not None else []),
            activations=activations,
            runtime=runtime,
            drain=drain,
            reclaim=tiers.reclaim,
        ),
        config,
        plan.update_policy,
        trains=run_spec.trains,
        overflow=overflow,
    )
    resources.add("last update", once(step.finish_update))
    resources.add("open update", step.end_eager_update)
    state = RunState(
        module=run_spec.model,
        specs=list(run_spec.specs.values()),
        units=run_spec.units,
        pipeline=pipeline,
        weights=whole,
        param_staging=tiers.param_staging,
    )
    return step, state


def _make_activations(run_spec: RunSpec, machine: OpenMachine, resources: Teardown) -> ActivationMover | None:
    """Make the mover of saved activations; None if they stay on the device."""
    tiers, runtime = machine.tiers, machine.runtime
    plan = run_spec.plan.activations
    if plan is None or not plan.nbytes:
        return None
    place: Place
    if "activation" in tiers.nvme and tiers.activation_staging is not None:
        tier, staging = tiers.nvme["activation"], tiers.activation_staging
        place = NvmePlace(tier, plan.nbytes, plan.in_flight_nbytes, staging, runtime)
    else:
        place = HostPlace(tiers.host, plan.nbytes, runtime)
    mover = ActivationMover(place, plan, runtime)
    resources.add("activations", mover.close)
    return mover


def _make_gradients(
    run_spec: RunSpec, machine: OpenMachine, overflow: OverflowGuard
) -> tuple[GradientStore, GradientReducer | None]:
    """Make the gradient store, with a home for every gradient, and the reducer; with one rank the reducer is None."""
    plan, tiers, runtime = run_spec.plan, machine.tiers, machine.runtime
    request = plan.request
    trained = [placed for placed in plan.tiers.units if placed.unit.trainable]
    trainable = [placed.unit for placed in trained]
    windows = None
    if tiers.gradient_windows is not None:
        in_backward = plan.update_policy.optimizer_in_backward
        windows = FlatWindows(tiers.gradient_windows, runtime.recorder, writes_ahead=not in_backward)
    cuts: dict[Unit, list[int]] = {}
    for layout in run_spec.layouts:
        for segment in layout.subgroup.segments:
            cuts.setdefault(segment.unit, []).append(segment.unit_start)
    units = [
        UnitGradients.reserve(
            placed.unit,
            tiers.tier(placed.gradient_tier, "gradient"),
            nbytes=placed.gradient_nbytes,
            dtype=torch.float32 if request.sums_gradients else placed.unit.dtype,
            has_spare=plan.delayed,
            shard=placed.unit.shard(request.rank) if request.shards_gradients else None,
            windows=windows,
            cuts=cuts.get(placed.unit, ()),
        )
        for placed in trained
    ]
    entries = {
        param: (unit, entry)
        for unit in trainable
        for param, entry in zip(run_spec.params_of(unit), unit.entries, strict=True)
    }
    threads = num_kernel_threads(shares_cores=request.shares_cores)
    norms = GradNorm(run_spec.rule.kernel or open_kernel(num_threads=threads))
    in_flight = InFlightGradients(runtime, plan.in_flight_nbytes, tiers.gradient_staging, norms)
    store = GradientStore(entries, units, machine.inventory, runtime, in_flight, norms, overflow)
    if runtime.collectives.world_size == 1:
        return store, None
    size = plan.staging.buckets
    tier = tiers.device if plan.staging.bucket_tier == "device" else tiers.host
    slots = [tier.reserve(f"bucket/{index}", size.nbytes, "bucket") for index in range(size.count)]
    memory = [own_bytes(slot)[: size.nbytes] for slot in slots]
    buckets = cut_buckets(trainable, request.world_size, request.bucket_numel)
    on_device = all(placed.gradient_tier == "device" for placed in trained)
    reduction = _make_reduction(run_spec.config, request, buckets, on_device=on_device)
    return store, GradientReducer(store, units, runtime, memory, reduction)


def _paged_gradients(plan: Plan) -> dict[Unit, torch.dtype]:
    """Map each unit whose gradients rest on NVMe to the dtype of these gradients."""
    return {
        placed.unit: torch.float32 if plan.request.sums_gradients else placed.unit.dtype
        for placed in plan.tiers.units
        if placed.gradient_tier == "nvme"
    }


def _make_reduction(config: Config, request: PlanRequest, buckets: Sequence[Bucket], *, on_device: bool) -> Reduction:
    """Return the settings with which ranks reduce gradients. As in DeepSpeed, gradients are divided by one number
    before the sum and by another after the sum. `on_device`: whether all gradients rest on the device."""
    factor, first = config.gradient_predivide_factor, config.prescale_gradients
    if first is None:
        first = factor == 1.0
    divisor = request.world_size if config.gradient_allreduce_op == "mean" else 1
    predivisor, postdivisor = (divisor, 1.0) if first else (factor, divisor / factor)
    name = config.communication_data_type
    dtype = None if name is None else {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    return Reduction(
        buckets=buckets,
        gathers=not request.shards_state,
        predivisor=predivisor,
        postdivisor=postdivisor,
        dtype=dtype,
        overlaps=request.shards_params or config.zero_optimization.overlap_comm is not False,
        shards_params=request.shards_params,
        in_backward=config.zero_optimization.overlap_comm is True and on_device and not request.shards_gradients,
    )


def _make_whole(run_spec: RunSpec, runtime: Runtime, pager: Pager) -> WholeWeights:
    units = [unit for unit in run_spec.units if any(entry.param.name in run_spec.trained for entry in unit.entries)]
    request = run_spec.plan.request
    is_sharded = request.shards_state and not request.shards_params
    return WholeWeights(runtime, pager, units if is_sharded else ())


def _make_policy(
    run_spec: RunSpec, pipeline: UpdatePipeline, pager: Pager, whole: WholeWeights, gradients: GradientStore
) -> UpdatePolicy:
    """Make the update policy that the plan has chosen. See [Note: State on several tiers]."""
    choice = run_spec.plan.update_policy
    if choice.policy == "barrier":
        if not whole.units:
            return BarrierPolicy(pipeline, pager)
        return GatheringPolicy(pipeline, pager, whole)
    if choice.policy == "delayed":
        return DelayedPolicy(pipeline, pager, run_spec.config.tiered_zero.delay_start_step)
    if choice.optimizer_in_backward:
        return OverlappedPolicy(pipeline, pager, gradients.freeze, gradients.keep)
    return OverlappedPolicy(pipeline, pager)


def _make_observers(run_spec: RunSpec, runtime: Runtime, resources: Teardown) -> list[Callable[[StepReport], None]]:
    """Make the functions that are called with each step's report. Ranks above 0 have none."""
    settings = run_spec.config.tiered_zero
    if runtime.collectives.rank > 0:
        return []
    config, groups = run_spec.config, run_spec.source.param_groups
    every = config.steps_per_print or (10 if config.wall_clock_breakdown else None)
    observers: list[Callable[[StepReport], None]] = []
    if every is not None:
        observers.append(StepLog(every, groups, config.wall_clock_breakdown))
    if chosen := _chosen_monitors(config):
        monitors = Monitors(chosen, groups, config.train_batch_size)
        resources.add("monitors", monitors.close)
        observers.append(monitors)
    if settings.report is None and settings.trace is None:
        return observers
    planned: dict[str, dict[str, int]] = {}
    meanings: dict[str, dict[str, str]] = {}
    for row in run_spec.plan.rows:
        planned.setdefault(row.tier, {})[row.kind] = row.nbytes
        meanings.setdefault(row.tier, {})[row.kind] = row.what
    num_parameters = sum(spec.numel for spec in run_spec.specs.values())
    facts = {
        "update": run_spec.plan.update_policy.policy,
        "device": str(runtime.accelerator.device),
        **{name: str(value) for name, value in written_by(run_spec.rule, config, runtime).items()},
        "python": platform.python_version(),
        "host": f"{platform.node()}: {processor_name()}, {os.cpu_count()} processors, Linux {platform.release()}",
    }
    header = RunHeader(
        model=type(run_spec.model).__name__,
        num_parameters=num_parameters,
        planned_nbytes=planned,
        meanings=meanings,
        facts=facts,
        config={row.path: json.dumps(row.value, default=str) for row in config.explain() if row.source != "default"},
        predicted=predicted_seconds(run_spec.config, run_spec.model, run_spec.plan),
    )
    observer = RunObserver(runtime.recorder, header, settings.report, settings.trace)
    resources.add("observers", observer.close)
    return [*observers, observer]


def _chosen_monitors(config: Config) -> dict[str, Open]:
    """Map each monitor that the config turns on to the function that opens its writer."""
    csv, board, wandb = config.csv_monitor, config.tensorboard, config.wandb
    openers = {
        "csv_monitor": (csv.enabled, csv_in(Path(csv.output_path, csv.job_name))),
        "tensorboard": (board.enabled, tensorboard_in(Path(board.output_path, board.job_name))),
        "wandb": (wandb.enabled, wandb_of(project=wandb.project, group=wandb.group, entity=wandb.team)),
    }
    return {name: open_writer for name, (is_on, open_writer) in openers.items() if is_on}


def _make_commits(run_spec: RunSpec, machine: OpenMachine, state: RunState) -> Commits | None:
    config, plan, tiers = run_spec.config, run_spec.plan, machine.tiers
    if not config.tiered_zero.checkpoint.in_place:
        return None
    found = [tiers.nvme["state"]] if plan.nbytes("nvme", "state") else []
    found += [tiers.nvme["param"]] if plan.nbytes("nvme", "commit_param") else []
    stores = [*dict.fromkeys(found)]
    return Commits(state, stores, machine.copy_homes, run_fingerprint(config, plan, run_spec.layouts))
