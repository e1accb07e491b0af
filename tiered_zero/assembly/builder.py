"""Build an engine from a run on paper: open the machine, join the engine, and last of all place the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tiered_zero.assembly.homes import make_commits
from tiered_zero.assembly.machine import Machine, find_source, nvme_paths, open_machine, open_runtime
from tiered_zero.assembly.model import ModelParts, make_model_parts, place_model
from tiered_zero.assembly.notices import planning_notices
from tiered_zero.assembly.parts import make_observers
from tiered_zero.assembly.run_spec import RunSpec
from tiered_zero.checkpoint.checkpoints import Checkpoints, check_async
from tiered_zero.checkpoint.driver import DriverState
from tiered_zero.checkpoint.save import written_by
from tiered_zero.concurrency.interrupts import INTERRUPTS
from tiered_zero.concurrency.teardown import Teardown, once
from tiered_zero.data import TrainingLoader
from tiered_zero.engine.calls import EngineParts
from tiered_zero.engine.engine import Engine
from tiered_zero.engine.full_values import FullValues
from tiered_zero.errors import PlanError, add_note
from tiered_zero.hardware.memory.host_memory import trim_malloc
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.plan.planner import Plan
from tiered_zero.store.directory import make_missing
from tiered_zero.telemetry.report import StepReport
from tiered_zero.update.handle import TieredOptimizer, make_scheduler, restored_on_error

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
    "activations",
    "pager",  # parameters on the device get memory of their own
    "tiers",
    "rule",
    "ranks",  # the others are waited for, seconds at most
    "interrupts",  # Python's own handler is back, if this was the last engine
)
"""What ends a run, in this order; a start that fails ends what it has built in the same order."""


_BUILD_ANEW = "initialize() had begun to move the model's parameters or to load them: build the model anew."


def build(
    run_spec: RunSpec, lr_scheduler: Any, collectives: Collectives, loader: TrainingLoader | None = None
) -> Engine:
    """Allocate what the plan says, join the parts, and give every parameter its home. On failure nothing is left
    behind; the model is as it was, unless the error has a note. `loader`: the one whose position checkpoints hold.
    """
    _check_plan(run_spec.plan, collectives)
    check_async(run_spec.config, run_spec.plan)
    make_missing(nvme_paths(run_spec.config))
    source = find_source(run_spec, collectives)
    for line in source.found.lines if source.found is not None else ():
        logger.warning("%s", line)
    with restored_on_error(run_spec.source.param_groups), Teardown(SHUTDOWN) as resources:
        INTERRUPTS.keep(resources)
        resources.add("interrupts", partial(INTERRUPTS.drop, resources))
        handle = TieredOptimizer(run_spec.source) if run_spec.trains else None
        scheduler = make_scheduler(lr_scheduler, run_spec.config.scheduler, handle)
        runtime = open_runtime(run_spec, collectives, resources)
        _announce(run_spec, source.warnings, collectives)
        observers = make_observers(run_spec, runtime, resources)  # a file that cannot be made costs no model
        machine = open_machine(run_spec, runtime, source, resources)
        parts = make_model_parts(run_spec, machine, source, handle, resources)
        own_state = run_spec.source.state  # the handle hides it once it is connected
        engine, begin = _join(run_spec, machine, parts, scheduler, loader, observers, resources)
        has_begun = False

        def place() -> None:
            nonlocal has_begun
            INTERRUPTS.check()
            has_begun = True
            place_model(run_spec, machine, parts, own_state, resources)

        try:
            begin(place)
            machine.runtime.recorder.take_spans()  # of the start of the run, which no trace shows
            trim_malloc()
            parts.step.meter.begin()
            INTERRUPTS.check()  # what comes now is undone no more
        except BaseException as error:
            if has_begun:
                add_note(error, _BUILD_ANEW)
            raise
        if handle is not None:
            own_state.clear()  # the optimizer has it again when the engine ends
    return engine


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


def _announce(run_spec: RunSpec, warnings: Sequence[str], collectives: Collectives) -> None:
    """Say on rank 0 what a user should know before the run starts, a line each."""
    if collectives.rank == 0:
        for line in (*run_spec.config.notices, *warnings, *planning_notices(run_spec)):
            logger.warning("%s", line)
        if run_spec.trains:
            run_spec.rule.announce()
    if not run_spec.trains:
        logger.warning("There is no optimizer: this engine evaluates, and does not train.")
    if collectives.rank == 0:
        logger.info("%s", run_spec.plan.update_policy.text)


def _join(
    run_spec: RunSpec,
    machine: Machine,
    parts: ModelParts,
    scheduler: Any,
    loader: TrainingLoader | None,
    observers: Sequence[Callable[[StepReport], None]],
    resources: Teardown,
) -> tuple[Engine, Callable[[Callable[[], None]], None]]:
    """Make the engine of what was built. Also returns what begins the run by placing the model: it first checks the
    checkpoint that was found, and then resumes it."""
    config, step, handle, source = run_spec.config, parts.step, parts.handle, parts.source
    values = FullValues(
        events=step.param_events, view=parts.run_state.view, state=parts.state, groups=run_spec.source.param_groups
    )
    resources.add("full values", values.unregister)  # `values` lives as long as `resources` refer to it
    values.register()
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
        parts.run_state,
        step.policy,
        parts.whole,
        driver,
        written_by(run_spec.rule, config, machine.runtime),
        config=config,
        commits=make_commits(run_spec, machine.tiers, parts.run_state, parts.copies),
    )
    resources.add("saves", once(checkpoints.async_save.wait))
    run = EngineParts(
        module=run_spec.model,
        config=config,
        plan=run_spec.plan,
        optimizer=handle,
        lr_scheduler=scheduler,
        observers=observers,
        checkpoints=checkpoints,
    )
    engine = Engine(run, step, resources)
    if handle is not None:
        handle.connect(engine, parts.state, step.policy, partial(resources.add, "optimizer"))
    if source.adoption is not None and parts.adopted is not None:
        return engine, partial(checkpoints.adopt, source.adoption, parts.adopted)
    if source.found is not None:
        return engine, partial(checkpoints.resume, source.found)
    return engine, lambda place: place()
