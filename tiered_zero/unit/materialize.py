"""Give parameters their first values: from the model as it was built, from safetensors files, or from initialisers.

A model built on the meta device gets its values one module after another: they are made on the CPU, written to their
tiers, and freed. So the model may be larger than host memory.

[Note: Initialisers run as they do in a constructor] For each module, its `reset_parameters()` runs first, then the
model's `_init_weights(module)`. Parents come after children, because parents' initialisers override those of children.
Initialisers run on a stand-in: a copy of the module tree in which only the tensors that need values have memory, and
all others are on meta. So other tensors may be offloaded already, and keep their values."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tiered_zero.concurrency.interrupts import hold_interrupts
from tiered_zero.errors import ModelError
from tiered_zero.hardware.memory.host_memory import temporary_zeros, trim_malloc
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.sizes import MIB
from tiered_zero.unit.pager import Pager
from tiered_zero.unit.unit import StepEvents
from tiered_zero.unit.weights import WeightFiles, format_names, names_of

logger = logging.getLogger("tiered_zero")

PROGRESS_S = 5.0
"""Seconds from one log line to the next while the values of a large model are placed."""

_TRIM_NBYTES = 4 * MIB


@dataclass(frozen=True, kw_only=True)
class _Blank:
    """A parameter or buffer that has memory but no values yet. `names`: all its names in the model. `version`: its
    version counter when it got memory."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    version: int

    def current(self, model: nn.Module) -> torch.Tensor:
        path, _, name = self.names[0].rpartition(".")
        found: torch.Tensor = getattr(model.get_submodule(path), name)
        return found

    def is_set(self, model: nn.Module) -> bool:
        """Return whether code has written to the tensor or replaced it; True for a tensor without elements."""
        current = self.current(model)
        return current is not self.tensor or current._version != self.version or not current.numel()


