"""Gather parameters for user code, outside of forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Protocol, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tiered_zero.concurrency.interrupts import hold_interrupts
from tiered_zero.errors import ModelError, add_note
from tiered_zero.unit.guarded_parameter import ClosedEngine
from tiered_zero.unit.pager import Pager
from tiered_zero.unit.param_handlers import handler_of
from tiered_zero.unit.saved_views import Saved, SavedViews
from tiered_zero.unit.unit_state import PagedUnit

_LOST = (
    "What this block of tiered_zero.gathered(modify=True) has changed is lost: it is written to the parameters' homes "
    "where the block ends without an error."
)


@contextmanager
def gathered(
    target: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool = False, modifier_rank: int = 0
) -> Iterator[None]:
    """Make parameters plain, with full values on the device, for the length of the block.

    `target`: a module (all its parameters), one parameter, or several. They must fit the room that
    stage3_max_live_parameters and the device leave; gather a large model part by part. `modify`: keep changes made
    inside: they go to the parameters' homes, and the fp32 master of every element that changed is set to its new value
    (an unchanged element keeps its master's full precision). If the block raises, its changes are lost, at the latest
    with the next update. Without `modify` a change raises ModelError at the end of the block. What is computed inside
    may be differentiated after it, until the parameters change. Parameters that no engine pages are left alone. With
    many ranks every rank enters a block with `modify`, and gets what `modifier_rank` has changed.
    """
    if isinstance(target, nn.Module):
        params = list(target.parameters())
    else:
        params = [target] if isinstance(target, nn.Parameter) else list(target)
    with gather(params, modify, modifier_rank), _saving_views(params):
        try:
            yield
        except BaseException as error:
            if modify and any(access_of(param) is not None for param in params):
                add_note(error, _LOST)
            raise


class WeightAccess(Protocol):
    """Interface that `gathered` needs of the engine that trains a parameter: its `TrainStep`."""

    pager: Pager

    def before_weights_read(self) -> None:
        """Weights are read between steps: make every update visible."""

    def before_weights_write(self) -> None:
        """Weights are written between steps: end every update, and drop what is prefetched for the next."""

    def latch(self, why: str) -> None:
        """A change of weights has failed half way: refuse every later call."""


def access_of(param: nn.Parameter) -> WeightAccess | None:
    """Return the access to the engine that trains the parameter; None where no open engine does."""
    handler = handler_of(param)
    return None if handler is None or isinstance(handler, ClosedEngine) else cast(WeightAccess, handler)


def _saving_views(params: Iterable[nn.Parameter]) -> AbstractContextManager[object]:
    """Let autograd save views of the units of any engine by name."""
    found = {id(access): access.pager.saved_views for param in params if (access := access_of(param)) is not None}
    return saved_tensors_hooks(partial(_pack, list(found.values())), _unpack) if found else nullcontext()


def _pack(engines: Sequence[SavedViews], tensor: torch.Tensor) -> tuple[SavedViews, Saved]:
    for views in engines:
        if not isinstance(saved := views.pack(tensor), tuple):
            break
    return views, saved


def _unpack(found: tuple[SavedViews, Saved]) -> torch.Tensor:
    views, saved = found
    return views.unpack(saved)


@contextmanager
def gather(params: Iterable[nn.Parameter], modify: bool, modifier_rank: int = 0) -> Iterator[None]:
    """Hold the units of `params` until the block ends. `modify`: write them back there."""
    with ExitStack() as stack:
        for access, paged in _paged(params):
            stack.enter_context(_gather_unit(access, paged, modify, modifier_rank))
        yield


def _paged(params: Iterable[nn.Parameter]) -> list[tuple[WeightAccess, PagedUnit]]:
    """Each unit once, with the engine that trains it."""
    found: dict[tuple[int, int], tuple[WeightAccess, PagedUnit]] = {}
    for param in params:
        handler = handler_of(param)
        if isinstance(handler, ClosedEngine):
            handler.fault_in([param], "gathered")
        access = access_of(param)
        if access is not None and (paged := access.pager.units.by_param.get(param)) is not None:
            found[id(access), paged.unit.index] = (access, paged)
    return list(found.values())


@contextmanager
def _gather_unit(access: WeightAccess, paged: PagedUnit, modify: bool, modifier_rank: int) -> Iterator[None]:
    pager = access.pager
    with pager.driver.entered("gathered"), pager.changes.allow(paged) if modify else nullcontext():
        access.before_weights_read()
        pager.begin_gather(paged)
        try:
            old = pager.offloaded_params.remember(paged.unit, paged.storage.flat) if modify else None
            with pager.changes.changing(paged) if modify else nullcontext():
                yield
            if modify:
                access.before_weights_write()
                with hold_interrupts():  # a change that is written in part cannot be dropped
                    _write_back(access, paged, old, modifier_rank)
        finally:
            changed = pager.changes.drop(paged)
            pager.end_gather(paged)
    if changed is not None:
        raise ModelError(
            f"Parameter {changed} was changed inside tiered_zero.gathered() without modify=True, so that the change is "
            "lost with the next update or use. Write `with tiered_zero.gathered(param, modify=True):`, or change a "
            "clone."
        )


def _write_back(access: WeightAccess, paged: PagedUnit, old: torch.Tensor | None, modifier_rank: int) -> None:
    try:
        access.pager.changes.write_back(paged, old, modifier_rank)
    except BaseException as error:
        if isinstance(error, MemoryError) or not isinstance(error, Exception):
            access.latch(f"{type(error).__name__} ended a change by hand of the parameters of {paged.unit.name}")
        raise
