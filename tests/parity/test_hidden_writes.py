"""Changes of parameters past their home, by whatever way: refused in the step in which they happen."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.models import ParityGPT, batch, groups
from tests.support.pairwise import by_turns
from tests.support.trainers import FAR, Plain, assert_same_bits, follow, tiered, train


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=3e-3)


def _in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(0.5, 0.9)


def _other_memory(weight: nn.Parameter) -> None:
    weight.data = weight.data.clamp(0.5, 0.9)


def _scaled_data(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)


def _one_element(weight: nn.Parameter) -> None:
    weight.data[5] = 100.0


def _numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[5] = 7.0


def _dlpack(weight: nn.Parameter) -> None:
    torch.from_dlpack(weight.detach())[5] = 7.0


def _part(weight: nn.Parameter) -> None:
    weight[4:][1].data.fill_(100.0)


def _numpy_part(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[5:6].numpy()[0] = 7.0


def _swapped_signs(weight: nn.Parameter) -> None:
    """Two changes that a sum of all values does not show."""
    weight.data[3:5] += torch.tensor([1.0, -1.0])


CHANGES = [_in_place, _other_memory, _scaled_data, _one_element, _numpy, _dlpack, _part, _numpy_part, _swapped_signs]


class Changing(ParityGPT):
    """Runs `change` on a weight in its forward, as max-norm constraints do."""

    def __init__(self, change: Callable[[nn.Parameter], object] = lambda _: None) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.change = change

    def forward(self, *args):
        self.change(self.norm.weight)
        return super().forward(*args)


@pytest.mark.parametrize(("change", "placement"), by_turns(CHANGES, [*FAR, ("none", "cpu")]))
def test_changes_that_would_be_lost_are_refused(placement, change, swap_path):
    """The next update writes what the masters say: a change that they do not know is told of in the same step."""
    update = ("barrier", "overlapped")[CHANGES.index(change) % 2]
    with tiered(Changing(), swap_path, placement, adamw, 1, 0.5, runtime={"update": update}) as engine:
        train(engine, batch, 2)
        before = engine.module.state_dict()
        engine.module.change = change
        with pytest.raises(tiered_zero.errors.ModelError, match=r"norm\.weight were changed.*modify=True") as caught:
            train(engine, batch, 1)
        assert ("its module, LayerNorm, does so in its forward" in str(caught.value)) == (change is _other_memory)
        engine.module.change = lambda _: None
        engine.abort_step()
        if placement[0] != "none":
            assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
            train(engine, batch, 2)


READS = {
    "data": lambda weight: weight.data.sum(),
    "numpy": lambda weight: weight.detach().numpy().sum(),
    "address": lambda weight: weight.data_ptr() and None,
    "same memory": lambda weight: setattr(weight, "data", weight.data),
    "copy": copy.deepcopy,
    "pickle": lambda weight: pickle.loads(pickle.dumps(weight)),
    "part": lambda weight: weight[2:4].data.sum(),
    "pickled part": lambda weight: pickle.loads(pickle.dumps(weight.detach()[2])) + weight[2],
}


@pytest.mark.parametrize(("read", "placement"), by_turns(list(READS), [("cpu", "cpu"), ("none", "cpu")]))
def test_reads_of_the_same_memory_are_no_changes(placement, read, swap_path):
    expected = follow(lambda trainer: train(trainer, batch, 3), Plain(Changing(READS[read]), adamw))
    with tiered(Changing(READS[read]), swap_path, placement, adamw) as engine:
        assert_same_bits(expected, follow(lambda trainer: train(trainer, batch, 3), engine))


@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("none", "cpu")], ids="-".join)
def test_memory_that_is_kept_is_watched_as_long(placement, swap_path):
    """Taken in one forward, written to in the third."""
    kept: list[torch.Tensor] = []
    with tiered(Changing(lambda weight: kept or kept.append(weight.data)), swap_path, placement, adamw) as engine:
        train(engine, batch, 2)
        engine.module.change = lambda weight: kept[0].mul_(weight.isfinite().all() + 1)  # while it is in use
        with pytest.raises(tiered_zero.errors.ModelError, match=r"norm\.weight were changed"):
            train(engine, batch, 1)


def test_what_never_asks_for_memory_is_not_compared(swap_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "equal", lambda *_: calls.append(1))
    with tiered(ParityGPT(), swap_path, ("cpu", "cpu"), adamw) as engine:
        train(engine, batch, 2)
    assert not calls


@pytest.mark.parametrize("way", ["in place", "data"])
@pytest.mark.parametrize("update", ["barrier", "overlapped"])
def test_a_change_between_steps_of_what_lives_on_the_device_is_refused(update, way, swap_path):
    """As loops do with a temperature: small parameters persist there, and may be read between steps."""
    zero = {"stage3_param_persistence_threshold": 100}
    with tiered(ParityGPT(), swap_path, zero=zero, clipping=0.5, runtime={"update": update}) as engine:
        train(engine, batch, 2)
        with torch.no_grad():
            weight = engine.module.norm.weight
            (weight if way == "in place" else weight.data).clamp_(0.5, 0.9)
        with pytest.raises(tiered_zero.errors.ModelError, match=r"norm\.weight were changed.*modify=True"):
            train(engine, batch, 1)


class _HalvesInBackward(torch.autograd.Function):
    """Changes the weight that forward has saved, in place."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return weight * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors[0].mul_(0.5)
        return grad * 2


@pytest.mark.parametrize("placement", [*FAR, ("none", "cpu")], ids="-".join)
def test_a_change_of_what_forward_saved_is_refused_in_backward(placement, swap_path):
    model = Changing()
    model.norm.register_forward_hook(lambda norm, _, output: output * _HalvesInBackward.apply(norm.weight))
    refused = pytest.raises(tiered_zero.errors.ModelError, match=r"one of unit .*norm.* were changed.*modify=True")
    with tiered(model, swap_path, placement, adamw) as engine, refused:
        train(engine, batch, 1)


def _merge(trainer):
    """Change one parameter after the other by `.data`, as adapters are merged and weights are masked."""
    seen = train(trainer, batch, 2)
    for sign in (1, -1):
        with tiered_zero.gathered(trainer.module, modify=True), torch.no_grad():
            for param in trainer.module.parameters():
                if param.dim() == 2 and param.is_floating_point():
                    param.data += sign * 0.5
                    param.data = param.data * 0.75
        seen += train(trainer, batch, 1)
    return seen


@pytest.mark.parametrize("placement", [*FAR, ("none", "cpu")], ids="-".join)
def test_parameters_of_many_units_may_change_through_data_inside_gathered(placement, swap_path):
    expected = follow(_merge, Plain(Changing(), adamw))
    with tiered(Changing(), swap_path, placement, adamw) as engine:
        assert_same_bits(expected, follow(_merge, engine))
