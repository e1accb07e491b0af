"""Give the update pipeline access to the parameters and gradients of a user's training loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tiered_zero.concurrency.transfer import COMPLETED, Transfer
from tiered_zero.errors import ModelError
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import Segment
from tiered_zero.tiers.step_gradients import GradientSource
from tiered_zero.tiers.tier import UnitUpdate
from tiered_zero.unit.guard import handler_of
from tiered_zero.unit.model import kept_stride

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_in_place(param: Tensor) -> bool:
    """Return whether the CPU can step the parameter in place: its elements are dense in host memory."""
    return param.device.type == "cpu" and bool(torch.ops.aten.is_non_overlapping_and_dense(param))


class UserParameters(GradientSource):
    """The parameters of a user's param groups, in order. The update pipeline reads their `.grad` and writes new values
    to them. Used by the thread that calls `step()`; if `step()` has `on_written`, the pipeline uses this object on the
    update lane."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Describe the parameters of `groups`. Raises ModelError for a parameter that cannot be stepped."""
        self.params: list[Tensor] = []
        self.specs: list[tuple[ParamSpec, int]] = []
        """The description of each parameter, and the index of its group."""
        self._accelerator: Accelerator | None = None
        for index, group in enumerate(groups):
            names = group.get("param_names") or [f"parameter {place}" for place in range(len(group["params"]))]
            for name, param in zip(names, group["params"], strict=True):
                self._add(f"{name} of group {index}", param, index)
        if len(set(map(id, self.params))) < len(self.params):
            raise ModelError("A parameter is twice in a param group. Name each once, as model.parameters() does.")
        self._places = [_place(param) for param in self.params]
        self._in_place = [is_in_place(param) for param in self.params]
        self._flat_grad: tuple[Tensor, Tensor] | None = None
        """The gradient that `part` read last, and a flat tensor of its elements in the order of the parameter's
        memory."""

    def _add(self, name: str, param: Tensor, group: int) -> None:
        if handler_of(param) is not None:  # type: ignore[arg-type]
            raise ModelError(f"{name}: it belongs to an engine, whose own optimizer steps it. Use engine.optimizer.")
        if type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise ModelError(
                f"{name}: expected a plain tensor; found {type(param).__name__}, whose parts cannot be moved between "
                "tiers. Give it to a plain optimizer of its own."
            )
        if param.dtype not in _DTYPES or param.layout is not torch.strided:
            kind = str(param.dtype if param.layout is torch.strided else param.layout).removeprefix("torch.")
            raise ModelError(
                f"{name}: expected a dense tensor of float32, bfloat16 or float16; found {kind}. Give it to a plain "
                "optimizer of its own."
            )
        spec = ParamSpec(
            name=name,
            shape=tuple(param.shape),
            dtype=param.dtype,
            trainable=True,
            index=len(self.params),
            stride=kept_stride(param),  # type: ignore[arg-type]
        )
        self.params.append(param)
        self.specs.append((spec, group))

    def connect(self, accelerator: Accelerator) -> None:
        """Set the accelerator, whose lanes copy new values to parameters on its device."""
        self._accelerator = accelerator

    @property
    def device(self) -> torch.device:
        """The device of the first parameter that is not on the CPU; the CPU if all parameters are there."""
        found = (param.device for param in self.params if param.device.type != "cpu")
        return next(found, torch.device("cpu"))

    @property
    def are_in_place(self) -> bool:
        """Whether the CPU can step all parameters in place."""
        return all(self._in_place)

    def staged(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the `segments` of parameters that cannot be stepped in place: they pass through a staging buffer."""
        return [segment for segment in segments if not self._in_place[segment.unit.index]]

    def has_moved(self) -> bool:
        """Return whether a parameter's device, dtype, shape or strides differ from those at construction."""
        return any(_place(param) != place for param, place in zip(self.params, self._places, strict=True))

    def check_shapes(self, stepped: Iterable[Tensor]) -> None:
        """Raise ModelError if a parameter of `stepped` has another shape than at construction."""
        with_state = set(map(id, stepped))
        for param, (spec, _) in zip(self.params, self.specs, strict=True):
            if id(param) in with_state and tuple(param.shape) != spec.shape:
                raise ModelError(
                    f"{spec.name}: expected the shape {spec.shape}, which its state has; found {tuple(param.shape)}. "
                    "Make the changed parameter a new nn.Parameter, and build the optimizer anew."
                )

    def check_gradients(self) -> None:
        """Raise ModelError if a gradient is sparse, which no update rule accepts."""
        for param, (spec, _) in zip(self.params, self.specs, strict=True):
            if (grad := param.grad) is not None and grad.layout is not torch.strided:
                raise ModelError(
                    f"{spec.name}: expected a dense gradient; found {grad.layout}. Build its nn.Embedding with "
                    "sparse=False, or give it to a torch.optim.SparseAdam of its own."
                )

    def stepped(self) -> list[Tensor]:
        """List the parameters that have a gradient."""
        return [param for param in self.params if param.grad is not None]

    # -- the source of gradients ---------------------------------------------------------------------------------------

    def has(self, unit: Unit, param: ParamSpec) -> bool:
        return self.params[param.index].grad is not None

    def part(self, segment: Segment) -> Tensor:
        spec, param = segment.unit.entries[0].param, self.params[segment.unit.index]
        grad = param.grad
        if grad is None:
            return torch.empty(0)
        if self._flat_grad is None or grad is not self._flat_grad[0]:
            self._flat_grad = grad, spec.flatten(grad.detach())
        return segment.part_of(self._flat_grad[1]).to("cpu")

    def release_gradients(self) -> None:
        """Drop the one gradient that the method `part` keeps. Called at the end of a step."""
        self._flat_grad = None

    # -- the sink of parameters ----------------------------------------------------------------------------------------

    def view(self, segment: Segment, kind: str, *, on_device: bool) -> Tensor | None:
        index = segment.unit.index
        if not self._in_place[index]:
            return None
        return segment.part_of(segment.unit.entries[0].param.flatten(self.params[index].detach()))

    def read(self, segment: Segment, kind: str, window: Tensor | None) -> Transfer | None:
        if window is not None:
            spec, param = segment.unit.entries[0].param, self.params[segment.unit.index]
            window.view(segment.unit.dtype).copy_(segment.part_of(spec.flatten(param.detach())))
        return None

    def write(
        self, segment: Segment, kind: str, window: Tensor, after: Transfer, unit_update: UnitUpdate | None
    ) -> tuple[Transfer, int | None]:
        spec, param = segment.unit.entries[0].param, self.params[segment.unit.index].detach()
        values = window.view(segment.unit.dtype)

        def copy() -> None:
            flat = spec.flatten(param)
            segment.part_of(flat).copy_(values, non_blocking=on_lane)
            if flat.data_ptr() != param.data_ptr():  # a copy, as of a parameter with holes between its elements
                param.copy_(spec.view(flat), non_blocking=on_lane)

        on_lane = self._accelerator is not None and param.device == self._accelerator.device
        if self._accelerator is None or param.device.type == "cpu":
            copy()
            return COMPLETED, None
        return self._accelerator.lane("write_back").submit(copy, after=[after], holds=[param]), None


def _place(param: Tensor) -> tuple[Any, ...]:
    return param.device, param.dtype, param.stride(), tuple(param.shape)
