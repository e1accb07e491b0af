"""Make the full values of parameters readable and writable for user code, outside of forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tiered_zero.concurrency.interrupts import hold_interrupts
from tiered_zero.errors import ModelError, add_note
from tiered_zero.hardware.device.accelerator import runs_outside_modes
from tiered_zero.unit.guard import handler_of
from tiered_zero.unit.pager import Pager
from tiered_zero.unit.saved_views import Saved, SavedViews
from tiered_zero.unit.unit import PagedUnit

_LOST = (
    "What this block of tiered_zero.gathered(modify=True) has changed is lost: it is written to the parameters' homes "
    "when the block ends without an error."
)


@contextmanager
def gathered(
    target: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool = False, modifier_rank: int = 0
) -> Iterator[None]:
    """Make parameters plain, with full values on the device, for the length of the block.

    `target`: a module (all its parameters), one parameter, or several. Together they must fit into
    stage3_max_live_parameters and the device's memory. `modify`: keep changes. At the end of the block the parameters
    are written to their homes, and changed elements also to the fp32 masters. If the block raises, nothing is written,
    and the changes on the device are lost at the next update or earlier. Without `modify` a change raises ModelError at
    the end of the block. `modifier_rank`: with `modify`, every rank gets the values of the rank with this number. At
    stage 3, or with `modify`, every rank must enter the block.

    Results computed inside may be differentiated after the block, until the parameters change. Parameters of no engine
    are left alone. Raises ParameterOffloadedError for an offloaded parameter of a closed engine."""
    if isinstance(target, nn.Module):
        params = list(target.parameters())
    else:
        params = [target] if isinstance(target, nn.Parameter) else list(target)
    with gather(params, modify, modifier_rank), _saving_views(params):
        try:
            yield
        except BaseException as error:
            if modify and any(paged_by(param) is not None for param in params):
                add_note(error, _LOST)
            raise


def paged_by(param: nn.Parameter) -> Pager | None:
    """Return the pager of the open engine that pages the parameter; None if there is no such engine."""
    handler = handler_of(param)
    return handler if isinstance(handler, Pager) else None


def _saving_views(params: Iterable[nn.Parameter]) -> AbstractContextManager[object]:
    """Return a context manager in which autograd saves views of the units of `params` by name, not by address. Backward
    then makes each view anew from the unit's memory, which may have been freed and filled again."""
    found = {id(pager): pager.saved_views for param in params if (pager := paged_by(param)) is not None}
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
    """Keep the units of `params` in use for the length of the block. `modify`: whether changes made in the block are
    kept. `modifier_rank`: with `modify`, the rank whose values all ranks get."""
    with ExitStack() as stack:
        for paged, pager in _paged(params).items():
            stack.enter_context(_gather_unit(pager, paged, modify, modifier_rank))
        yield


def _paged(params: Iterable[nn.Parameter]) -> dict[PagedUnit, Pager]:
    """Map the unit of each parameter to its pager; skip parameters of no engine. Raises ParameterOffloadedError for an
    offloaded parameter of a closed engine."""
    found: dict[PagedUnit, Pager] = {}
    for param in params:
        if (pager := paged_by(param)) is not None:
            found[pager.units.by_param[param]] = pager
        elif (closed := handler_of(param)) is not None:
            closed.fault_in([param], "gathered")
    return found


@contextmanager
def _gather_unit(pager: Pager, paged: PagedUnit, modify: bool, modifier_rank: int) -> Iterator[None]:
    with pager.driver.entered("gathered"), _writing(paged) if modify else nullcontext():
        paged.events.before_weights_read()
        pager.begin_gather(paged)
        try:
            old = pager.offloaded_params.remember(paged) if modify else None
            with pager.offloaded_params.changing(paged) if modify else nullcontext():
                yield
            if modify:
                paged.events.before_weights_write()
                with hold_interrupts():  # a change that is written in part cannot be dropped
                    _write_back(pager, paged, old, modifier_rank)
        finally:
            changed = _drop_change(paged)
            pager.end_gather(paged)
    if changed is not None:
        raise ModelError(
            f"Parameter {changed} was changed inside tiered_zero.gathered() without modify=True, so that the change is "
            "lost with the next update or use. Write `with tiered_zero.gathered(param, modify=True):`, or change a "
            "clone."
        )


@contextmanager
def _writing(paged: PagedUnit) -> Iterator[None]:
    """Allow user code to change the unit inside the block. The caller writes the changes back, or drops them if user
    code raises."""
    paged.num_writers += 1
    try:
        yield
    finally:
        paged.num_writers -= 1


def _write_back(pager: Pager, paged: PagedUnit, old: torch.Tensor | None, modifier_rank: int) -> None:
    try:
        pager.offloaded_params.write_back(paged, old, modifier_rank)
    except BaseException as error:
        if isinstance(error, MemoryError) or not isinstance(error, Exception):
            paged.events.latch(f"{type(error).__name__} ended a change by hand of the parameters of {paged.unit.name}")
        raise


@runs_outside_modes
def _drop_change(paged: PagedUnit) -> str | None:
    """Find a parameter of `paged` that user code has changed without a write-back. Return its name; None if there is
    none, or if the unit has other users. After a change, mark the unit as stale, unless it is resident. The unit's next
    use then fetches it from its home."""
    if paged.num_users > 1 + paged.is_resident:  # an outer block searches at its own end
        return None
    if (changed := paged.storage.take_change()) is not None:
        paged.mark_stale()
    return None if changed is None else changed[0]
