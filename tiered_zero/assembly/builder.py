"""From a run on paper to an engine: the one file that knows every concrete class but those of rules."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch

from tiered_zero.assembly.disk_space import check_disk_space
from tiered_zero.assembly.homes import make_commits, make_copies, place_homes
from tiered_zero.assembly.parts import make_gradients, make_observers, make_policy, whole_weights
from tiered_zero.assembly.run_spec import RunSpec, planning_notices
from tiered_zero.checkpoint.capture import written_by
from tiered_zero.checkpoint.checkpoints import Checkpoints, check_async
from tiered_zero.checkpoint.driver import DriverState
from tiered_zero.checkpoint.portable import RunState
from tiered_zero.checkpoint.ranks import find_together
from tiered_zero.checkpoint.resume import AdoptedValues, adopt, find_checkpoint
from tiered_zero.concurrency.interrupts import INTERRUPTS
from tiered_zero.concurrency.teardown import Teardown, once
from tiered_zero.config.schema import Config
from tiered_zero.data import TrainingLoader
from tiered_zero.engine.calls import Run
from tiered_zero.engine.engine import Engine
from tiered_zero.engine.full_values import FullValues
from tiered_zero.engine.recovery import Movers
from tiered_zero.engine.train_step import TrainStep
from tiered_zero.errors import PlanError
from tiered_zero.grads.overflow import OverflowGuard
from tiered_zero.hardware.device.select import build_accelerator
from tiered_zero.hardware.memory.host_memory import trim_malloc
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.io.preflight import preflight_directory
from tiered_zero.layout.flat import Unit
from tiered_zero.params.driver_thread import CallPhase
from tiered_zero.params.hooks import ModuleHooks
from tiered_zero.params.materialize import Materializer, UnitPlacer, WeightFiles, materialize_model
from tiered_zero.params.offloaded_params import OffloadedParams
from tiered_zero.params.pager import Pager
from tiered_zero.params.pass_scope import PassScope
from tiered_zero.params.visible_gradients import VisibleGradients
from tiered_zero.plan.planner import Plan
from tiered_zero.store.new_parents import make_missing
from tiered_zero.store.runs import leftover_notices
from tiered_zero.telemetry.ledger import Ledger
from tiered_zero.tiers.rack import TierRack, nvme_needs
from tiered_zero.update.handle import ParamGroupWatch, TieredOptimizer, make_scheduler, restored_on_error
from tiered_zero.update.masters import Masters
from tiered_zero.update.optimizer_state import OptimizerState
from tiered_zero.update.param_shards import ParamShards
from tiered_zero.update.places import UnitParameters
from tiered_zero.update.stepper import StreamingStepper

logger = logging.getLogger("tiered_zero")

SHUTDOWN = (
    "optimizer",  # the user's own has its calls and its state again
    "saves",  # the last is finished: of its update everything is needed
    "open update",  # one that began in backward, and whose step is not taken, is cancelled
    "last update",  # the last step's is finished, as far as its results outlive the engine
    "observers",  # the run's record is completed
    "lanes",  # threads end before the memory that they use is freed
    "full values",  # `full_values_of` does not find this run any more
    "prefetch",  # state that was read ahead is dropped
    "hooks",
    "param.grad",
    "gradients",
    "pager",  # parameters on the device get memory of their own
    "tiers",
    "rule",
    "ranks",  # the others are waited for, seconds at most
    "interrupts",  # Python's own handler is back, if this was the last engine
)
"""What ends a run, in this order; a start that fails ends what it has built in the same order."""


def build(
    run_spec: RunSpec, lr_scheduler: Any, collectives: Collectives, loader: TrainingLoader | None = None
) -> Engine:
    """Allocate what the plan says, give every parameter its home, and join the parts. On failure nothing is left
    behind. `loader`: the one whose position checkpoints hold.
    """
    _check_plan(run_spec.plan, collectives)
    check_async(run_spec.config, run_spec.plan)
    with make_missing(_nvme_paths(run_spec.config)):
        return _build(run_spec, lr_scheduler, collectives, loader)


def _check_plan(plan: Plan, ranks: Collectives) -> None:
    """Raise PlanError where a tier of any rank is too small: on every rank the table of the first such rank."""
    if ranks.world_size == 1:
        plan.check()
        return
    own = ""
    try:
        plan.check()
    except PlanError as error:
        own = str(error)
    for rank, text in enumerate(ranks.exchange(own.encode(), "the limits of the plan")):
        if text:
            raise PlanError(f"Rank {rank}: {text.decode()}")


def _build(run_spec: RunSpec, lr_scheduler: Any, collectives: Collectives, loader: TrainingLoader | None) -> Engine:
    config, plan = run_spec.config, run_spec.plan
    warnings = [
        w
        for path in sorted({path for paths in _nvme_paths(config) for path in paths})
        for w in preflight_directory(path)
    ]
    resume = config.tiered_zero.checkpoint.resume
    found = None if resume is None else find_together(collectives, resume, partial(find_checkpoint, resume))
    for line in found.lines if found is not None else ():
        logger.warning("%s", line)
    adoption = None if found is None else adopt(found, collectives, config, plan, run_spec.slots, run_spec.layouts)
    taken_over = {} if adoption is None else adoption.directories
    if collectives.rank == 0:
        warnings += leftover_notices(path for paths in _nvme_paths(config) for path in paths)
    needs = {paths: nbytes for paths, nbytes in nvme_needs(config, plan).items() if paths not in taken_over}
    check_disk_space(needs, collectives)
    weights = WeightFiles(config.tiered_zero.weights) if config.tiered_zero.weights else None
    if weights is not None:
        warnings += weights.check(run_spec.model, run_spec.specs)
    with restored_on_error(run_spec.source.param_groups), Teardown(SHUTDOWN) as resources:
        INTERRUPTS.keep(resources)
        resources.add("interrupts", partial(INTERRUPTS.drop, resources))
        handle = TieredOptimizer(run_spec.source) if run_spec.trains else None
        scheduler = make_scheduler(lr_scheduler, config.scheduler, handle)
        ledger = Ledger({tier: limit for tier, (limit, _) in plan.limits.items()})
        settings = config.tiered_zero
        accelerator = build_accelerator(settings.device, settings.debug_poison, settings.debug_delay_seed)
        resources.add("lanes", accelerator.close)
        for lane in ("gather", "reduce", "update"):
            accelerator.lane(lane)  # a thread that cannot be started fails here, not in mid-run
        resources.add("ranks", collectives.close)
        recorder = collectives.recorder
        runtime = Runtime(accelerator=accelerator, ledger=ledger, recorder=recorder, collectives=collectives)
        for line in (*config.notices, *warnings, *planning_notices(run_spec)) if collectives.rank == 0 else ():
            logger.warning("%s", line)
        resources.add("rule", run_spec.rule.close)
        torch.ones(1).sqrt()  # MKL's first square root is not safe among threads (pytorch#188792): take it alone
        if run_spec.trains:
            if collectives.rank == 0:
                run_spec.rule.announce()
        else:
            logger.warning("There is no optimizer: this engine evaluates, and does not train.")
        if collectives.rank == 0:
            logger.info("%s", plan.update_policy.text)
        tier_resources = Teardown()
        resources.add("tiers", tier_resources.close)
        name = type(run_spec.model).__name__
        tiers = TierRack(config, plan, runtime, tier_resources, model_name=name, adopted=taken_over)
        inventory, copy_homes = place_homes(run_spec, tiers)
        masters = Masters(run_spec.layouts, inventory, tiers.state_staging)
        cuts = masters.cuts if masters.need_params else None
        offloaded_params = OffloadedParams(inventory, tiers.param_staging, masters.follow, cuts, collectives)
        pager = Pager(
            runtime,
            inventory,
            offloaded_params,
            plan.pager_limits,
            CallPhase(),
            lambda: step.arrivals.notice_backward(),
        )
        resources.add("pager", pager.close)
        overflow = OverflowGuard.from_config(config)
        gradients, reducer = make_gradients(run_spec, tiers, inventory, runtime, overflow)
        resources.add("gradients", gradients.close)
        if reducer is not None:
            resources.add("gradients", reducer.close)
        visible_gradients = VisibleGradients(gradients, collectives.world_size)
        resources.add("param.grad", visible_gradients.close)

        def flat_of(unit: Unit) -> torch.Tensor:
            return pager.storage(unit).flat

        params = UnitParameters(inventory, runtime, flat_of)
        stepper = StreamingStepper(run_spec.layouts, run_spec.rule, inventory, runtime, tiers.state_staging, params)
        whole = whole_weights(run_spec, runtime, pager)
        policy = make_policy(run_spec, stepper, inventory, runtime, whole, gradients)
        resources.add("prefetch", stepper.cancel_prefetch)

        def drain() -> None:
            accelerator.synchronize()
            stepper.wait_held()  # a save beside training leases buffers
            tiers.drain()

        step = TrainStep(
            Movers(
                pager=pager,
                scope=PassScope(run_spec.model, pager, run_spec.trains),
                gradients=gradients,
                visible_gradients=visible_gradients,
                reducer=reducer,
                policy=policy,
                groups=ParamGroupWatch([handle, run_spec.source] if handle is not None else []),
                runtime=runtime,
                drain=drain,
            ),
            config,
            plan.update_policy,
            trains=run_spec.trains,
            overflow=overflow,
        )
        portable = RunState(
            module=run_spec.model,
            specs=list(run_spec.specs.values()),
            units=run_spec.units,
            layouts=run_spec.layouts,
            trained=run_spec.trained,
            is_sharded=plan.request.ranks.shards_state,
            rule=run_spec.rule,
            stepper=stepper,
            inventory=inventory,
            runtime=runtime,
            state_staging=tiers.state_staging,
            param_staging=tiers.param_staging,
            param_flat=flat_of,
        )
        copies = make_copies(run_spec, copy_homes, portable)
        adopted = AdoptedValues(state=portable, masters=masters, copies=copies) if adoption and copies else None
        materializer = Materializer(run_spec.model, weights, run_spec.specs)
        resumed = None if adopted is None else adopted.flat
        placer = UnitPlacer(pager=pager, handler=step, store_masters=masters.store, ranks=collectives, resumed=resumed)
        named = {spec.name: param for param, spec in run_spec.specs.items()}
        shards_state = plan.request.ranks.shards_state
        shards = ParamShards(collectives, run_spec.units, run_spec.trained, is_sharded=shards_state)
        state = OptimizerState(named, run_spec.layouts, run_spec.rule, stepper, inventory, tiers.state_staging, shards)
        if adoption is None:
            state.check(run_spec.source.state, run_spec.source.param_groups)
        materialize_model(materializer, run_spec.units, run_spec.params_of, placer)
        materializer.move_buffers(accelerator.device, collectives)
        trainable = [unit for unit in run_spec.units if unit.trainable]
        visible_gradients.open([param for unit in trainable for param in run_spec.params_of(unit)])
        hooks = ModuleHooks(run_spec.model, run_spec.units, step)
        resources.add("hooks", hooks.remove)
        hooks.install()
        if adoption is not None and any(run_spec.source.state.values()):
            logger.warning("the optimizer's own state is left out: the run goes on with what was committed")
        if adoption is None:
            state.write(run_spec.source.state, run_spec.source.param_groups)
        values = FullValues(step=step, masters=masters, state=state, groups=run_spec.source.param_groups)
        resources.add("full values", values.unregister)  # `values` lives as long as `resources` refer to it
        values.register()
        driver = DriverState(
            counts=step.counts,
            overflow=step.overflow,
            policy=policy,
            optimizer=handle,
            lr_scheduler=scheduler,
            loader=loader,
            module=run_spec.model,
        )
        checkpoints = Checkpoints(
            portable,
            policy,
            whole,
            driver,
            written_by(run_spec.rule, config, collectives.world_size),
            config=config,
            commits=make_commits(run_spec, tiers, portable, copies),
        )
        resources.add("saves", once(checkpoints.last_save.wait))
        run = Run(
            module=run_spec.model,
            config=config,
            plan=plan,
            optimizer=handle,
            lr_scheduler=scheduler,
            observers=make_observers(run_spec, runtime, resources),
            checkpoints=checkpoints,
        )
        resources.add("last update", once(step.finish_update))
        resources.add("last update", stepper.end)  # before it
        resources.add("open update", step.end_eager_update)
        engine = Engine(run, step, resources)
        own_state = run_spec.source.state
        if handle is not None:
            handle.connect(engine, state, policy, partial(resources.add, "optimizer"))
        if adoption is not None and adopted is not None:
            checkpoints.adopt(adoption, adopted)
        elif found is not None:
            checkpoints.resume(found)
        INTERRUPTS.check()  # what comes now is undone no more
        if handle is not None:
            own_state.clear()  # the optimizer has it again when the engine ends
    trim_malloc()
    return engine


def _nvme_paths(config: Config) -> list[tuple[str, ...]]:
    zero = config.zero_optimization
    return [part.nvme_paths for part in (zero.offload_param, zero.offload_optimizer) if part.device == "nvme"]
