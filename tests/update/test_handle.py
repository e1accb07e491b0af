"""The optimizer that the user holds, driven as users drive optimizers."""

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

import tiered_zero
from tests.support.configs import config_of, zero_section
from tests.support.models import rows as batch
from tests.support.pairwise import by_turns
from tiered_zero.errors import ModelError

NUM_STEPS = 8
METRICS = (3.0, 2.0, 2.5, 2.5, 2.5, 2.5, 1.0, 1.5)


pytestmark = pytest.mark.usefixtures("one_thread")


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, 2, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, 3),
}


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def build_optimizer(model: nn.Sequential) -> Optimizer:
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def settings(**more: Any) -> dict[str, Any]:
    return config_of(zero_section("cpu", "cpu"), **more)


def values(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def test_every_scheduler_of_torch_is_tried() -> None:
    kinds = [kind for kind in vars(lr_scheduler).values() if inspect.isclass(kind) and issubclass(kind, LRScheduler)]
    names = {kind.__name__ for kind in kinds} - {"LRScheduler", "_LRScheduler"}
    assert {"StepLR", "ReduceLROnPlateau"} < names <= SCHEDULERS.keys()


@pytest.mark.parametrize(("name", "built"), by_turns(list(SCHEDULERS), ["on the handle", "on the user's own, before"]))
def test_every_scheduler_of_torch_drives_it(name: str, built: str) -> None:
    """The same values each step as with a plain optimizer, the same weights, no warning about the order of steps."""
    plain = build_model()
    reference = build_optimizer(plain)
    scheduler = SCHEDULERS[name](reference)
    expected = []
    for step in range(NUM_STEPS):
        plain(batch(step)).square().mean().backward()
        reference.step()
        reference.zero_grad()
        _advance(scheduler, step)
        expected.append(values(reference))

    model = build_model()
    own = build_optimizer(model)
    if built != "on the handle":
        scheduler = SCHEDULERS[name](own)
    with tiered_zero.initialize(model=model, optimizer=own, config=settings())[0] as engine:
        if built == "on the handle":
            scheduler = SCHEDULERS[name](engine.optimizer)
        found = []
        for step in range(NUM_STEPS):
            engine.backward(engine(batch(step)).square().mean())
            engine.step()
            _advance(scheduler, step)
            found.append(values(engine.optimizer))
        weights = engine.module.state_dict()
    assert found == expected
    assert len({str(step) for step in expected}) > 1
    assert all(torch.equal(weights[key], weight) for key, weight in plain.state_dict().items())


def _advance(scheduler: Any, step: int) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(METRICS[step])
    else:
        scheduler.step()


@pytest.fixture
def engine() -> Iterator[Any]:
    model = build_model()
    engine = tiered_zero.initialize(
        model=model, optimizer=build_optimizer(model), config=settings(gradient_accumulation_steps=2)
    )[0]
    yield engine
    engine.close()


def test_it_is_an_optimizer_over_the_models_own_parameters(engine: Any) -> None:
    handle = engine.optimizer
    assert isinstance(handle, Optimizer)
    assert {id(p) for group in handle.param_groups for p in group["params"]} == set(map(id, engine.module.parameters()))
    assert len(handle.state) == 0
    assert handle.defaults["momentum"] == 0.9
    assert "lr: 0.05" in repr(handle)


def test_its_step_is_the_engines_step() -> None:
    """A loop that calls optimizer.step() counts micro-batches and gives the bits of one that calls engine.step()."""
    results = []
    for which in ("engine", "optimizer"):
        model = build_model()
        config = settings(gradient_accumulation_steps=2)
        engine, handle, _, _ = tiered_zero.initialize(model=model, optimizer=build_optimizer(model), config=config)
        with engine:
            for step in range(6):
                engine.backward(engine(batch(step)).square().mean())
                assert engine.is_gradient_accumulation_boundary() == (step % 2 == 1)
                assert {"engine": engine, "optimizer": handle}[which].step() is None
                handle.zero_grad()  # as loops do; it must not lose the first micro-batch
                assert engine.global_steps == (step + 1) // 2
            results.append(engine.module.state_dict())
    assert all(torch.equal(results[0][name], weight) for name, weight in results[1].items())


@pytest.mark.parametrize("asked", [None, "auto", 1.0])
@pytest.mark.parametrize("loop_clips", [0.0, 1.0, 5.0])
def test_a_loop_that_clips_by_itself_is_clipped_again_only_where_the_config_asks(
    loop_clips: float, asked: float | str | None
) -> None:
    """Loops of training frameworks: loss.backward(), a clip of their own, optimizer.step(), and a config without
    gradient_clipping."""

    def train(model: nn.Module, optimizer: Optimizer, clips: list[float]) -> list[Tensor]:
        params, norms = list(model.parameters()), []
        for step in range(3):
            (100 * model(batch(step))).square().mean().backward()
            norms += [nn.utils.clip_grad_norm_(params, most) for most in clips if most]
            optimizer.step()
            optimizer.zero_grad()
        assert all(norm > 10 for norm in norms[:: len(clips)])
        return [*norms, *model.state_dict().values()]

    plain, model = build_model(), build_model()
    config = {**settings(), "gradient_clipping": asked}
    if asked is None:
        del config["gradient_clipping"]
    engine, handle, _, _ = tiered_zero.initialize(model=model, optimizer=build_optimizer(model), config=config)
    with engine:
        found = train(model, handle, [loop_clips])
    again = [asked] if isinstance(asked, float) else []
    expected = train(plain, build_optimizer(plain), [loop_clips, *again])
    weights = len(plain.state_dict())
    assert all(map(torch.equal, expected[-weights:], found[-weights:]))


@pytest.mark.parametrize("asked", [None, 0.5])
def test_the_engines_own_step_clips_unless_the_config_says_otherwise(asked: float | None) -> None:
    model, plain = build_model(), build_model()
    config = {**settings(), "gradient_clipping": 1.0 if asked is None else asked}
    if asked is None:
        del config["gradient_clipping"]
    with tiered_zero.initialize(model=model, optimizer=build_optimizer(model), config=config)[0] as engine:
        engine.backward((100 * engine(batch(0))).square().mean())
        engine.step()
        found = engine.module.state_dict()
    (100 * plain(batch(0))).square().mean().backward()
    nn.utils.clip_grad_norm_(plain.parameters(), asked or 1.0)
    build_optimizer(plain).step()
    assert all(map(torch.equal, plain.state_dict().values(), found.values()))


def test_values_set_by_hand_count_from_the_next_step_on() -> None:
    plain, model = build_model(), build_model()
    reference = build_optimizer(plain)
    engine, handle, _, _ = tiered_zero.initialize(model=model, optimizer=build_optimizer(model), config=settings())
    with engine:
        for step in range(4):
            for optimizer in (reference, handle):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
                optimizer.param_groups[1]["momentum"] = 0.5 + 0.1 * step
                optimizer.param_groups[1]["weight_decay"] = 0.01 * step
            plain(batch(step)).square().mean().backward()
            reference.step()
            reference.zero_grad()
            engine.backward(engine(batch(step)).square().mean())
            engine.step()
        assert engine.get_lr() == [0.1 / 4, 0.05]
        weights = engine.module.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in plain.state_dict().items())


