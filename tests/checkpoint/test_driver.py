"""What the driver keeps goes through a checkpoint with equal bits, and what does not fit changes nothing."""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

import tiered_zero
from tests.support.inspection import driver_state, policy
from tests.support.models import groups, rows, two_layers
from tests.support.schedulers import SCHEDULERS, sequence
from tests.support.trainers import tiered
from tiered_zero.checkpoint.driver import LoadParts, join_states, own_state, to_json
from tiered_zero.checkpoint.load import differences
from tiered_zero.data import TrainingLoader
from tiered_zero.errors import EngineFailedError, ModelError, NonFiniteError, StoreError
from tiered_zero.rules import lr


def sgd(model: nn.Module) -> Optimizer:
    return SGD(groups(model), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(groups(model), lr=0.05)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., tiered_zero.Engine]]:
    """Builds engines over `two_layers` and closes them."""
    engines = []

    def build(**options: Any) -> tiered_zero.Engine:
        options = {"placement": ("cpu", "cpu"), "make_optimizer": sgd, **options}
        engines.append(tiered(two_layers(), tmp_path, **options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def train(engine: tiered_zero.Engine, steps: int, first: int = 0) -> list[Any]:
    """Micro-batches; returns the values of the param groups after each."""
    seen = []
    for number in range(first, first + steps):
        engine.backward(engine(rows(number)).square().mean())
        engine.step()
        seen.append(options_of(engine))
    return seen


def options_of(engine: tiered_zero.Engine) -> list[Any]:
    return copy.deepcopy([{**group, "params": len(group["params"])} for group in engine.optimizer.param_groups])


def capture(engine: tiered_zero.Engine, loader: TrainingLoader | None = None, **client_state: Any) -> Any:
    """What a file has of it."""
    state = driver_state(engine, loader).capture(client_state)
    return json.loads(json.dumps(state))


def restore(engine: tiered_zero.Engine, saved: Any, loader: TrainingLoader | None = None, **parts: bool) -> Any:
    driver, loaded = driver_state(engine, loader), LoadParts(**parts)
    state = driver.check(saved, loaded)
    driver.restore_optimizer(state, loaded)
    return driver.restore(state, loaded)


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_every_scheduler_is_here() -> None:
    torchs = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    own = {kind.__name__ for kind in lr.Schedule.__subclasses__() for kind in (kind, *kind.__subclasses__())}
    assert (torchs | own) - SCHEDULERS.keys() == {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"}


@pytest.mark.parametrize(
    ("name", "make_optimizer", "at"),
    [*((name, adamw, 4) for name in SCHEDULERS), *((name, sgd, 1) for name in list(SCHEDULERS)[:3])],
)
def test_a_schedule_goes_on(
    make: Callable[..., tiered_zero.Engine], name: str, at: int, make_optimizer: Callable[[nn.Module], Optimizer]
) -> None:
    """With the betas that some schedules move, and without; at its beginning, and past a milestone."""
    options = {"make_scheduler": SCHEDULERS[name], "make_optimizer": make_optimizer}
    whole = make(**options)
    train(whole, at)
    saved = capture(whole)
    expected = train(whole, 4)
    resumed = make(**options)
    restore(resumed, saved)
    assert capture(resumed) == saved
    assert train(resumed, 4) == expected
    assert resumed.lr_scheduler.get_last_lr() == whole.lr_scheduler.get_last_lr()


def test_a_plateau_scheduler_goes_through_client_state(make: Callable[..., tiered_zero.Engine]) -> None:
    engine, other = make(), make()
    plateau = lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=1)
    for metric in (1.0, 2.0, 3.0):
        plateau.step(metric)
    found = restore(other, capture(engine, plateau=plateau.state_dict()))["plateau"]
    assert found == plateau.state_dict()
    again = lr_scheduler.ReduceLROnPlateau(other.optimizer, patience=1)
    again.load_state_dict(found)
    for metric in (4.0, 5.0, 6.0):
        plateau.step(metric), again.step(metric)
        assert engine.get_lr() == other.get_lr()


class Longer(lr_scheduler.PolynomialLR):
    """One that keeps its own number of steps."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "total_iters": self.total_iters})


def test_a_scheduler_of_the_program_may_keep_a_part_of_its_own(make: Callable[..., tiered_zero.Engine]) -> None:
    engine = make(make_scheduler=lambda o: lr_scheduler.ChainedScheduler([Longer(o, total_iters=4)]))
    train(engine, 2)
    other = make(make_scheduler=lambda o: lr_scheduler.ChainedScheduler([Longer(o, total_iters=8)]))
    restore(other, capture(engine))
    (longer,) = other.lr_scheduler._schedulers
    assert (longer.last_epoch, longer.total_iters) == (2, 8)


class Silent:
    """A scheduler without state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...


class Deep(lr_scheduler.StepLR):
    """One that holds what no file can."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.model = [{"layer": nn.Linear(1, 1)}]
        self.function = print
        super().__init__(optimizer, 2)


def test_a_scheduler_that_cannot_be_saved_is_refused(make: Callable[..., tiered_zero.Engine]) -> None:
    with pytest.raises(ModelError, match=r"lr_scheduler: Silent cannot be saved, for it has no state_dict"):
        capture(make(make_scheduler=Silent))
    with pytest.raises(
        ModelError, match=r"lr_scheduler\['state'\]\['model'\]\[0\]\['layer'\]: a value of type .*Linear"
    ):
        capture(make(make_scheduler=Deep))


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "message"),
    [
        (SCHEDULERS["StepLR"], SCHEDULERS["LinearLR"], "is a StepLR; this run's is a LinearLR"),
        (None, SCHEDULERS["LinearLR"], "has no lr_scheduler, and this run has a LinearLR"),
        (SCHEDULERS["SequentialLR"], lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.LinearLR(o)], [3]), "expected the saved states of 2 schedulers"),
    ],
    ids=["other", "none", "shorter"],
)  # fmt: skip
def test_another_schedule_is_refused_unless_asked_for(
    make: Callable[..., tiered_zero.Engine], saved_by: Any, loaded_by: Any, message: str
) -> None:
    engine = make(make_scheduler=saved_by)
    train(engine, 2)
    saved = capture(engine)
    other = make(make_scheduler=loaded_by)
    before = capture(other)
    with pytest.raises(ModelError, match=message):
        restore(other, saved)
    assert capture(other) == before
    schedule = other.lr_scheduler.state_dict()
    restore(other, saved, lr_scheduler_states=False)
    assert other.get_lr() == engine.get_lr()
    assert other.lr_scheduler.state_dict() == schedule


class Refusing(lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("gamma")


def test_a_scheduler_that_refuses_its_state_ends_the_engines_use(
    make: Callable[..., tiered_zero.Engine], tmp_path: Path
) -> None:
    engine, other = (make(make_scheduler=lambda optimizer: Refusing(optimizer, 2)) for _ in range(2))
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "saved")
    with pytest.raises(KeyError, match="gamma"):
        other.load_checkpoint(tmp_path / "saved")
    with pytest.raises(EngineFailedError, match="ended in its middle, by KeyError"):
        train(other, 1)


def test_a_schedule_that_is_left_out_is_said(
    make: Callable[..., tiered_zero.Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine, other = make(make_scheduler=SCHEDULERS["StepLR"]), make()
    train(engine, 2)
    restore(other, capture(engine))
    assert "the checkpoint has the state of a StepLR, which is left out" in caplog.text
    assert other.get_lr() == engine.get_lr()


# -- param groups ------------------------------------------------------------------------------------------------------


def test_changed_options_are_restored_in_place(make: Callable[..., tiered_zero.Engine]) -> None:
    def tensor_rate(model: nn.Module) -> Optimizer:
        return SGD(groups(model), lr=torch.tensor(0.05), momentum=0.9)

    engine, other = make(make_optimizer=tensor_rate), make(make_optimizer=tensor_rate)
    first, second = engine.optimizer.param_groups
    first["weight_decay"] = 0.25
    first["lr"].fill_(0.125)
    second["mine"] = ("kept", 3)
    own, rate = other.optimizer.param_groups, other.optimizer.param_groups[0]["lr"]
    same = [own, *own]
    own[1]["theirs"] = 1
    restore(other, capture(engine))
    assert all(left is right for left, right in zip(same, [other.optimizer.param_groups, *own], strict=True))
    assert own[0]["lr"] is rate and rate == 0.125
    assert own[0]["weight_decay"] == 0.25 and own[1]["mine"] == ("kept", 3) and own[1]["theirs"] == 1
    assert [len(group["params"]) for group in own] == [2, 2]


@pytest.mark.parametrize(
    "make_optimizer",
    [lambda model: SGD(model.parameters(), lr=0.1), lambda model: SGD(groups(model)[::-1][:1], lr=0.1)],
    ids=["one", "fewer"],
)
def test_other_groups_are_refused(make: Callable[..., tiered_zero.Engine], make_optimizer: Any) -> None:
    engine, other = make(), make(make_optimizer=make_optimizer)
    before = capture(other)
    with pytest.raises(ModelError, match=r"param groups of .* as this optimizer has; found \[2, 2\]"):
        restore(other, capture(engine))
    assert capture(other) == before


def test_another_optimizer_takes_the_schedule_alone(make: Callable[..., tiered_zero.Engine]) -> None:
    def scheduler(optimizer: Optimizer) -> Any:
        return lr_scheduler.StepLR(optimizer, 1, 0.5)

    engine = make(make_scheduler=scheduler)
    train(engine, 2)
    saved = capture(engine)
    other = make(make_scheduler=scheduler, make_optimizer=adamw)
    with pytest.raises(ModelError, match="missing: betas, eps"):
        restore(other, saved)
    restore(other, saved, optimizer_states=False)
    assert other.get_lr() == engine.get_lr() and other.lr_scheduler.last_epoch == 2
    plain = make(make_optimizer=lambda model: AdamW(model.parameters(), lr=0.3))
    restore(plain, saved, optimizer_states=False)
    assert plain.get_lr() == [0.3] and plain.global_steps == 2


@pytest.mark.parametrize("schedule", [[], 5, {"type": 3, "state": {}}, {"type": "StepLR"}, {"type": [], "state": 1}])
def test_a_schedule_that_was_never_saved_is_refused(make: Callable[..., tiered_zero.Engine], schedule: Any) -> None:
    """Also by a run that has none."""
    engine = make()
    with pytest.raises(StoreError, match=r"The checkpoint's driver state is not what was saved .*lr_scheduler"):
        restore(engine, {**capture(engine), "lr_scheduler": schedule})


# -- counts ------------------------------------------------------------------------------------------------------------


def test_counts_and_norm_go_on(make: Callable[..., tiered_zero.Engine]) -> None:
    engine, other = make(accumulation=2), make(accumulation=2)
    train(engine, 6)
    restore(other, capture(engine))
    assert (other.micro_steps, other.global_steps) == (6, 3)
    assert other.get_global_grad_norm() == engine.get_global_grad_norm() is not None
    assert other.was_step_applied() and not other.is_gradient_accumulation_boundary()


def test_a_second_backward_is_remembered(make: Callable[..., tiered_zero.Engine]) -> None:
    """From then on no update begins in backward, on either side of the checkpoint."""
    engine, other = make(), make()
    loss = engine(rows()).square().mean()
    engine.backward(loss, retain_graph=True)
    engine.abort_step()
    train(engine, 1)
    engine.backward(engine(rows()).mean())
    engine.step()
    saved = capture(engine)
    assert saved["counts"]["one_backward_each"]
    saved["counts"]["one_backward_each"] = False
    restore(other, saved)
    other.backward(other(rows()).square().mean())
    assert not policy(other).is_open
    other.step()


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_delayed_run_goes_on_where_it_was(make: Callable[..., tiered_zero.Engine], at: int) -> None:
    options = {"make_optimizer": adamw, "runtime": {"update": "delayed", "delay_start_step": 2}}
    engine, other = make(**options), make(**options)
    train(engine, at)
    restore(other, capture(engine))
    assert policy(other).num_applied == policy(engine).num_applied == at


def test_the_loss_scale_goes_on(make: Callable[..., tiered_zero.Engine]) -> None:
    options = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2}}

    def steps(engine: tiered_zero.Engine, numbers: range) -> list[Any]:
        seen = []
        for number in numbers:
            loss = engine(rows(number).half()).float().square().mean()
            engine.backward(loss * (math.inf if number in (2, 3, 7, 8, 9) else 1.0))
            engine.step()
            seen.append((engine.loss_scale, engine.skipped_steps, engine.was_step_applied(), engine.optimizer.overflow))
        return seen

    engine, other = make(**options), make(**options)
    steps(engine, range(4))
    saved = capture(engine)
    expected = steps(engine, range(4, 14))
    restore(other, saved)
    assert other.optimizer.overflow and other.skipped_steps == 2
    assert capture(other)["loss_scaler"] == saved["loss_scaler"]
    assert steps(other, range(4, 14)) == expected
    assert len({scale for scale, *_ in expected}) > 2
    plain = make()
    restore(plain, saved)
    assert plain.loss_scale == 1.0
    fresh = make(**options)
    restore(fresh, saved, optimizer_states=False)
    assert fresh.loss_scale == 16.0 and fresh.skipped_steps == 2


def test_skips_in_a_row_go_on(make: Callable[..., tiered_zero.Engine]) -> None:
    options = {"bf16": {"enabled": True, "check_grad_overflow": True}}

    def overflow(engine: tiered_zero.Engine) -> None:
        engine.backward(engine(rows().bfloat16()).float().square().mean() * math.inf)
        engine.step()

    engine, other = make(**options), make(**options)
    for _ in range(60):
        overflow(engine)
    restore(other, capture(engine))
    with pytest.raises(NonFiniteError, match="100 steps in a row"):
        for _ in range(40):
            overflow(other)


# -- random states -----------------------------------------------------------------------------------------------------


def draws() -> tuple[Any, ...]:
    normal = random.gauss(0, 1), numpy.random.normal(), torch.randn(3).tolist()
    return normal, random.random(), numpy.random.rand(3).tolist(), torch.rand(3).tolist()


def test_every_generator_goes_on(make: Callable[..., tiered_zero.Engine]) -> None:
    engine = make()
    draws()  # half of a pair of normal numbers is kept
    saved = capture(engine)
    expected = [draws() for _ in range(200)]
    restore(engine, saved)
    assert [draws() for _ in range(200)] == expected


def test_another_generator_of_numpy_is_said(
    make: Callable[..., tiered_zero.Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    saved = capture(engine)
    saved["random_states"]["numpy"]["bit_generator"] = "PCG64"
    saved["random_states"]["devices"] = {"cuda:7": to_json(torch.zeros(1, dtype=torch.uint8), "a state")}
    restore(engine, saved)
    assert "numpy's generator is MT19937 here and was PCG64" in caplog.text
    assert "there is no cuda:7 here" in caplog.text


def test_every_rank_goes_on_with_its_own_numbers(
    make: Callable[..., tiered_zero.Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    first = capture(engine)
    torch.manual_seed(5)
    second = capture(engine)
    joined = join_states(first, [own_state(first), own_state(second)])
    driver = driver_state(engine)

    def resume_as(rank: int, world_size: int) -> Any:
        ranks: Any = SimpleNamespace(rank=rank, world_size=world_size)
        driver.restore(driver.check(joined, ranks=ranks))
        return capture(engine)["random_states"]

    assert resume_as(1, 2) == second["random_states"] != first["random_states"]
    assert resume_as(0, 1) == first["random_states"]
    assert not caplog.text
    torch.manual_seed(6)
    kept = capture(engine)["random_states"]
    assert resume_as(2, 3) == kept
    assert "rank 2 was not there when 2 saved: its random numbers go on as they are" in caplog.text
    for wrong in ([], 3, [{}], [own_state(first), {**own_state(second), "loader": {"$tensor": 1}}]):
        joined["ranks"] = wrong
        with pytest.raises(StoreError, match=r"driver state (is not what was saved|cannot be read)"):
            resume_as(1, 2)


# -- which parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_states", [False, True])
@pytest.mark.parametrize("lr_scheduler_states", [False, True])
@pytest.mark.parametrize("module_only", [False, True])
def test_the_parts_that_are_asked_for_are_restored(
    make: Callable[..., tiered_zero.Engine], optimizer_states: bool, lr_scheduler_states: bool, module_only: bool
) -> None:
    def scheduler(optimizer: Optimizer) -> Any:
        return lr_scheduler.StepLR(optimizer, 1, 0.5)

    engine, other = make(make_scheduler=scheduler), make(make_scheduler=scheduler)
    train(engine, 2)
    engine.optimizer.param_groups[0]["momentum"] = 0.5
    saved, fresh = capture(engine, mine=[1]), other.get_lr()
    torch.rand(1)
    before = torch.get_rng_state()
    parts = {"optimizer_states": optimizer_states, "lr_scheduler_states": lr_scheduler_states}
    assert restore(other, saved, **parts, module_only=module_only) == {"mine": [1]}
    optimizer, schedule = optimizer_states and not module_only, lr_scheduler_states and not module_only
    assert other.global_steps == (0 if module_only else 2)
    assert torch.equal(torch.get_rng_state(), before) == module_only
    assert other.optimizer.param_groups[0]["momentum"] == (0.5 if optimizer else 0.9)
    assert other.get_lr() == (engine.get_lr() if optimizer or schedule else fresh)
    assert other.lr_scheduler.last_epoch == (2 if schedule else 0)
    assert capture(other)["loss_scaler"] is None


# -- client_state ------------------------------------------------------------------------------------------------------


def test_client_state_comes_back_and_a_value_that_cannot_be_saved_is_named(
    make: Callable[..., tiered_zero.Engine],
) -> None:
    engine = make()
    state = {"epoch": 3, "best": math.inf, "seen": [1, 2], "order": torch.arange(3)}
    found = restore(engine, capture(engine, **state))
    assert torch.equal(found.pop("order"), state.pop("order")) and found == state  # type: ignore[call-overload]
    with pytest.raises(ModelError, match=r"^client_state\['model'\]\[3\]: a value of type builtin_func"):
        capture(engine, model=[0, 1, 2, print])
    assert driver_state(engine).capture(None) == capture(engine)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="client_state was expected as a dict; found str"):
        driver_state(engine).capture("epoch 3")  # type: ignore[arg-type]


def test_the_loaders_position_goes_on(
    make: Callable[..., tiered_zero.Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine, data = make(), [torch.tensor(number) for number in range(10)]
    loader = TrainingLoader(data, 2, shuffle=True)  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    saved = capture(engine, loader)
    resumed = TrainingLoader(data, 2, shuffle=True)  # type: ignore[arg-type]
    restore(engine, saved, resumed)
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in batches]
    assert not caplog.records
    restore(engine, capture(engine), resumed)
    assert "no position in training_data" in caplog.text


# -- hostile files -----------------------------------------------------------------------------------------------------


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in value if isinstance(value, dict) else range(min(2, len(value))) if isinstance(value, list) else ():
        yield from paths(value[key], (*path, key))


JUNK = [
    None, True, -1, 0, 2**70, 1.5, "x", [], [[]], {"$tuple": []}, {"a": {"b": 1}},
    to_json(torch.zeros(2, dtype=torch.uint8), "junk"),
]  # fmt: skip


def changed_states(whole: Any, junk: Sequence[Any] = JUNK) -> Iterator[Any]:
    """Every place of a state replaced by every junk value, deleted, or added to."""
    for path in paths(whole):
        for change in range(len(junk) + 2) if path else ():
            saved = holder = copy.deepcopy(whole)
            for key in path[:-1]:
                holder = holder[key]
            if change < len(junk):
                holder[path[-1]] = junk[change]
            elif change == len(junk):
                holder.pop(path[-1])
            elif isinstance(holder[path[-1]], dict):
                holder[path[-1]]["more"] = 1
            elif isinstance(holder[path[-1]], list):
                holder[path[-1]].append(1)
            else:
                continue
            yield saved


def test_changed_states_are_refused_or_restored(make: Callable[..., tiered_zero.Engine]) -> None:
    """`check` refuses by one of our errors and changes nothing, or `restore` restores. Of a schedule torch judges."""
    engine = make(make_scheduler=sequence, fp16={"enabled": True, "initial_scale_power": 4})
    engine.backward(engine(rows().half()).float().square().mean())
    engine.step()
    loader = TrainingLoader([torch.tensor(number) for number in range(10)], 2)  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    whole = capture(engine, loader, mine=1)
    driver = driver_state(engine, loader)
    num_refused, taken = 0, []
    for saved in changed_states(whole):
        try:
            state = driver.check(saved)
            taken.append((saved["lr_scheduler"], state))
        except (StoreError, ModelError) as error:
            num_refused += 1
            assert len(str(error)) < 2500
    assert num_refused > 500 and 100 < len(taken) < num_refused
    assert capture(engine, loader, mine=1) == whole
    for schedule, state in [*taken, (whole["lr_scheduler"], driver.check(whole))]:
        if schedule == whole["lr_scheduler"]:
            driver.restore_optimizer(state)
            driver.restore(state)


@pytest.mark.parametrize("saved", [None, [], {}, {"counts": 1}, 5, "x"])
def test_what_is_no_state_is_refused(make: Callable[..., tiered_zero.Engine], saved: Any) -> None:
    with pytest.raises(StoreError, match=r"The checkpoint's driver state (is not what was saved|cannot be read)"):
        restore(make(), saved)


# -- what wrote it -----------------------------------------------------------------------------------------------------


def test_another_version_kernel_or_rule_is_said() -> None:
    now = {"tiered_zero": "0.1.0", "torch": "2.13.0", "kernel": "avx2", "rule": "adamw"}
    now |= {"world_size": 1, "num_threads": 2}
    assert differences({**now, "created_s": 5.0, "state_format": "fp32"}, now) == []
    lines = differences({**now, "torch": "2.12.0", "kernel": "avx512"}, now)
    assert [line.split(";")[0] for line in lines] == [
        "the checkpoint was written with torch 2.12.0",
        "the checkpoint was written with the update kernel's level avx512",
    ]
    assert len(differences({}, now)) == 6