@final
class Materializer:
    """Gives a model's meta parameters and buffers memory and values on the CPU. Used on the driver thread. `weights`:
    the files to read values from. Tensors that are in no file get values from initialisers."""

    def __init__(self, model: nn.Module, weights: WeightFiles | None, specs: Mapping[nn.Parameter, ParamSpec]) -> None:
        self._model = model
        self._weights = weights
        self._specs = specs

    def fill_buffers(self) -> None:
        """Give memory and values to the meta buffers of modules without meta parameters. Raises ModelError if a buffer
        gets no values."""
        for path, module in self._model.named_modules():
            has_meta_buffer = any(buffer.is_meta for buffer in module.buffers(recurse=False))
            if has_meta_buffer and not any(param.is_meta for param in module.parameters(recurse=False)):
                self._fill(path, {}, {path: module})

    def fill(self, prefix: str, params: Sequence[nn.Parameter]) -> None:
        """Fill the meta parameters in `params`, and the meta buffers of their modules. `prefix`: the name of a module
        that contains these modules. Raises ModelError if a parameter or buffer gets no values."""
        missing = {param: self._specs[param] for param in params if param.is_meta}
        modules = self._model.get_submodule(prefix).named_modules(prefix=prefix)
        owners = {path: m for path, m in modules if any(p in missing for p in m.parameters(recurse=False))}
        if missing:
            self._fill(prefix, missing, owners)

    def move_buffers(self, device: torch.device, ranks: Collectives) -> None:
        """Move the buffers of every module to the device, with the values of rank 0."""
        for name, buffer in self._model.named_buffers():
            ranks.broadcast(buffer, what=f"buffer {name}")
        for module in self._model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                dtype = _buffer_dtype(module, buffer, device)
                if buffer.dtype != dtype or buffer.device != device:
                    setattr(module, name, buffer.to(device, dtype))

    @torch.no_grad()
    def _fill(self, prefix: str, params: Mapping[nn.Parameter, ParamSpec], owners: Mapping[str, nn.Module]) -> None:
        """Give memory, and then values, to `params` and to the meta buffers of the modules in `owners` (path ->
        module)."""
        blanks: list[_Blank] = []
        for param, spec in params.items():
            _give_memory(param, spec.name)
            blanks.append(_Blank(names=names_of(spec), tensor=param, version=param._version))
        for path, owner in owners.items():
            for name, buffer in list(owner.named_buffers(recurse=False)):
                if buffer.is_meta:
                    empty = torch.empty_like(buffer, device="cpu")
                    setattr(owner, name, empty)
                    blanks.append(_Blank(names=(f"{path}.{name}".lstrip("."),), tensor=empty, version=empty._version))
        weights = self._weights
        loose = [blank for blank in blanks if weights is None or not weights.has(blank.names)]
        if loose:
            with _holding(self._stand_in, owners, [blank.tensor for blank in loose]):
                self._run_initialisers(prefix)
        if weights is not None:
            for blank in blanks:
                weights.fill(blank.current(self._model), blank.names)
        if unset := [blank.names[0] for blank in blanks if not blank.is_set(self._model)]:
            raise ModelError(
                "Built on the meta device, and set neither by reset_parameters() of a module around it nor by the "
                f"model's _init_weights(module): {format_names(unset)}. Set it in one of them, name safetensors files "
                "that hold it in tiered_zero.weights, or build it on the CPU (under torch.device('cpu'))."
            )

    @cached_property
    def _stand_in(self) -> nn.Module:
        return _copy_on_meta(self._model)

    def _run_initialisers(self, prefix: str) -> None:
        """Run the initialisers of the modules under `prefix`, then of their ancestors. [Note: Initialisers run ...]"""
        general: Callable[[nn.Module], None] | None = getattr(self._stand_in, "_init_weights", None)

        def initialise(module: nn.Module) -> None:
            own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if own is not None:
                own()
            if general is not None:  # last, as when a model is built with values: it overrides the module's own
                general(module)

        self._stand_in.get_submodule(prefix).apply(initialise)
        parts = prefix.split(".") if prefix else []
        for depth in reversed(range(len(parts))):
            initialise(self._stand_in.get_submodule(".".join(parts[:depth])))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class UnitPlacer:
    """Makes parameters views of their unit's flat, and writes their values. The masters get the values in fp32; the
    unit's home (or the device) gets them in the unit's dtype.

    `store_masters(unit, masters)`: writes the masters, [P] fp32. `resumed(unit)`: returns a unit's saved parameters,
    [P]; at least this rank's shard of them is valid. `resumed` is None in a new run. A resumed run writes no masters,
    because it has them already."""

    pager: Pager
    events: StepEvents
    store_masters: Callable[[Unit, torch.Tensor], None]
    ranks: Collectives
    resumed: Callable[[Unit], torch.Tensor] | None = None

    def place(self, unit: Unit, params: Sequence[nn.Parameter]) -> None:
        """Make `params` views of the unit's flat, and write its values: rank 0's, or the saved ones in a resumed
        run."""
        if self.resumed is not None:
            flat = self.resumed(unit)
        else:
            flat = _flatten(unit, params, unit.dtype)
            self.ranks.broadcast(flat, what=f"the values of {unit.name}")
            if unit.trainable:
                masters = _flatten(unit, params, torch.float32)
                self.ranks.broadcast(masters, what=f"the masters of {unit.name}")
                self.store_masters(unit, masters)
                del masters
        self.pager.adopt(unit, params, self.events)
        self.pager.store(unit, flat)


def materialize_model(
    materializer: Materializer,
    units: Sequence[Unit],
    params_of: Callable[[Unit], Sequence[nn.Parameter]],
    placer: UnitPlacer,
) -> None:
    """Place every unit, module after module, and free the memory that its parameters had. `params_of`: returns a unit's
    parameters. After a failure some parameters are gone, and reading them raises. So make every check that is possible
    before this call."""
    materializer.fill_buffers()
    freed_nbytes = num_placed = 0
    num_parameters, next_line_s = sum(unit.numel for unit in units), time.monotonic() + PROGRESS_S
    for prefix, group in groupby(units, key=lambda unit: unit.module):
        params = [(unit, params_of(unit)) for unit in group]
        with hold_interrupts():
            materializer.fill(prefix, [param for _, own in params for param in own])
            for unit, own in params:
                placer.place(unit, own)
                freed_nbytes += unit.nbytes
                num_placed += unit.numel
        del params, own
        if freed_nbytes >= _TRIM_NBYTES:  # a walk over the heap takes longer than placing a small unit
            trim_malloc()
            freed_nbytes = 0
        if time.monotonic() >= next_line_s:
            logger.info("values of %s of %s parameters are placed", f"{num_placed:,}", f"{num_parameters:,}")
            next_line_s = time.monotonic() + PROGRESS_S
    materializer.fill_buffers()  # also of modules whose parameters are all tied to those of another


