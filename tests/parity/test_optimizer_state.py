"""optimizer.state_dict() and load_state_dict() are torch's: the same keys, the same bits, from and to any tier."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import tiered_zero
from tests.parity.test_optimizers import RowScaled
from tests.support.inspection import unverified_nbytes
from tests.support.inspection.insides import state_view
from tests.support.models import ParityGPT, batch, groups, rows, two_layers
from tests.support.pairwise import by_turns
from tests.support.trainers import Plain, adamw, named_weights, same_bits, tiered, train
from tiered_zero.errors import BudgetError, EngineFailedError, ModelError, TransferError
from tiered_zero.rules.native_rules import Lion

Maker = Callable[[nn.Module], Optimizer]


def made(kind: type[Optimizer], **options: Any) -> Maker:
    return lambda model: kind(groups(model), **options)


MAKERS: dict[str, Maker] = {
    "AdamW": made(torch.optim.AdamW, lr=3e-3, amsgrad=True),
    "Adam": made(torch.optim.Adam, lr=3e-3),
    "SGD": made(torch.optim.SGD, lr=0.05),
    "SGD-momentum": made(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adagrad": made(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.1),
    "Lion": made(Lion, lr=1e-3),
    "RMSprop": made(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    "NAdam": made(torch.optim.NAdam),
    "Adafactor": made(torch.optim.Adafactor, lr=0.01),
    "AdamW-fused": made(torch.optim.AdamW, lr=3e-3, fused=True),
    "RowScaled": made(RowScaled),
}


def build() -> ParityGPT:
    torch.manual_seed(0)
    return ParityGPT(num_blocks=1)


def data(first: int, number: int) -> tuple[Any, ...]:
    return (*batch(first + number), (first + number) % 3 == 1)


def run(trainer: Any, first: int, steps: int = 2) -> list[Any]:
    """Steps `first`, `first` + 1, ... of one course of training."""
    return train(trainer, partial(data, first), steps)


def assert_same_state(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """The whole state_dict: keys, groups, types, dtypes, shapes and bits."""
    assert expected["param_groups"] == found["param_groups"]
    assert expected["state"].keys() == found["state"].keys()
    for index, values in expected["state"].items():
        assert values.keys() == found["state"][index].keys()
        for name, value in values.items():
            other = found["state"][index][name]
            assert type(value) is type(other) and same_bits(value, other), (index, name, value, other)


def assert_same_weights(expected: nn.Module, found: nn.Module) -> None:
    weights = dict(named_weights(found))
    assert all(same_bits(value, weights[name]) for name, value in named_weights(expected))


@pytest.mark.parametrize(
    ("name", "placement"), by_turns(list(MAKERS), [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")])
)
def test_state_moves_between_plain_torch_and_every_tier(name: str, placement: tuple[str, str], swap_path: Path) -> None:
    """Plain torch's state goes into an engine that has made other steps, and on into a new plain optimizer."""
    plain = Plain(build(), MAKERS[name])
    run(plain, 0)
    with tiered(build(), swap_path, placement, MAKERS[name]) as engine:
        fresh = engine.optimizer.state_dict()
        assert_same_state(MAKERS[name](build()).state_dict(), fresh)
        run(engine, 0)
        assert_same_state(plain.optimizer.state_dict(), engine.optimizer.state_dict())
        run(engine, 50)  # away from it: other weights, other state
        engine.module.load_state_dict(plain.module.state_dict())
        engine.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
        assert_same_state(plain.optimizer.state_dict(), engine.optimizer.state_dict())
        assert run(plain, 3) == run(engine, 3)

        back = Plain(build(), MAKERS[name])
        back.module.load_state_dict(dict(named_weights(engine.module)))
        back.optimizer.load_state_dict(engine.optimizer.state_dict())
        run(plain, 6)
        run(engine, 6)
        run(back, 6)
        assert_same_weights(plain.module, engine.module)
        assert_same_weights(plain.module, back.module)
        assert_same_state(plain.optimizer.state_dict(), engine.optimizer.state_dict())


