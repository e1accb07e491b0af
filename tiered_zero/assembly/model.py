"""Place a model on a machine: first the movers of its units; then, which changes the model, values and hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tiered_zero.assembly.homes import make_copies
from tiered_zero.assembly.machine import Machine, Source
from tiered_zero.assembly.parts import (
    WholeWeights,
    make_activations,
    make_gradients,
    make_policy,
    paged_gradients,
    whole_weights,
)
from tiered_zero.assembly.run_spec import RunSpec
from tiered_zero.checkpoint.in_place import AdoptedValues, DurableCopies
from tiered_zero.checkpoint.run_state import RunState
from tiered_zero.concurrency.teardown import Teardown, once
from tiered_zero.engine.recovery import Movers
from tiered_zero.engine.train_step import TrainStep
from tiered_zero.grads.overflow import OverflowGuard
from tiered_zero.layout.flat import Unit
from tiered_zero.params.driver_thread import CallPhase
from tiered_zero.params.hooks import ModuleHooks
from tiered_zero.params.materialize import Materializer, UnitPlacer, materialize_model
from tiered_zero.params.offloaded_params import OffloadedParams
from tiered_zero.params.pager import Pager
from tiered_zero.params.pass_scope import PassScope
from tiered_zero.params.visible_gradients import VisibleGradients
from tiered_zero.update.handle import ParamGroupWatch, TieredOptimizer
from tiered_zero.update.optimizer_state import OptimizerState
from tiered_zero.update.param_shards import ParamShards
from tiered_zero.update.places import UnitParameters
from tiered_zero.update.state_view import StateView
from tiered_zero.update.stepper import StreamingStepper

logger = logging.getLogger("tiered_zero")


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelParts:
    """What moves a model's parameters. `source`: of their values. `handle`: the optimizer that the user gets; None
    where the run evaluates. `copies`: durable ones, for commits in place; None without such commits. `adopted`: see
    `Source.adoption`."""

    source: Source
    handle: TieredOptimizer | None
    step: TrainStep
    whole: WholeWeights
    run_state: RunState
    state: OptimizerState
    copies: DurableCopies | None
    adopted: AdoptedValues | None


def make_model_parts(
    run_spec: RunSpec, machine: Machine, source: Source, handle: TieredOptimizer | None, resources: Teardown
) -> ModelParts:
    """Build the movers, and check the optimizer's state. The model stays as it is."""
    runtime, tiers, inventory = machine.runtime, machine.tiers, machine.inventory
    view = StateView(run_spec.layouts, run_spec.rule, inventory, tiers.state_staging)
    step, pager, stepper, whole = _make_step(run_spec, machine, view, handle, resources)
    run_state = RunState(
        module=run_spec.model,
        specs=list(run_spec.specs.values()),
        units=run_spec.units,
        view=view,
        trained=run_spec.trained,
        is_sharded=run_spec.plan.request.ranks.shards_state,
        stepper=stepper,
        inventory=inventory,
        runtime=runtime,
        param_staging=tiers.param_staging,
        param_flat=_flats(pager),
    )
    copies = make_copies(run_spec, machine.copy_homes, run_state)
    adopted = None
    if source.adoption is not None and copies is not None:
        adopted = AdoptedValues(state=run_state, copies=copies)
    state = _make_state(run_spec, machine, view)
    if source.adoption is None:
        state.check(run_spec.source.state, run_spec.source.param_groups)
    return ModelParts(
        source=source,
        handle=handle,
        step=step,
        whole=whole,
        run_state=run_state,
        state=state,
        copies=copies,
        adopted=adopted,
    )


def place_model(
    run_spec: RunSpec, machine: Machine, parts: ModelParts, own_state: Mapping[Any, Any], resources: Teardown
) -> None:
    """Give every parameter its home and its first value, and hook the modules. `own_state`: of the optimizer. Where
    this raises, the model is to be built anew."""
    step = parts.step
    _place_values(run_spec, machine, parts)
    trainable = [unit for unit in run_spec.units if unit.trainable]
    step.visible_gradients.open([param for unit in trainable for param in run_spec.params_of(unit)])
    hooks = ModuleHooks(run_spec.model, run_spec.units, step)
    resources.add("hooks", hooks.remove)
    hooks.install()
    if parts.source.adoption is None:
        parts.state.write(own_state, run_spec.source.param_groups)
    elif any(own_state.values()):
        logger.warning("the optimizer's own state is left out: the run goes on with what was committed")


def _make_step(
    run_spec: RunSpec, machine: Machine, view: StateView, handle: TieredOptimizer | None, resources: Teardown
) -> tuple[TrainStep, Pager, StreamingStepper, WholeWeights]:
    """Build the movers, and the object that orders them."""
    config, plan = run_spec.config, run_spec.plan
    runtime, tiers, inventory = machine.runtime, machine.tiers, machine.inventory
    cuts = view.cuts if view.need_params else None
    offloaded_params = OffloadedParams(inventory, tiers.param_staging, view.follow, cuts, runtime.collectives)
    activations = make_activations(run_spec, tiers, runtime, resources)
    pager = Pager(runtime, inventory, offloaded_params, plan.pager_limits, CallPhase(), activations)
    resources.add("pager", pager.close)
    overflow = OverflowGuard.from_config(config)
    gradients, reducer = make_gradients(run_spec, tiers, inventory, runtime, overflow)
    resources.add("gradients", gradients.close)
    if reducer is not None:
        resources.add("gradients", reducer.close)
    visible_gradients = VisibleGradients(gradients.param_grads, runtime.collectives.world_size)
    resources.add("param.grad", visible_gradients.close)
    params = UnitParameters(inventory, runtime, _flats(pager))
    stepper = StreamingStepper(view, runtime, params, paged_gradients(run_spec))
    whole = whole_weights(run_spec, runtime, pager)
    policy = make_policy(run_spec, stepper, inventory, runtime, whole, gradients)
    resources.add("prefetch", stepper.cancel_prefetch)

    def drain() -> None:
        runtime.accelerator.synchronize()
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
            activations=activations,
            runtime=runtime,
            drain=drain,
        ),
        config,
        plan.update_policy,
        trains=run_spec.trains,
        overflow=overflow,
    )
    resources.add("last update", once(step.finish_update))
    resources.add("last update", stepper.end)  # before it
    resources.add("open update", step.end_eager_update)
    return step, pager, stepper, whole


def _make_state(run_spec: RunSpec, machine: Machine, view: StateView) -> OptimizerState:
    is_sharded = run_spec.plan.request.ranks.shards_state
    shards = ParamShards(machine.runtime.collectives, run_spec.units, run_spec.trained, is_sharded=is_sharded)
    named = {spec.name: param for param, spec in run_spec.specs.items()}
    return OptimizerState(named, view, shards)


def _place_values(run_spec: RunSpec, machine: Machine, parts: ModelParts) -> None:
    """Give every parameter its first value: the module's own, one of a file of weights, or the committed one."""
    collectives, step = machine.runtime.collectives, parts.step
    materializer = Materializer(run_spec.model, parts.source.weights, run_spec.specs)
    placer = UnitPlacer(
        pager=step.pager,
        handler=step.param_events,
        store_masters=parts.run_state.view.store_masters,
        ranks=collectives,
        resumed=None if parts.adopted is None else parts.adopted.flat,
    )
    materialize_model(materializer, run_spec.units, run_spec.params_of, placer)
    materializer.move_buffers(machine.runtime.accelerator.device, collectives)


def _flats(pager: Pager) -> Callable[[Unit], torch.Tensor]:
    return lambda unit: pager.storage(unit).flat
