"""Whole weights between steps: gathered(), state_dict(), load_state_dict() on every placement, and what masters do."""

import itertools

import pytest
import torch

import tiered_zero
from tests.support.inspection import differences, everything
from tests.support.models import HIDDEN, ParityGPT, batch, groups, named_weights
from tests.support.trainers import FAR, SPREAD, Plain, assert_parity, assert_same_bits, follow, tiered, train
from tiered_zero.errors import ModelError

BF16 = {"bf16": {"enabled": True}}


def build(seed: int = 0) -> ParityGPT:
    torch.manual_seed(seed)
    return ParityGPT()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=3e-3)


@pytest.mark.parametrize("placement", SPREAD, ids="-".join)
def test_gathered_reads_what_state_dict_gives(placement, swap_path):
    with tiered(build(), swap_path, placement, adamw) as engine:
        train(engine, batch, 2)
        weights = engine.module.state_dict()
        for module in (engine.module.blocks[0], engine.module.sometimes, engine.module.norm):
            with tiered_zero.gathered(module):
                found = {id(param): param.detach().clone() for param in module.parameters()}
            for name, param in engine.module.named_parameters():
                if id(param) in found:
                    assert torch.equal(found[id(param)].cpu(), weights[name])


@pytest.mark.parametrize("placement", SPREAD, ids="-".join)
def test_state_dict_is_the_models_own(placement, swap_path):
    """CPU tensors that share nothing with the run; tied names share one; order, buffers and dtypes are the model's."""
    reference = build().state_dict()
    with tiered(build(), swap_path, placement, adamw) as engine:
        weights = engine.module.state_dict()
        assert list(weights) == list(reference) and weights._metadata.keys() == reference._metadata.keys()
        assert all(type(value) is torch.Tensor and not value.requires_grad for value in weights.values())
        assert all(
            (value.dtype, value.shape) == (reference[n].dtype, reference[n].shape) for n, value in weights.items()
        )
        addresses = [value.untyped_storage().data_ptr() for value in weights.values()]
        assert len(set(addresses)) == len(addresses) - 1, "only the tied pair shares memory"
        assert weights["head.weight"] is weights["tokens.weight"] or (
            weights["head.weight"].data_ptr() == weights["tokens.weight"].data_ptr()
        )
        kept = {name: value.clone() for name, value in weights.items()}
        train(engine, batch, 1)
        assert all(torch.equal(value, weights[name]) for name, value in kept.items()), "an update reaches into a copy"
        own = engine.module.blocks[1].state_dict(prefix="x.")
        assert torch.equal(own["x.out.weight"], engine.module.state_dict()["blocks.1.out.weight"])


@pytest.mark.parametrize("placement", SPREAD, ids="-".join)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_load_state_dict_then_a_step_is_the_reference(precision, placement, swap_path):
    """Stale masters must not bring the old weights back (E2)."""
    other = build(7).state_dict()
    dtype = torch.bfloat16 if precision == "bf16" else None

    def script(trainer):
        seen = train(trainer, batch, 2)
        if isinstance(trainer, Plain):
            trainer.module.load_state_dict(other)
            with torch.no_grad():
                for param, master in trainer.masters.items():
                    master.copy_(torch.where(master.to(param.dtype) == param, master, param))
        else:
            result = trainer.module.load_state_dict(other)
            assert not result.missing_keys and not result.unexpected_keys
        return seen + train(trainer, batch, 2)

    expected = follow(script, Plain(build(), adamw, dtype=dtype))
    top = BF16 if precision == "bf16" else {}
    assert_same_bits(expected, follow(script, tiered(build(), swap_path, placement, adamw, **top)))


@pytest.mark.parametrize("placement", FAR, ids="-".join)
def test_loading_what_is_there_keeps_the_masters_precision(placement, swap_path):
    """bf16: a master moves only where its rounded value is another one."""
    with tiered(build(), swap_path, placement, adamw, **BF16) as engine:
        train(engine, batch, 3)
        before = everything(engine)
        engine.module.load_state_dict(engine.module.state_dict())
        assert not differences(before, everything(engine))
        weights = engine.module.state_dict()
        weights["norm.weight"][3] = 5.0
        engine.module.load_state_dict(weights)
        after = everything(engine)
        states = [name for name in differences(before, after) if name != "norm.weight"]
        assert len(states) == 1 and states[0].startswith("state ")
        changed = before[states[0]].view(torch.float32) != after[states[0]].view(torch.float32)
        assert changed.sum() == 1 and after[states[0]].view(torch.float32)[changed].item() == 5.0