@pytest.mark.parametrize(
    ("update", "clipping"), [("barrier", 1.0), ("overlapped", 0.0), ("overlapped", 1.0), ("delayed", 0.0)]
)
def test_updates_under_way_end_first_and_nothing_read_ahead_is_used(
    update: str, clipping: float, swap_path: Path
) -> None:
    runtime = {"update": update, "delay_start_step": 1} if update == "delayed" else {"update": update}
    with tiered(build(), swap_path, ("nvme", "nvme"), MAKERS["AdamW"], 1, clipping, runtime=runtime) as engine:
        run(engine, 0)
        saved = engine.optimizer.state_dict()
        weights = dict(named_weights(engine.module))
        expected = run(engine, 3)
        engine.flush()
        engine.module.load_state_dict(weights)
        engine.optimizer.load_state_dict(saved)
        assert_same_state(saved, engine.optimizer.state_dict())
        found = run(engine, 3)
        if update != "delayed":  # its first update after a pause is seen one step late, as at a start
            assert expected == found


def test_groups_change_in_place(swap_path: Path) -> None:
    """One list of dicts, which the user's optimizer, its schedulers and the engine see."""
    model = build()
    own = MAKERS["AdamW"](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(own, 0.5)
    with tiered(model, swap_path, ("cpu", "cpu"), lambda _: own) as engine:
        before = [id(group) for group in engine.optimizer.param_groups]
        run(engine, 0)
        saved = engine.optimizer.state_dict()
        scheduler.step()
        engine.optimizer.load_state_dict(saved)
        assert [id(group) for group in engine.optimizer.param_groups] == before
        assert engine.optimizer.param_groups is own.param_groups
        assert engine.get_lr() == [3e-3, 0.01]
        scheduler.step()
        assert engine.get_lr() == [1.5e-3, 0.005]
        for group in engine.optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0
        weights = dict(named_weights(engine.module))
        run(engine, 3)
        assert all(same_bits(value, weights[name]) for name, value in named_weights(engine.module))


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("state_format", "placement"),
    by_turns(["bf16_remainder", "lossy_bf16_moments", "lossy_8bit_moments"], [("cpu", "cpu"), ("nvme", "nvme")]),
)
def test_a_state_format_takes_its_own_state_back_exactly(
    state_format: str, placement: tuple[str, str], swap_path: Path
) -> None:
    runtime = {"state_format": state_format}
    with tiered(build(), swap_path, placement, MAKERS["AdamW"], runtime=runtime, **BF16) as engine:
        run(engine, 0)
        saved = engine.optimizer.state_dict()
        assert all(value.dtype is torch.float32 for values in saved["state"].values() for value in values.values())
        assert all((values["exp_avg_sq"] >= 0).all() for values in saved["state"].values())
        weights = dict(named_weights(engine.module))
        kept = engine.optimizer.state_dict()
        engine.optimizer.load_state_dict(saved)
        assert_same_state(kept, engine.optimizer.state_dict())
        assert all(same_bits(value, weights[name]) for name, value in named_weights(engine.module))
        run(engine, 3)
        assert unverified_nbytes(engine, "state") == 0


def test_remainders_keep_their_masters_while_state_is_loaded(swap_path: Path) -> None:
    """A state is taken back in the middle, as it was: training goes on with the bits of a run that did not do that."""
    seen = []
    for loads in (False, True):
        runtime = {"state_format": "bf16_remainder"}
        with tiered(build(), swap_path, ("nvme", "nvme"), MAKERS["AdamW"], runtime=runtime, **BF16) as engine:
            run(engine, 0)
            if loads:
                engine.optimizer.load_state_dict(engine.optimizer.state_dict())
            seen.append([*run(engine, 3), *(value for _, value in named_weights(engine.module))])
    assert all(same_bits(left, right) for left, right in zip(*seen, strict=True))


