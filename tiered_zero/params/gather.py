"""Lend parameters outside of forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tiered_zero.errors import ModelError
from tiered_zero.params.flat_storage import ClosedEngine, pager_of
from tiered_zero.params.pager import Pager
from tiered_zero.params.unit_state import HeldWrapper, Residency, SavedView


@contextmanager
def gathered(target: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool = False) -> Iterator[None]:
    """Lend the full values of parameters, on the device, for the length of the block.

    `target`: a module (all its parameters), one parameter, or several. They must fit the room that
    stage3_max_live_parameters and the device leave; lend a large model part by part. `modify`: changes made inside are
    kept: they go to the parameters' homes, and the fp32 master of every element that changed is set to its new value
    (an unchanged element keeps its master's full precision). Without `modify` a change raises ModelError at the end of
    the block. What is computed inside may be differentiated after it, until the parameters change. Parameters that no
    engine pages are left alone.
    """
    if isinstance(target, nn.Module):
        params = list(target.parameters())
    else:
        params = [target] if isinstance(target, nn.Parameter) else list(target)
    with lend(params, modify), saved_tensors_hooks(partial(_pack, _pagers(params)), _unpack):
        yield


class WeightAccess(Protocol):
    """What `gathered` needs of the engine that trains a parameter: its `TrainStep`."""

    pager: Pager

    def before_weights_read(self) -> None:
        """Weights are read between steps: make every update visible."""

    def before_weights_write(self) -> None:
        """Weights are written between steps: end every update, and drop what is prefetched for the next."""


def access_of(param: nn.Parameter) -> WeightAccess | None:
    """None for a parameter that no open engine trains."""
    lender = pager_of(param)
    return None if lender is None or isinstance(lender, ClosedEngine) else cast(WeightAccess, lender)


def _pagers(params: Iterable[nn.Parameter]) -> list[Pager]:
    found = {id(access): access.pager for param in params if (access := access_of(param)) is not None}
    return list(found.values())


_Saved = tuple[Pager | None, torch.Tensor | SavedView | HeldWrapper]


def _pack(pagers: Sequence[Pager], tensor: torch.Tensor) -> _Saved:
    for pager in pagers:
        if (saved := pager.pack(tensor)) is not tensor:
            return pager, saved
    return None, tensor


def _unpack(found: _Saved) -> torch.Tensor:
    pager, saved = found
    if pager is not None:
        return pager.unpack(saved)
    assert isinstance(saved, torch.Tensor)
    return saved


@contextmanager
def lend(params: Iterable[nn.Parameter], modify: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for access, residency in _paged(params):
            stack.enter_context(_loan(access, residency, modify))
        yield


def _paged(params: Iterable[nn.Parameter]) -> list[tuple[WeightAccess, Residency]]:
    """Each unit once, with the engine that trains it."""
    found: dict[tuple[int, int], tuple[WeightAccess, Residency]] = {}
    for param in params:
        lender = pager_of(param)
        if isinstance(lender, ClosedEngine):
            lender.demand([param], "gathered")
        access = access_of(param)
        if access is not None and (residency := access.pager.residency(param)) is not None:
            found[id(access), residency.unit.index] = (access, residency)
    return list(found.values())


@contextmanager
def _loan(access: WeightAccess, residency: Residency, modify: bool) -> Iterator[None]:
    with access.pager.driver.entered("gathered"):
        yield from _lend_unit(access, residency, modify)


def _lend_unit(access: WeightAccess, residency: Residency, modify: bool) -> Iterator[None]:
    access.before_weights_read()
    pager = access.pager
    loan = pager.lend(residency)
    changed: str | None = None
    try:
        old = pager.remember(residency.unit) if modify else None
        yield
        if modify:
            access.before_weights_write()
            pager.write_back(residency.unit, old)
    finally:
        changed = pager.drop_changes(residency.unit)
        pager.end_loan(loan)
    if changed is not None:
        raise ModelError(
            f"Parameter {changed} was changed inside tiered_zero.gathered() without modify=True, so that the change is "
            "lost with the next update or use. Write `with tiered_zero.gathered(param, modify=True):`, or change a "
            "clone."
        )