@pytest.mark.parametrize("placement", FAR, ids="-".join)
def test_a_load_that_fails_leaves_what_torch_leaves(placement, swap_path):
    """A wrong shape: torch raises after copying what fits. Nothing stays lent, and training goes on."""
    broken = build(7).state_dict()
    broken["blocks.0.out.weight"] = torch.ones(3)

    def script(trainer):
        with pytest.raises(RuntimeError, match="size mismatch"):
            trainer.module.load_state_dict(broken)
        return train(trainer, batch, 2)

    assert_parity(build, script, swap_path, [placement])


@pytest.mark.parametrize("placement", SPREAD, ids="-".join)
def test_changes_made_inside_gathered_are_kept(placement, swap_path):
    """Homes and masters follow; without `modify` on a unit that moves the change is lost with the loan."""

    def script(trainer):
        seen = train(trainer, batch, 2)
        module = trainer.module
        if isinstance(trainer, Plain):
            change(module)
        else:
            with tiered_zero.gathered(module.blocks[0].out.weight, modify=True):
                change(module)
        return seen + train(trainer, batch, 3)

    def change(module):
        with torch.no_grad():
            module.blocks[0].out.weight[2:5] *= 1.5

    assert_same_bits(
        follow(script, Plain(build(), adamw)), follow(script, tiered(build(), swap_path, placement, adamw))
    )


def test_a_change_by_hand_between_backward_and_step_is_refused(swap_path):
    """Where updates begin in backward the unit's own may have begun, from masters that know nothing of the change."""
    with tiered(build(), swap_path, ("nvme", "nvme"), adamw) as engine:
        train(engine, batch, 2)
        weight = engine.module.blocks[1].out.weight
        with (
            pytest.raises(tiered_zero.errors.ModelError, match=r"before step\(\)"),
            tiered_zero.gathered(weight, modify=True),
        ):
            engine.backward(engine(*batch(2)))
            with torch.no_grad():
                weight.mul_(1.5)
        engine.step()
        found = dict(named_weights(engine.module))
    with tiered(build(), swap_path, ("nvme", "nvme"), adamw) as engine:
        train(engine, batch, 3)
        expected = dict(named_weights(engine.module))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.parametrize("way", ["in place", "data", "other memory"])
@pytest.mark.parametrize("placement", [*FAR, ("none", "cpu")], ids="-".join)
def test_changes_without_modify_are_refused(placement, way, swap_path):
    """At the end of the block, by name. What is paged is read from its home again."""
    with tiered(build(), swap_path, placement, adamw) as engine:
        train(engine, batch, 1)
        before = everything(engine)
        weight = engine.module.blocks[0].out.weight
        with (
            pytest.raises(tiered_zero.errors.ModelError, match=r"blocks\.0\.out\.weight was changed.*modify=True"),
            tiered_zero.gathered(engine.module.blocks[0]),
            torch.no_grad(),
        ):
            if way == "other memory":
                weight.data = torch.zeros_like(weight)
            else:
                (weight.data if way == "data" else weight).zero_()
        if placement[0] != "none":
            assert not differences(before, everything(engine))
        train(engine, batch, 1)
        assert engine.module.state_dict()["blocks.0.out.weight"].abs().sum() > 0


@pytest.mark.parametrize("placement", SPREAD, ids="-".join)
def test_a_penalty_computed_inside_gathered_is_differentiated_after_it(placement, swap_path):
    """Autograd saves the parameters themselves for it, and their bytes leave with the loan."""

    def script(trainer):
        seen = []
        for number in range(3):
            loss = trainer(*batch(number))
            with tiered_zero.gathered(trainer.module):
                params = [param for param in trainer.module.parameters() if param.requires_grad]
                penalty = sum(param.pow(2).sum() for param in params) + params[0].t().exp().mean()
            trainer.backward(loss + 0.01 * penalty)
            trainer.step()
            seen += [loss.detach(), penalty.detach(), trainer.get_global_grad_norm()]
        return seen

    assert_parity(build, script, swap_path, [placement], adamw)