@pytest.mark.parametrize("state_format", ["lossy_bf16_moments", "lossy_8bit_moments"])
def test_fp32_state_is_rounded_into_a_lossy_format(state_format: str, swap_path: Path) -> None:
    plain = Plain(build(), MAKERS["AdamW"])
    run(plain, 0)
    expected = plain.optimizer.state_dict()
    with tiered(build(), swap_path, ("cpu", "cpu"), MAKERS["AdamW"], runtime={"state_format": state_format}) as engine:
        engine.optimizer.load_state_dict(expected)
        found = engine.optimizer.state_dict()["state"]
    for index, values in expected["state"].items():
        assert values["step"] == found[index]["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            largest = values[name].abs().max()
            bound = largest * (2**-8 if state_format == "lossy_bf16_moments" else 2 / 127)
            assert (values[name] - found[index][name]).abs().max() <= bound


def test_state_of_an_optimizer_that_is_passed_in_is_taken_by_the_native_rule(swap_path: Path) -> None:
    """It goes the same way as loaded state, into any state format."""
    model = build()
    plain, own = Plain(build(), MAKERS["AdamW"]), MAKERS["AdamW"](model)
    run(plain, 0)
    model.load_state_dict(plain.module.state_dict())
    own.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    with tiered(model, swap_path, ("nvme", "nvme"), lambda _: own) as engine:
        assert_same_state(plain.optimizer.state_dict(), engine.optimizer.state_dict())
        assert run(plain, 3) == run(engine, 3)
        assert unverified_nbytes(engine, "state") == 0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda saved: saved["param_groups"].pop(), "param groups of"),
        (lambda saved: saved["param_groups"][0]["params"].pop(), "param groups of"),
        (lambda saved: saved["param_groups"][0].pop("lr"), "missing: lr. Load"),
        (lambda saved: saved["param_groups"][1].update(betas=None), "raised TypeError"),
        (lambda saved: saved["param_groups"][0].update(betas=(1, 0.9)), "raised ZeroDivisionError"),
        (lambda saved: saved["state"].update({99: {}}), "found state of .99."),
        (lambda saved: saved["state"][1].update(exp_avg=torch.zeros(3)), r"tokens.weight.*exp_avg.*found \(3,\)"),
        (lambda saved: saved["state"][1].pop("exp_avg_sq"), "tokens.weight.*exp_avg_sq"),
        (lambda saved: saved["state"][1].pop("step"), "raised KeyError over it: 'step'"),
        (lambda saved: saved["state"][1].update(more=torch.zeros(3)), "tokens.weight.*more"),
        (lambda saved: saved.pop("state"), "An optimizer state_dict was expected.*KeyError"),
    ],
)
def test_state_that_does_not_fit_is_refused_before_anything_changes(
    spoil: Callable[[dict[str, Any]], None], words: str, swap_path: Path
) -> None:
    with tiered(build(), swap_path, ("cpu", "cpu"), made(torch.optim.Adam, lr=3e-3)) as engine:
        run(engine, 0)
        before = engine.optimizer.state_dict()
        spoiled = copy.deepcopy(before)
        spoil(spoiled)
        with pytest.raises(ModelError, match=words):
            engine.optimizer.load_state_dict(spoiled)
        assert_same_state(before, engine.optimizer.state_dict())
        run(engine, 3)