def test_parameters_cannot_join_later(engine: Any) -> None:
    before = len(engine.optimizer.param_groups)
    with pytest.raises(ModelError, match=r"cannot join after tiered_zero\.initialize\(\).*Pass all parameter groups"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(engine.optimizer.param_groups) == before


@pytest.mark.parametrize("by", ["handle", "own"])
def test_a_closure_is_called_before_the_update(by: str) -> None:
    """As Lightning's automatic optimization passes one; its loss is returned."""

    def train(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for step in range(4):

            def closure(step: int = step) -> float:
                optimizer.zero_grad()
                loss = model(batch(step)).square().mean()
                loss.backward()
                return float(loss.detach())

            with torch.no_grad():
                losses.append(optimizer.step(closure))
        return losses

    plain, model = build_model(), build_model()
    expected = train(plain, build_optimizer(plain))
    own = build_optimizer(model)
    engine, handle, _, _ = tiered_zero.initialize(model=model, optimizer=own, config=settings())
    with engine:
        assert train(model, {"handle": handle, "own": own}[by]) == expected
        weights = engine.module.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in plain.state_dict().items())


def test_a_closure_that_raises_makes_no_step(engine: Any) -> None:
    with pytest.raises(ValueError, match="its own"):
        engine.optimizer.step(lambda: (_ for _ in ()).throw(ValueError("its own")))
    assert (engine.micro_steps, engine.global_steps) == (0, 0)


def test_a_frozen_parameter_in_a_group_is_left_alone() -> None:
    """Many scripts pass model.parameters() whole."""
    model = build_model()
    model[0].weight.requires_grad_(False)
    kept = model[0].weight.detach().clone()
    with tiered_zero.initialize(model=model, optimizer=build_optimizer(model), config=settings())[0] as engine:
        engine.backward(engine(batch(0)).square().mean())
        engine.step()
        assert torch.equal(engine.module.state_dict()["0.weight"], kept)


@pytest.mark.parametrize("by", ["engine", "handle", "own"])
def test_step_hooks_fire_around_each_update(by: str) -> None:
    """Once per optimizer step, not per micro-batch, through either object; those of the user's own instance too."""
    seen: list[Any] = []
    model = build_model()
    own = build_optimizer(model)
    own.register_step_pre_hook(lambda *_: seen.append("own before"))
    with tiered_zero.initialize(model=model, optimizer=own, config=settings(gradient_accumulation_steps=2))[
        0
    ] as engine:
        step = {"engine": engine.step, "handle": engine.optimizer.step, "own": own.step}[by]

        def bias() -> Tensor:
            return engine.module.state_dict()["2.bias"]

        engine.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append((optimizer, bias())))
        removed = engine.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append((optimizer, bias())))
        own.register_step_post_hook(lambda *_: seen.append("own after"))
        for number in range(2):
            first = bias()
            engine.backward(engine(batch(number)).square().mean())
            step()
        before, after = seen[1][1], seen[2][1]
        assert [entry if isinstance(entry, str) else entry[0] for entry in seen] == [
            "own before", engine.optimizer, engine.optimizer, "own after",
        ]  # fmt: skip
        assert torch.equal(before, first) and not torch.equal(after, before)
        removed.remove()
        seen.clear()
        for number in range(2):
            engine.backward(engine(batch(number)).square().mean())
            step()
        assert len(seen) == 3