def test_a_penalty_from_before_a_step_is_refused(swap_path):
    with tiered(build(), swap_path, make_optimizer=adamw) as engine:
        with tiered_zero.gathered(engine.module.norm):
            penalty = engine.module.norm.weight.pow(2).sum()
        train(engine, batch, 1)
        with pytest.raises(tiered_zero.errors.ModelError, match="have changed since"):
            engine.backward(penalty)


def test_a_penalty_after_a_call_that_failed_inside_gathered_is_refused_after_the_step(swap_path):
    """The failed call drops its step; what the block computes afterwards still saves weights by name."""
    with tiered(build(), swap_path, make_optimizer=adamw) as engine:
        weight = engine.module.blocks[1].out.weight
        with tiered_zero.gathered(weight):
            with pytest.raises(TypeError, match="targets"):
                engine(batch(0)[0])
            penalty = weight.square().sum()
        train(engine, batch, 1)
        with pytest.raises(ModelError, match="they have changed since"):
            penalty.backward()


@pytest.mark.parametrize("placement", SPREAD, ids="-".join)
def test_other_memory_for_a_parameter_inside_gathered(placement, swap_path):
    """`param.data = ...`, which user code prefers to writing in place: kept with `modify`."""

    def script(trainer):
        seen = train(trainer, batch, 2)
        weight = trainer.module.blocks[0].out.weight
        if isinstance(trainer, Plain):
            weight.data = weight.data * 0.5
        else:
            with tiered_zero.gathered(weight, modify=True):
                weight.data = weight.data * 0.5
        return seen + train(trainer, batch, 3)

    assert_same_bits(
        follow(script, Plain(build(), adamw)), follow(script, tiered(build(), swap_path, placement, adamw))
    )


@pytest.mark.parametrize("placement", FAR, ids="-".join)
def test_a_parameter_that_thaws_later_is_refused(placement, swap_path):
    """It has no optimizer state, and its gradient would go nowhere."""
    with tiered(build(), swap_path, placement, adamw) as engine:
        train(engine, batch, 1)
        engine.module.scale.requires_grad_(True)
        engine.backward(engine(*batch(0)))
        with pytest.raises(tiered_zero.errors.ModelError, match=r"scale requires a gradient, but was frozen"):
            engine.step()
        engine.module.scale.requires_grad_(False)
        engine.step()
        train(engine, batch, 1)


def test_an_exception_inside_gathered_keeps_nothing_and_gathers_nothing(swap_path):
    with tiered(build(), swap_path, make_optimizer=adamw) as engine:
        before = everything(engine)
        with pytest.raises(ZeroDivisionError), tiered_zero.gathered(engine.module.norm, modify=True), torch.no_grad():
            engine.module.norm.weight.fill_(3)
            raise ZeroDivisionError
        assert not differences(before, everything(engine))
        with pytest.raises(tiered_zero.errors.ParameterOffloadedError):
            engine.module.norm.weight.sum()


def test_gathered_nests_and_spans_a_forward(swap_path):
    """A loan inside a loan, and a forward inside: the parameter stays as long as the longest of them."""
    with tiered(build(), swap_path, make_optimizer=adamw) as engine:
        weight = engine.module.blocks[1].out.weight
        with tiered_zero.gathered(engine.module.blocks[1]):
            with tiered_zero.gathered([weight]):
                engine.eval()
                with torch.no_grad():
                    engine(*batch(0))
            assert weight.shape == (HIDDEN, HIDDEN) and torch.isfinite(weight.sum())
        engine.train()
        with pytest.raises(tiered_zero.errors.ParameterOffloadedError):
            weight.sum()
    plain = torch.nn.Linear(2, 2)
    with tiered_zero.gathered(plain, modify=True):  # nobody pages it: left alone
        plain.weight.data.zero_()
    assert not plain.weight.any()


def test_weights_from_any_placement_load_into_any_other(swap_path):
    """Eight steps with a move in the middle: weights carry over exactly; (optimizer state is a checkpoint's affair)."""
    weights = None
    for placement, other in itertools.pairwise([("none", "cpu"), ("nvme", "nvme"), ("cpu", "none"), ("nvme", "cpu")]):
        with tiered(build(), swap_path, placement, adamw) as engine:
            train(engine, batch, 1)
            weights = dict(named_weights(engine.module))
        with tiered(build(3), swap_path, other, adamw) as engine:
            engine.module.load_state_dict(weights)
            assert all(torch.equal(value, weights[name]) for name, value in named_weights(engine.module))