@pytest.mark.parametrize("update", ["barrier", "overlapped"])
@pytest.mark.parametrize(("betas", "error"), [(None, TypeError), ((1, 0.9), ZeroDivisionError)])
def test_a_value_that_no_step_can_take_ends_the_next_update_if_no_state_is_loaded(
    betas: Any, error: type[Exception], update: str, swap_path: Path
) -> None:
    runtime = {"update": update}
    with tiered(build(), swap_path, ("cpu", "cpu"), made(torch.optim.Adam, lr=3e-3), runtime=runtime) as engine:
        saved = engine.optimizer.state_dict()
        saved["param_groups"][1].update(betas=betas)
        engine.optimizer.load_state_dict(saved)
        with pytest.raises((error, EngineFailedError)) as caught:
            run(engine, 0)
        is_late = isinstance(caught.value, EngineFailedError)  # the update failed after its step() had returned
        assert isinstance(caught.value.__cause__ if is_late else caught.value, error)
        with pytest.raises(EngineFailedError):
            run(engine, 0)


def test_options_that_need_more_state_than_planned_are_refused(swap_path: Path) -> None:
    plain = Plain(build(), made(torch.optim.Adam, lr=3e-3, amsgrad=True))
    run(plain, 0)
    with tiered(build(), swap_path, ("cpu", "cpu"), made(torch.optim.Adam, lr=3e-3)) as engine:
        with pytest.raises(ModelError, match=r"needs \['max_exp_avg_sq'\] besides"):
            engine.optimizer.load_state_dict(plain.optimizer.state_dict())
        run(engine, 0)


def test_state_that_does_not_fit_into_free_memory_is_refused_with_its_size(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered(build(), swap_path, ("nvme", "nvme"), MAKERS["Adam"]) as engine:
        run(engine, 0)
        largest = engine.module.tokens.weight
        monkeypatch.setattr(state_view, "available_host_nbytes", lambda: 20_000)
        with pytest.raises(BudgetError, match=r"it takes \d+\.\d KiB and 19\.5 KiB are free.*read_state"):
            engine.optimizer.state_dict()
        values = engine.optimizer.read_state(largest)
        assert values["exp_avg"].shape == largest.shape and values["step"] == 2


def test_the_state_mapping_names_who_has_state_and_hands_none_out(swap_path: Path) -> None:
    with tiered(build(), swap_path, ("cpu", "cpu"), MAKERS["Adam"]) as engine:
        state, model = engine.optimizer.state, engine.module
        assert len(state) == 0 and model.norm.weight not in state
        run(engine, 0, 1)
        assert model.norm.weight in state and model.never_used not in state and model.scale not in state
        assert len(state) == len(engine.optimizer.state_dict()["state"]) == len(list(state))
        for reach in (
            lambda: state[model.norm.weight]["exp_avg"],
            lambda: state[model.norm.weight].get("exp_avg"),
            lambda: [dict(values) for values in state.values()],
            lambda: "step" in state[model.norm.weight],
            lambda: bool(state[model.norm.weight]),
            lambda: state.__setitem__(model.norm.weight, {}),
            lambda: state.__delitem__(model.norm.weight),
            state.clear,
            lambda: state.pop(model.norm.weight),
            lambda: state.pop(model.norm.weight, None),
            lambda: state.update({}),
        ):
            with pytest.raises(ModelError, match=r"state_dict\(\) or read_state"):
                reach()
        for param, values in state.items():
            state[param] = values  # as Lightning does, which moves every tensor that it finds there
        with pytest.raises(ModelError, match="cannot be copied or pickled"):
            copy.deepcopy(engine.optimizer)
    with pytest.raises(ModelError, match="run is closed"):
        engine.optimizer.state_dict()


def test_hooks_around_state_dict_are_torchs(swap_path: Path) -> None:
    with tiered(build(), swap_path, ("cpu", "cpu"), MAKERS["Adam"]) as engine:
        run(engine, 0)
        seen: list[str] = []
        optimizer = engine.optimizer
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("before"))
        optimizer.register_state_dict_post_hook(lambda _, found: {**found, "more": seen.append("after")})
        optimizer.register_load_state_dict_pre_hook(lambda _, given: {**given, "state": {}})
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        assert "more" in optimizer.state_dict()
        optimizer.load_state_dict(optimizer.state_dict())
        assert seen == ["before", "after", "before", "after", "loaded"]
        assert not optimizer.state_dict()["state"], "the hook left no state: all parameters start anew"


