"""A unit's storage: filled and emptied under its views."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.units import flat_of, make_params, make_unit
from tiered_zero.unit.guard import ClosedEngine, OffloadedParameter, handler_of
from tiered_zero.unit.unit import FlatStorage


def full(numels: list[int]) -> tuple[FlatStorage, list[nn.Parameter], torch.Tensor]:
    unit = make_unit(0, numels)
    params = make_params(unit)
    values = flat_of(unit, params)
    storage = FlatStorage(unit, params, torch.device("cpu"), ClosedEngine(unit.name))
    storage.fill()
    storage.flat.copy_(values)
    storage.unguard()
    return storage, params, values


def test_parameters_are_views_of_one_flat() -> None:
    storage, params, values = full([5, 0, 1, 700])
    for entry, param in zip(storage.unit.entries, params, strict=True):
        assert torch.equal(param, values[entry.start : entry.stop])
        assert handler_of(param) is not None
    with torch.no_grad():
        params[3].fill_(7.0)
    assert storage.flat[storage.unit.entries[3].start] == 7.0
    assert torch.equal(storage.flat[entry.start : entry.stop], params[3].detach())


def test_emptying_gives_the_memory_back_and_refilling_keeps_views_and_versions() -> None:
    storage, params, values = full([64, 64])
    view, versions = params[1].detach(), [param._version for param in params]
    storage.guard()
    storage.empty()
    assert (storage.is_full, storage._bytes.nbytes()) == (False, 0)
    assert [tuple(param.shape) for param in params] == [(64,), (64,)]
    storage.fill()
    storage.flat.data.copy_(values)
    storage.unguard()
    assert storage._bytes.nbytes() == storage.unit.nbytes
    assert torch.equal(view, values[storage.unit.entries[1].start : storage.unit.entries[1].stop])
    assert [param._version for param in params] == versions, "autograd's saved views stay valid"


def test_another_view_is_noticed() -> None:
    storage, params, _ = full([64])
    assert not storage.is_viewed
    for make in (
        lambda: params[0][3:5],
        lambda: params[0].detach(),
        lambda: params[0].data,
        lambda: params[0].view(8, 8),
    ):
        view = make()
        assert storage.is_viewed
        del view
        assert not storage.is_viewed
    view = params[0].detach()
    storage.guard()
    assert storage.is_viewed
    del view
    assert not storage.is_viewed
    storage.unguard()
    summed = (params[0] * 1.0).sum()
    assert not storage.is_viewed, "a result is no view"
    del summed


def test_a_saved_view_is_found_again_by_its_geometry() -> None:
    storage, params, _ = full([64, 64])
    view = params[1].detach().view(8, 8).t()[2:4]
    again = storage.view(view.size(), view.stride(), view.storage_offset(), view.dtype)
    assert torch.equal(again, view) and again.data_ptr() == view.data_ptr()
    as_int = params[0].detach().view(torch.int32)
    assert torch.equal(storage.view(as_int.size(), as_int.stride(), as_int.storage_offset(), torch.int32), as_int)


@pytest.mark.parametrize("is_full", [True, False])
def test_at_the_end_parameters_with_bytes_keep_them(is_full: bool) -> None:
    storage, params, values = full([8])
    if not is_full:
        storage.guard()
        storage.empty()
    storage.detach_params()
    assert isinstance(params[0], OffloadedParameter) == (not is_full)
    assert (handler_of(params[0]) is None) == is_full
    if is_full:
        storage.empty()
        assert torch.equal(params[0].detach(), values[:8])


def test_at_the_end_parameters_stay_views_where_the_device_has_no_room_for_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def clone(self: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("the device is full")

    storage, params, values = full([8, 8])
    storage.guard()
    with monkeypatch.context() as full_device:
        full_device.setattr(torch.Tensor, "clone", clone)
        storage.detach_params()
    for param, entry in zip(params, storage.unit.entries, strict=True):
        assert type(param) is nn.Parameter and handler_of(param) is None
        assert torch.equal(param.detach(), values[entry.start : entry.stop])
