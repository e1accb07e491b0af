"""A model that is trained by one engine after another, and weights that are used between backward and step."""

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.models import ParityGPT, batch
from tests.support.trainers import FAR, Plain, assert_parity, assert_same_bits, follow, tiered, train


@pytest.mark.parametrize("placement", [*FAR, ("none", "cpu")], ids="-".join)
def test_a_model_is_initialized_again_after_close(placement, swap_path):
    """Where its values went with the engine, they are loaded first; the optimizer begins anew, as the plain one."""
    torch.manual_seed(0)
    plain = ParityGPT()
    first, second = (follow(lambda own: train(own, batch, 3), Plain(plain, clipping=0.5)) for _ in range(2))
    torch.manual_seed(0)
    model = ParityGPT()
    assert_same_bits(first, follow(lambda own: train(own, batch, 3), tiered(model, swap_path, placement, clipping=0.5)))
    if placement[0] != "none":
        with pytest.raises(tiered_zero.errors.ModelError, match=r"has no value.*load_state_dict\(\) with it before"):
            tiered(model, swap_path, placement)
        with pytest.raises(tiered_zero.errors.ParameterOffloadedError, match="closed"):
            model.norm.weight.sum()
        with pytest.raises(tiered_zero.errors.ParameterOffloadedError, match="closed"), torch.no_grad():
            torch.empty(model.norm.weight.shape).copy_(model.norm.weight)
        model.load_state_dict(first.weights)
        assert all(type(param) is nn.Parameter for param in model.parameters())
    assert_same_bits(
        second, follow(lambda own: train(own, batch, 3), tiered(model, swap_path, placement, clipping=0.5))
    )


USES = {
    "forward": lambda trainer: trainer(*batch(9)),
    "module": lambda trainer: trainer.module(*batch(9)),
    "submodule": lambda trainer: trainer.module.norm(torch.ones(2, 32)),
    "state_dict": lambda trainer: trainer.module.state_dict()["norm.weight"].clone(),
}


@pytest.mark.parametrize("name", USES)
def test_weights_that_are_used_before_step_in_every_step(name, swap_path):
    """No update of such a loop begins in backward: the first step has shown it."""

    def script(trainer):
        seen = []
        for number in range(4):
            trainer.backward(trainer(*batch(number)))
            with torch.no_grad():
                seen.append(USES[name](trainer))
            trainer.step()
        return seen

    assert_parity(ParityGPT, script, swap_path)


def test_weights_that_are_used_before_step_later_are_refused_with_the_reason(swap_path):
    with tiered(ParityGPT(), swap_path) as engine:
        train(engine, batch, 2)
        engine.backward(engine(*batch(2)))
        with pytest.raises(tiered_zero.errors.ModelError, match=r"before step\(\).*begun in backward"), torch.no_grad():
            engine(*batch(3))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_limits_its_rows_in_forward_is_refused(kind, swap_path):
    model = nn.Sequential(kind(8, 4, max_norm=1.0), nn.Linear(4, 1))
    with pytest.raises(tiered_zero.errors.ModelError, match=r"'0' has max_norm=1.*after step\(\)"):
        tiered(model, swap_path)


def test_an_attribute_that_nobody_has_is_not_blamed_on_the_module_alone(swap_path):
    with tiered(nn.Sequential(nn.Linear(2, 2)), swap_path) as engine:
        with pytest.raises(AttributeError, match=r"engine.*Sequential.*'nothing_here'|engine.*nothing_here"):
            engine.nothing_here  # noqa: B018
        assert isinstance(engine.get_submodule("0"), nn.Linear)