def test_a_broken_transfer_while_state_is_loaded_stops_training(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of the state is the old one and part the new one: nothing goes on from that."""
    engine = tiered(build(), swap_path, ("cpu", "cpu"), MAKERS["Adam"])
    run(engine, 0)
    saved = engine.optimizer.state_dict()

    def fail(*_: Any, **__: Any) -> None:
        raise TransferError("planted")

    monkeypatch.setattr(state_view.StateView, "fill", fail)
    with pytest.raises(TransferError, match="planted"):
        engine.optimizer.load_state_dict(saved)
    with pytest.raises(tiered_zero.errors.TieredZeroError, match="planted"):
        run(engine, 3)
    engine.close()


@pytest.mark.parametrize(
    ("placement", "reset"), by_turns([("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")], ["handle", "own"])
)
def test_an_empty_state_starts_all_parameters_anew(placement: tuple[str, str], reset: str, swap_path: Path) -> None:
    """As code does that restarts training: of the optimizer passed in, and of the one returned."""
    plain, model = Plain(build(), MAKERS["AdamW"]), build()
    own = MAKERS["AdamW"](model)
    with tiered(model, swap_path, placement, lambda _: own) as engine:
        assert run(plain, 0) == run(engine, 0)
        for optimizer in (plain.optimizer, engine.optimizer if reset == "handle" else own):
            optimizer.state = defaultdict(dict)
        assert own.state is engine.optimizer.state or reset == "own"
        assert run(plain, 3) == run(engine, 3)
        own.state = {}
        assert not own.state_dict()["state"] and not engine.optimizer.state
        run(engine, 6)
        for optimizer in (own, engine.optimizer):
            with pytest.raises(ModelError, match=r"optimizer\.state = \{\}"):
                optimizer.state = {model.norm.weight: {}}
                engine.step()
        assert own.state is engine.optimizer.state and len(own.state) > 0


def test_state_that_is_read_or_loaded_after_a_reset_of_the_own_optimizer_follows_it(swap_path: Path) -> None:
    plain, model = Plain(build(), MAKERS["AdamW"]), build()
    own = MAKERS["AdamW"](model)
    with tiered(model, swap_path, ("cpu", "cpu"), lambda _: own) as engine:
        assert run(plain, 0) == run(engine, 0)
        saved = copy.deepcopy(engine.optimizer.state_dict())
        for read in (
            lambda: engine.optimizer.state,
            lambda: engine.optimizer.state_dict()["state"],
            lambda: engine.optimizer.read_state(model.norm.weight),
        ):
            own.state = {}
            assert not read()
            engine.optimizer.load_state_dict(saved)
        own.state = {}
        engine.optimizer.load_state_dict(saved)
        assert run(plain, 2) == run(engine, 2)
    assert own.state is not engine.optimizer.state


def test_a_reset_that_came_too_late_for_a_step_is_said_and_made_after_it(swap_path: Path) -> None:
    plain, model = Plain(two_layers()), two_layers()
    own = adamw(model)
    runtime = {"update": "overlapped"}
    with tiered(model, swap_path, ("cpu", "cpu"), lambda _: own, runtime=runtime) as engine:
        for index in range(4):
            for trainer in (plain, engine):
                trainer.backward(trainer(rows(index)).square().mean())
            if index == 2:
                own.state = {}
                with pytest.raises(ModelError, match=r"Call step\(\) first"):
                    engine.step()
            for trainer in (plain, engine):
                trainer.step()
            if index == 2:
                plain.optimizer.state = defaultdict(dict)
                assert not engine.optimizer.state_dict()["state"]
        assert_same_weights(plain.module, engine.module)
        assert_same_state(plain.optimizer.state_dict(), engine.optimizer.state_dict())
