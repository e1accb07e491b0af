"""Read and set fp32 master weights and optimizer state, one parameter at a time, on any tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from tiered_zero.concurrency.interrupts import hold_interrupts
from tiered_zero.engine.train_step import TrainStep
from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import FlatEntry, ParamSpec, Unit
from tiered_zero.unit.gathered import gathered, paged_by
from tiered_zero.update.state_view import ParamShards, StateView, check_name


@dataclass(frozen=True, kw_only=True, eq=False)
class FullValues:
    """Reads and writes masters and state between steps, on the driver thread; blocks. Each call moves whole sub-groups.

    Masters are returned as fp32 copies on the CPU in the parameter's shape; state has the dtype and shape of torch's
    optimizer. A read returns None if the parameter is frozen or in no param group, or if no update has made its state
    yet. If masters and state are sharded, every rank makes each call. `step`: the engine's TrainStep.
    """

    step: TrainStep

    @property
    def view(self) -> StateView:
        return self.step.policy.view

    @property
    def shards(self) -> ParamShards:
        return self.view.shards

    def read_master(self, param: nn.Parameter) -> torch.Tensor | None:
        unit, entry = self._place(param)
        if entry.param.name not in self.shards.trained:
            return None

        def read() -> torch.Tensor:
            self.step.before_weights_read()
            return self._read_masters(unit)[entry.start : entry.stop].clone()

        return entry.param.view(self.shards.gather(entry.param, self.shards.read("a master is read", read)))

    def set_master(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Set the master to `value`, and the parameter to `value` rounded to its dtype."""
        unit, entry = self._place(param)

        def check() -> None:
            self._check_shape(entry, value)
            if entry.param.name not in self.shards.trained:
                raise ModelError(
                    f"{entry.param.name} is not trained: it has no master. Set it inside tiered_zero.gathered."
                )

        self.shards.change("a master is set", check)
        value = self.shards.same(value)
        with gathered(param, modify=True), torch.no_grad():
            param.copy_(value)
        self.step.before_weights_write()
        flat = self._read_masters(unit)
        flat[entry.start : entry.stop] = entry.param.flatten(value.detach())
        self.view.replace_masters(unit, flat)

    def read_state(self, param: nn.Parameter, name: str) -> torch.Tensor | None:
        """Return the state tensor `name`, as torch's optimizer calls it, such as "exp_avg"; None if there is none."""
        _, entry = self._place(param)
        if entry.param.name not in self.shards.trained:
            return None
        self.shards.read("optimizer state is read", self.step.before_weights_read)
        values = self.view.read(param).get(param)
        if values is None:
            return None
        check_name(name, [own for own, value in values.items() if isinstance(value, torch.Tensor)])
        return cast("torch.Tensor", values[name])

    def set_state(self, param: nn.Parameter, name: str, value: torch.Tensor) -> None:
        """Set the state tensor `name` to `value`, rounded to the format in which the tier stores it."""
        _, entry = self._place(param)

        def check() -> None:
            _check_tensor(value)
            if entry.param.name not in self.shards.trained:
                raise ModelError(f"{entry.param.name} is not trained: it has no optimizer state.")
            self.step.before_weights_write()

        self.shards.change("optimizer state is set", check)
        values = self.view.read(param).get(param, {}) if self.view.is_stepped(param) else {}
        self.shards.change("optimizer state is set", lambda: _check_state(entry.param, values, name, value))
        values[name] = self.shards.same(value, values[name].dtype)
        try:
            self.shards.change("optimizer state is set", lambda: self.view.write({param: values}, only=param))
        except BaseException as error:
            self.step.policy.failures.set(error)  # partly the old state, partly the new
            raise

    def _place(self, param: nn.Parameter) -> tuple[Unit, FlatEntry]:
        paged = self.step.pager.units.by_param.get(param)
        assert paged is not None, "the pager has gathered this parameter"
        return paged.unit, paged.unit.entries[paged.params[param]]

    def _read_masters(self, unit: Unit) -> torch.Tensor:
        params = None
        if self.view.need_params:
            resident = self.step.pager.is_resident(unit)
            params = (
                self.step.pager.storage(unit).flat.to("cpu")
                if resident
                else self.step.pager.offloaded_params.read_own(unit)
            )
        return self.view.read_masters(unit, params)

    @staticmethod
    def _check_shape(entry: FlatEntry, value: torch.Tensor) -> None:
        _check_tensor(value)
        if tuple(value.shape) != entry.param.shape:
            raise ModelError(
                f"Expected shape {entry.param.shape}, that of {entry.param.name}; found {tuple(value.shape)}."
            )


def full_values_of(param: nn.Parameter) -> FullValues | None:
    """Return the FullValues of the open engine that trains the parameter; None if there is no such engine."""
    pager = paged_by(param)
    step = None if pager is None else pager.units.by_param[param].events
    return FullValues(step=step) if isinstance(step, TrainStep) else None


@hold_interrupts()
def get_master(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the parameter's fp32 master on the CPU; None if no engine trains the parameter. If masters are
    sharded, every rank calls this and the other functions of this module."""
    values = full_values_of(param)
    return values.read_master(param) if values is not None else None


@hold_interrupts()
def set_master(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master to `value`, and the parameter to `value` rounded to its dtype. Raises ModelError."""
    _expected(param).set_master(param, value)


@hold_interrupts()
def get_state(param: nn.Parameter, name: str) -> torch.Tensor | None:
    """Return a copy of the state tensor `name`, such as "exp_avg", on the CPU in fp32; None before the first step."""
    values = full_values_of(param)
    return values.read_state(param, name) if values is not None else None


@hold_interrupts()
def set_state(param: nn.Parameter, name: str, value: torch.Tensor) -> None:
    """Set the state tensor `name`, such as "exp_avg", to `value`. Raises ModelError before the first step."""
    _expected(param).set_state(param, name, value)


def get_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of `param.grad` on the CPU in fp32, between backward and step(); None without a gradient."""
    grad = param.grad
    return None if grad is None else grad.detach().to("cpu", torch.float32, copy=True)


def set_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the gradient that the next step() takes. Raises ModelError if backward has left none."""
    grad = param.grad
    if grad is None:
        raise ModelError("There is no gradient to set: call it between backward and step().")
    _check_tensor(value)
    if value.shape != grad.shape:
        raise ModelError(f"Expected a gradient of shape {tuple(grad.shape)}; found {tuple(value.shape)}.")
    with torch.no_grad():
        grad.copy_(value)


def _expected(param: nn.Parameter) -> FullValues:
    values = full_values_of(param)
    if values is None:
        raise ModelError("Expected a parameter that an open engine trains; found one that no engine has.")
    return values


def _check_state(param: ParamSpec, values: Mapping[str, Any], name: str, value: torch.Tensor) -> None:
    """Raise ModelError unless `values`, the state of a parameter, has a tensor `name` of the shape of `value`."""
    if not values:
        raise ModelError(f"{param.name} has no optimizer state before its first step. Set it after that.")
    tensors = {own: held for own, held in values.items() if isinstance(held, torch.Tensor) and own != "step"}
    # a rule of whole parameters keeps arrays of a parameter without dimensions as it keeps its counters
    check_name(name, [own for own, held in tensors.items() if held.dim() or not param.shape])
    if value.shape != tensors[name].shape:
        expected, found = tuple(tensors[name].shape), tuple(value.shape)
        raise ModelError(f"Expected shape {expected}, that of {name} of {param.name}; found {found}.")


def _check_tensor(value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise ModelError(f"Expected a tensor as the value; found {type(value).__name__}.")
