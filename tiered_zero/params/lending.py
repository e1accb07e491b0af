"""Lend parameters outside of forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from tiered_zero.params.pager import Pager
from tiered_zero.params.residency import Residency
from tiered_zero.params.storage import ClosedEngine, lender_of


@contextmanager
def gathered(target: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool = False) -> Iterator[None]:
    """Lend the full values of parameters, on the device, for the length of the block.

    `target`: a module (all its parameters), one parameter, or several. They must fit the room that
    stage3_max_live_parameters and the device leave; lend a large model part by part. `modify`: changes made inside are
    kept: they go to the parameters' homes, and the fp32 master of every element that changed is set to its new value
    (an unchanged element keeps its master's full precision). Without `modify` changes are lost. Parameters that no
    engine pages are left alone.
    """
    if isinstance(target, nn.Module):
        params = list(target.parameters())
    else:
        params = [target] if isinstance(target, nn.Parameter) else list(target)
    with lend(params, modify):
        yield


@contextmanager
def lend(params: Iterable[nn.Parameter], modify: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for pager, residency in _paged(params):
            stack.enter_context(_loan(pager, residency, modify))
        yield


def _paged(params: Iterable[nn.Parameter]) -> list[tuple[Pager, Residency]]:
    """Each unit once, with its pager."""
    found: dict[tuple[int, int], tuple[Pager, Residency]] = {}
    for param in params:
        pager = lender_of(param)
        if isinstance(pager, ClosedEngine):
            pager.demand([param], "gathered")
        if isinstance(pager, Pager) and (residency := pager.residency(param)) is not None:
            found[id(pager), residency.unit.index] = (pager, residency)
    return list(found.values())


@contextmanager
def _loan(pager: Pager, residency: Residency, modify: bool) -> Iterator[None]:
    with pager.driver.entered("gathered"):
        yield from _lend_unit(pager, residency, modify)


def _lend_unit(pager: Pager, residency: Residency, modify: bool) -> Iterator[None]:
    pager.before_reading()
    loan = pager.lend(residency)
    try:
        old = pager.remember(residency.unit) if modify else None
        yield
        if modify:
            pager.write_back(residency.unit, old)
    finally:
        pager.drop_changes(residency.unit)
        pager.end_loan(loan)