def _flatten(unit: Unit, params: Sequence[nn.Parameter], dtype: torch.dtype) -> torch.Tensor:
    """Return the values of `params` as a flat of the unit, [P] of `dtype` on the CPU."""
    flat = temporary_zeros((unit.numel,), dtype)
    for entry, param in zip(unit.entries, params, strict=True):
        flat[entry.start : entry.stop] = entry.param.flatten(param.detach())
    return flat


def _buffer_dtype(module: nn.Module, buffer: torch.Tensor, device: torch.device) -> torch.dtype:
    """Return the dtype that the buffer gets on the device. It is the buffer's own, with one exception: on the CPU,
    torch needs the statistics of a norm in the dtype of the norm's weight."""
    if device.type == "cpu" and isinstance(module, _NormBase) and module.weight is not None:
        return module.weight.dtype if buffer.is_floating_point() else buffer.dtype
    return buffer.dtype


def _copy_on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of the module tree with parameters and buffers of its own, all on meta."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twin._parameters = {
        name: None if param is None else nn.Parameter(_like(param), param.requires_grad)
        for name, param in module._parameters.items()
    }
    twin._buffers = {name: None if buffer is None else _like(buffer) for name, buffer in module._buffers.items()}
    children = module._modules.items()
    twin._modules = {name: None if child is None else _copy_on_meta(child) for name, child in children}
    return twin


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextmanager
def _holding(stand_in: nn.Module, owners: Mapping[str, nn.Module], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put `tensors` into the model's copy `stand_in` during the block, under their names in `owners` (path -> module).
    If an initialiser replaces a buffer, the buffer is then also replaced in `owners`."""
    held = {id(tensor) for tensor in tensors}
    slots: list[tuple[Any, Any, str, Any]] = []
    for path, owner in owners.items():
        twin = stand_in.get_submodule(path)
        pairs: list[tuple[Any, Any]] = [(twin._parameters, owner._parameters), (twin._buffers, owner._buffers)]
        for place, source in pairs:
            for name, tensor in source.items():
                if id(tensor) in held:
                    slots.append((place, source, name, place[name]))
                    place[name] = tensor
    yield
    for place, source, name, own in slots:
        if not isinstance(own, nn.Parameter):
            source[name] = place[name]
        place[name] = own


def _give_memory(param: nn.Parameter, name: str) -> None:
    """Give the meta parameter `name` memory, in place. Raises ModelError if something else holds the parameter."""
    value = nn.Parameter(temporary_zeros(param.shape, param.dtype), param.requires_grad)
    try:
        if _is_held(param):
            raise RuntimeError("it is referred to more than once")
        # torch.utils.swap_tensors does the same, but refuses parameters with weak references
        torch._C._swap_tensor_impl(param, value)
    except RuntimeError as error:
        raise ModelError(
            f"{name} was built on the meta device and cannot be given memory, for something else holds it, like a view "
            f"of it or the graph of a tensor computed from it ({error}). Build its module on the CPU (under "
            "torch.device('cpu'))."
        ) from error


def _is_held(param: nn.Parameter) -> bool:
    """Return whether anything refers to the parameter except its Python object and its gradient's autograd node."""
    count = param._use_count()  # type: ignore[attr-defined]
    if count == 2 and param.requires_grad:
        edge = torch.autograd.graph.get_gradient_edge(param)  # makes the node if there is none: then it was not that
        count = param._use_count() - 1  # type: ignore[attr-defined]
        del edge
    return bool(count > 1)
