"""Copies and pickles of a model whose parameters are paged: plain modules with plain parameters."""

import contextlib
import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import tiered_zero
from tests.support.forked import run_forked
from tests.support.inspection import pager
from tests.support.models import HIDDEN, ParityGPT, batch
from tests.support.trainers import FAR, Plain, assert_same_bits, follow, tiered, train


@pytest.mark.parametrize("placement", [*FAR, ("none", "cpu")], ids="-".join)
@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_a_copy_is_a_plain_model(way, placement, swap_path):
    """Taken between steps, or inside gathered: every two of way, time and placement meet."""
    inside = (way == "deepcopy") == (placement[0] == "cpu")

    def take(module: nn.Module) -> nn.Module:
        if way == "deepcopy":
            return copy.deepcopy(module)
        torch.save(module, file := io.BytesIO())
        file.seek(0)
        return torch.load(file, weights_only=False)

    with tiered(ParityGPT(), swap_path, placement) as engine:
        train(engine, batch, 2)
        if inside:
            with tiered_zero.gathered(engine.module):
                copied = take(engine.module)
        else:
            copied = take(engine.module)
        weights = engine.module.state_dict()
        expected = engine(*batch(5)).detach()
        assert all(type(param) is nn.Parameter for param in copied.parameters())
        assert copied.head.weight is copied.tokens.weight
        assert all(torch.equal(value, weights[name]) for name, value in copied.state_dict().items())
        loss = copied(*batch(5))
        assert torch.equal(loss.detach(), expected)
        loss.backward()  # gradients stay where plain PyTorch leaves them
        assert copied.norm.weight.grad is not None
        train(engine, batch, 1)
        assert all(torch.equal(value, weights[name]) for name, value in copied.state_dict().items()), "it is its own"
    assert torch.equal(copied(*batch(5)).detach(), expected), "also after close"
    copied.load_state_dict(weights)


def test_a_pickle_needs_nothing_of_this_package(swap_path):
    path = swap_path / "model.pt"
    with tiered(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), swap_path) as engine:
        expected = engine.module(torch.ones(1, 4)).detach()
        torch.save(engine.module, path)
    code = (
        "import sys, torch\n"
        "sys.modules |= dict.fromkeys([name for name in sys.modules if name.partition('.')[0] == 'tiered_zero'])\n"
        f"print(torch.load({str(path)!r}, weights_only=False)(torch.ones(1, 4)).tolist())"
    )
    done = run_forked("-c", code)
    path.unlink()
    assert done.stdout.strip() == str(expected.tolist()), done.stderr


def test_an_average_of_the_weights(swap_path):
    """Taken between steps, kept up inside `gathered`."""

    def average(trainer, gathered):
        averaged, seen = AveragedModel(trainer.module), []
        for number in range(3):
            trainer.backward(trainer(*batch(number)))
            trainer.step()
            with gathered(trainer.module):
                averaged.update_parameters(trainer.module)
            seen += [value.clone() for value in averaged.state_dict().values()]
        return seen

    torch.manual_seed(0)
    expected = follow(lambda own: average(own, contextlib.nullcontext), Plain(ParityGPT(), clipping=0.5))
    torch.manual_seed(0)
    engine = tiered(ParityGPT(), swap_path, clipping=0.5)
    assert_same_bits(expected, follow(lambda own: average(own, tiered_zero.gathered), engine))


def test_a_copied_parameter_reads_its_unit_once(swap_path, monkeypatch):
    """A deepcopy asks for one parameter after the other: of NVMe bytes, a unit's are read once."""
    with tiered(ParityGPT(), swap_path) as engine:
        train(engine, batch, 1)
        offloaded_params, reads = pager(engine).offloaded_params, []
        read = offloaded_params.read
        monkeypatch.setattr(offloaded_params, "read", lambda unit: reads.append(unit.index) or read(unit))
        copy.deepcopy(engine.module.blocks[0])
        assert reads and len(reads) == len(set(reads))
        weight = engine.module.blocks[0].out.weight
        with tiered_zero.gathered(weight, modify=True), torch.no_grad():
            weight.zero_()
        assert not copy.deepcopy(weight).any(), "what is kept of the last copy is not stale"
        assert weight.shape == (HIDDEN, HIDDEN)


class Routed(nn.Module):
    """Its norms are one unit, with the experts between them."""

    def __init__(self):
        super().__init__()
        self.first = nn.LayerNorm(32)
        self.experts = nn.ModuleList(nn.Linear(32, 64) for _ in range(3))
        self.last = nn.LayerNorm(64)


def test_a_copied_block_reads_its_small_parts_once(swap_path, monkeypatch):
    with tiered(nn.ModuleList(Routed() for _ in range(4)), swap_path) as engine:
        offloaded_params, reads = pager(engine).offloaded_params, []
        read = offloaded_params.read
        monkeypatch.setattr(offloaded_params, "read", lambda unit: reads.append(unit.module) or read(unit))
        copy.deepcopy(engine.module[1])
    assert reads == ["1", "1.experts.0", "1.experts.1", "1.experts.2"]
