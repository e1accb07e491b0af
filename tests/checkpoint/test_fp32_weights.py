"""The weights of a checkpoint as fp32, by DeepSpeed's names: a state_dict, a loaded model, files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tiered_zero
from tests.support.models import ParityGPT, batch
from tests.support.trainers import same_bits, tiered, train
from tiered_zero.deepspeed.utils import zero_to_fp32
from tiered_zero.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from tiered_zero.errors import BudgetError, ConfigError, StoreError


class Shared(nn.Module):
    """A tied weight, a module with a buffer that stands in two places, and tensors without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.tokens.weight
        self.norm = self.norm_again = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4), requires_grad=False)
        self.register_buffer("none", torch.zeros(0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm_again(self.norm(self.tokens(ids)))).float().square().mean()


def saved(path: Path, swap_path: Path, **options: object) -> dict[str, torch.Tensor]:
    """Save a tag after a step; return its masters, frozen weights and buffers by every name."""
    torch.manual_seed(0)
    with tiered(Shared(), swap_path, bf16={"enabled": True}, **options) as engine:
        engine.backward(engine(torch.arange(8)))
        engine.step()
        engine.save_checkpoint(path)
        found = {name: value.clone() for name, value in engine.module.state_dict().items()}
        for name, param in engine.module.named_parameters(remove_duplicate=False):
            found[name] = engine.peek(name) if param.requires_grad else found[name].float()
    return found


@pytest.mark.parametrize("in_place", [False, True])
def test_tied_weights_have_all_their_names(in_place: bool, swap_path: Path, tmp_path: Path) -> None:
    expected = saved(tmp_path, swap_path, runtime={"checkpoint": {"in_place": in_place}})
    assert {"tokens.weight", "head.weight", "norm.weight", "norm_again.weight"} < expected.keys()
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert expected.keys() == found.keys() and all(same_bits(value, found[name]) for name, value in expected.items())
    assert found["head.weight"] is found["tokens.weight"] and found["frozen"].dtype == torch.float32
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", safe_serialization=True)
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert files.keys() == found.keys() and all(same_bits(value, files[name]) for name, value in found.items())
    for weights in (found, files):
        model = Shared()
        model.load_state_dict(weights, strict=True)
        assert model.head.weight is model.tokens.weight and same_bits(model.head.weight.data, found["head.weight"])


def test_a_model_is_loaded(swap_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = saved(tmp_path, swap_path)
    model = Shared()
    assert load_state_dict_from_zero_checkpoint(model, tmp_path, "global_step1") is model and not caplog.messages
    own = model.state_dict()
    assert all(same_bits(value.to(own[name].dtype), own[name]) for name, value in expected.items())
    load_state_dict_from_zero_checkpoint(nn.Sequential(nn.Linear(2, 2)), tmp_path)
    assert "the checkpoint has no values for 2 names, such as 0.weight" in caplog.messages
    assert any("the model has no place for" in line for line in caplog.messages)


def test_the_model_of_a_closed_engine_is_loaded(swap_path: Path, tmp_path: Path) -> None:
    """As DeepSpeed's documentation has it: the weights of the last checkpoint, in the model that was trained."""
    torch.manual_seed(0)
    engine = tiered(ParityGPT(), swap_path, ("nvme", "nvme"))
    train(engine, batch, 2)
    engine.save_checkpoint(tmp_path)
    expected = engine.module.state_dict()
    engine.close()
    model = load_state_dict_from_zero_checkpoint(engine.module, tmp_path)
    assert all(same_bits(value, model.state_dict()[name]) for name, value in expected.items())


def test_arguments(
    swap_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = saved(tmp_path / "ck", swap_path)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ck", exclude_frozen_parameters=True, lazy_mode=True)
    assert expected.keys() - found.keys() == {"frozen", "empty"}
    convert = convert_zero_checkpoint_to_fp32_state_dict
    convert(tmp_path / "ck", tmp_path / "many", max_shard_size=100, exclude_frozen_parameters=True)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert "writes model.safetensors, and no pytorch_model.bin" in caplog.text
    convert(tmp_path / "ck", tmp_path / "one", None, True)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    with pytest.raises(ConfigError, match="max_shard_size: 'many' is no size"):
        convert(tmp_path / "ck", tmp_path / "bad", "many")
    with pytest.raises(StoreError, match="global_step7"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ck", "global_step7")
    monkeypatch.setattr(zero_to_fp32, "available_host_nbytes", lambda: 100)
    with pytest.raises(BudgetError, match=r"they take \d+ B and 100 B are free"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ck")
    assert tiered_zero.utils.zero_to_fp32 is zero_to_fp32
