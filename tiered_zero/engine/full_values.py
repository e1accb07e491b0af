"""Read and set fp32 masters, gradients and optimizer state, one parameter at a time, on any tier.

Values are copies on the CPU: masters and gradients are fp32 in the parameter's shape, state has the dtype and shape of
torch's optimizer. A read returns None if no open engine trains the parameter, or if it has no such value yet. Call
these functions between steps, on the driver thread. If masters and state are sharded, every rank calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from tiered_zero.concurrency.interrupts import hold_interrupts
from tiered_zero.engine.train_step import TrainStep
from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import FlatEntry, ParamSpec, Unit
from tiered_zero.unit.gathered import gathered, paged_by
from tiered_zero.update.state_view import check_name


def _step_of(param: nn.Parameter) -> TrainStep | None:
    """Return the TrainStep of the open engine that has the parameter; None if there is no such engine."""
    pager = paged_by(param)
    step = None if pager is None else pager.units.by_param[param].events
    return step if isinstance(step, TrainStep) else None


def _expected_step(param: nn.Parameter) -> TrainStep:
    if (step := _step_of(param)) is None:
        raise ModelError("Expected a parameter that an open engine trains; found one that no engine has.")
    return step


def _place(step: TrainStep, param: nn.Parameter) -> tuple[Unit, FlatEntry]:
    paged = step.pager.units.by_param[param]
    return paged.unit, paged.unit.entries[paged.params[param]]


@hold_interrupts()
def get_master(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the parameter's fp32 master; None if the parameter is not trained."""
    if (step := _step_of(param)) is None:
        return None
    (unit, entry), shards = _place(step, param), step.policy.view.shards
    if entry.param.name not in shards.trained:
        return None

    def read() -> torch.Tensor:
        step.before_weights_read()
        return _read_masters(step, unit)[entry.start : entry.stop].clone()

    return entry.param.view(shards.gather(entry.param, shards.read("a master is read", read)))


@hold_interrupts()
def set_master(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master to `value`, and the parameter to `value` rounded to its dtype. Raises ModelError if the
    parameter is not trained or has another shape."""
    step = _expected_step(param)
    (unit, entry), view = _place(step, param), step.policy.view

    def check() -> None:
        _check_tensor(value)
        if tuple(value.shape) != entry.param.shape:
            raise ModelError(
                f"Expected shape {entry.param.shape}, that of {entry.param.name}; found {tuple(value.shape)}."
            )
        if entry.param.name not in view.shards.trained:
            raise ModelError(
                f"{entry.param.name} is not trained: it has no master. Set it inside tiered_zero.gathered."
            )

    view.shards.change("a master is set", check)
    value = view.shards.same(value)
    with gathered(param, modify=True), torch.no_grad():
        param.copy_(value)
    step.before_weights_write()
    flat = _read_masters(step, unit)
    flat[entry.start : entry.stop] = entry.param.flatten(value.detach())
    view.replace_masters(unit, flat)


def _read_masters(step: TrainStep, unit: Unit) -> torch.Tensor:
    view, pager, params = step.policy.view, step.pager, None
    if view.need_params:
        is_resident = pager.is_resident(unit)
        params = pager.storage(unit).flat.to("cpu") if is_resident else pager.offloaded_params.read_own(unit)
    return view.read_masters(unit, params)


@hold_interrupts()
def get_state(param: nn.Parameter, name: str) -> torch.Tensor | None:
    """Return a copy of the state tensor `name` of torch's optimizer, such as "exp_avg"; None before the first step."""
    if (step := _step_of(param)) is None:
        return None
    (_, entry), view = _place(step, param), step.policy.view
    if entry.param.name not in view.shards.trained:
        return None
    view.shards.read("optimizer state is read", step.before_weights_read)
    values = view.read(param).get(param)
    if values is None:
        return None
    check_name(name, [own for own, value in values.items() if isinstance(value, torch.Tensor)])
    return cast("torch.Tensor", values[name])


@hold_interrupts()
def set_state(param: nn.Parameter, name: str, value: torch.Tensor) -> None:
    """Set the state tensor `name` to `value`, rounded to its stored format. Raises ModelError before the first step."""
    step = _expected_step(param)
    (_, entry), view = _place(step, param), step.policy.view

    def check() -> None:
        _check_tensor(value)
        if entry.param.name not in view.shards.trained:
            raise ModelError(f"{entry.param.name} is not trained: it has no optimizer state.")
        step.before_weights_write()

    view.shards.change("optimizer state is set", check)
    values = view.read(param).get(param, {}) if view.is_stepped(param) else {}
    view.shards.change("optimizer state is set", lambda: _check_state(entry.param, values, name, value))
    values[name] = view.shards.same(value, values[name].dtype)
    try:
        view.shards.change("optimizer state is set", lambda: view.write({param: values}, only=param))
    except BaseException as error:
        step.policy.failures.set(error)  # state is partly old and partly new
        raise


def _check_state(param: ParamSpec, values: Mapping[str, Any], name: str, value: torch.Tensor) -> None:
    """Raise ModelError if `values`, the state of `param`, has no tensor `name` with the shape of `value`."""
    if not values:
        raise ModelError(f"{param.name} has no optimizer state before its first step. Set it after that.")
    tensors = {own: held for own, held in values.items() if isinstance(held, torch.Tensor) and own != "step"}
    # a 0-d parameter has 0-d arrays, which look like counters: accept all tensors then
    check_name(name, [own for own, held in tensors.items() if held.dim() or not param.shape])
    if value.shape != tensors[name].shape:
        expected, found = tuple(tensors[name].shape), tuple(value.shape)
        raise ModelError(f"Expected shape {expected}, that of {name} of {param.name}; found {found}.")


def get_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return an fp32 copy of `param.grad` on the CPU; None without a gradient. Raises ModelError with many ranks, or if
    updates begin in backward."""
    grad = param.grad
    return None if grad is None else grad.detach().to("cpu", torch.float32, copy=True)


def set_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the gradient that the next step() uses. Raises ModelError if the parameter has no gradient."""
    grad = param.grad
    if grad is None:
        raise ModelError("There is no gradient to set: call it between backward and step().")
    _check_tensor(value)
    if value.shape != grad.shape:
        raise ModelError(f"Expected a gradient of shape {tuple(grad.shape)}; found {tuple(value.shape)}.")
    with torch.no_grad():
        grad.copy_(value)


def _check_tensor(value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise ModelError(f"Expected a tensor as the value; found {type(value).__name__}.")