def test_a_skipped_step_fires_no_hooks() -> None:
    model = build_model()
    config = settings(fp16={"enabled": True, "initial_scale_power": 4})
    with tiered_zero.initialize(model=model, optimizer=build_optimizer(model), config=config)[0] as engine:
        engine.optimizer.register_step_pre_hook(lambda *_: pytest.fail("it fired"))
        engine.backward(engine(batch(0).half()).square().mean() * float("inf"))
        engine.step()
        assert engine.skipped_steps == 1


def test_the_users_own_instance_acts_as_the_handle() -> None:
    """Its step, state_dict, zero_grad ... are the run's; after close it is what it was."""
    plain = build_model()
    reference = build_optimizer(plain)
    model = build_model()
    own = build_optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(own, 0.9)
    with tiered_zero.initialize(model=model, optimizer=own, config=settings())[0] as engine:
        later = torch.optim.lr_scheduler.StepLR(own, 2)
        for number in range(3):
            for trainer, optimizer, net in ((engine, own, engine), (None, reference, plain)):
                optimizer.zero_grad()
                loss = net(batch(number)).square().mean()
                loss.backward() if trainer is None else trainer.backward(loss)
                optimizer.step()
        scheduler.step()
        later.step()
        weights = engine.module.state_dict()
        assert all(torch.equal(weights[key], weight) for key, weight in plain.state_dict().items())
        saved = own.state_dict()
        assert saved["state"].keys() == reference.state_dict()["state"].keys()
        own.load_state_dict(saved)
        assert own.param_groups is engine.optimizer.param_groups
        with pytest.raises(ModelError, match="cannot join after"):
            own.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(ModelError, match="read_state"):
            own.state[engine.module[0].weight]["exp_avg"]
    assert not own.state and own.state_dict()["state"] == {}
    before = [group["lr"] for group in own.param_groups]
    scheduler.step()
    assert [group["lr"] for group in own.param_groups] != before
    parameter = nn.Parameter(torch.ones(2))
    own.add_param_group({"params": [parameter], "lr": 1.0, "momentum": 0.0})
    parameter.grad = torch.ones(2)
    own.step()
    assert torch.equal(parameter.detach(), torch.zeros(2))


def test_the_users_own_instance_does_not_keep_the_engine() -> None:
    model = build_model()
    own = build_optimizer(model)
    engine = tiered_zero.initialize(model=model, optimizer=own, config=settings())[0]
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert "step" not in vars(own)


@pytest.mark.parametrize("is_own", [False, True])
def test_a_loop_that_accumulates_by_itself_is_refused_where_the_config_accumulates_too(is_own: bool) -> None:
    model = build_model()
    before = [param.clone() for param in model.parameters()]
    engine, optimizer, *_ = tiered_zero.initialize(
        model=model, optimizer=build_optimizer(model), config=config_of(gradient_accumulation_steps=2)
    )
    with engine:
        for index in range(2):
            loss = engine(batch(index)).square().mean()
            loss.backward() if is_own else engine.backward(loss)
        with pytest.raises(ModelError, match=r"after 2 backwards and gradient_accumulation_steps is 2.*divided twice"):
            optimizer.step()
        assert engine.micro_steps == 0 and all(map(torch.equal, before, model.state_dict().values()))
        engine.abort_step()
        for index in range(2):
            loss = engine(batch(index)).square().mean()
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)  # brings no gradients
            loss.backward() if is_own else engine.backward(loss)
            optimizer.step()
        assert engine.global_steps == 1
