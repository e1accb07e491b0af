"""What is kept of a model while it is materialized, and restored on failure (see also test_materialize_model.py)."""

import pytest
import torch
from torch import nn

from tiered_zero.params.snapshot import ModelSnapshot


def build() -> tuple[nn.Module, ModelSnapshot]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return model, ModelSnapshot(model, model.parameters())


def test_the_same_memory_is_restored() -> None:
    model, snapshot = build()
    before = model.weight.data_ptr()
    model.weight.data = torch.zeros(8, 8, dtype=torch.bfloat16)
    snapshot.restore()
    assert model.weight.data_ptr() == before
    assert model.weight.dtype == torch.float32


def test_after_discard_nothing_is_restored() -> None:
    model, snapshot = build()
    given = torch.zeros(8, 8, dtype=torch.bfloat16)
    model.weight.data = given
    snapshot.discard()
    snapshot.restore()
    assert model.weight.data_ptr() == given.data_ptr()


def test_what_the_flat_on_the_device_holds_is_released() -> None:
    """With the same bits; on the CPU not with others, for there is no copy of them."""
    model, snapshot = build()
    model.weight.data = model.weight.data.clone()
    before, own = model.bias.data_ptr(), model.weight.data_ptr()
    model.bias.data = model.bias.data.bfloat16()
    snapshot.release(model.parameters())
    snapshot.restore()
    assert model.weight.data_ptr() == own
    assert model.bias.data_ptr() == before


def test_values_restored_rounded_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """As where a model of another dtype lay on a GPU."""
    model, snapshot = build()
    expected = model.weight.detach().bfloat16().float()
    snapshot.release(model.parameters())
    model.weight.data = model.weight.data.bfloat16()
    snapshot.restore()
    assert torch.equal(model.weight.detach(), expected)
    assert caplog.messages == [
        "the start broke off: values of the model that were on the device are rounded to bfloat16 now"
    ]


def test_a_parameter_returns_to_meta_under_a_view() -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    snapshot = ModelSnapshot(model, model.parameters())
    twin = nn.Parameter(torch.ones(8, 8))
    torch.utils.swap_tensors(model.weight, twin)
    weight, view = model.weight, model.weight[0]
    snapshot.restore()
    assert model.weight is weight
    assert weight.is_meta
    assert view.sum() == 8
    assert weight.shape == (8, 8)
