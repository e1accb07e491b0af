"""The optimizer that the user holds, driven as users drive optimizers."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

import tiered_zero
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
    host = {"device": "cpu"}
    zero = {"stage": 3, "offload_param": host, "offload_optimizer": host, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "zero_optimization": zero, **more}


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def values(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def test_every_scheduler_of_torch_is_tried() -> None:
    kinds = [kind for kind in vars(lr_scheduler).values() if inspect.isclass(kind) and issubclass(kind, LRScheduler)]
    names = {kind.__name__ for kind in kinds} - {"LRScheduler", "_LRScheduler"}
    assert {"StepLR", "ReduceLROnPlateau"} < names <= SCHEDULERS.keys()


@pytest.mark.parametrize("built", ["on the handle", "on the user's own, before"])
@pytest.mark.parametrize("name", SCHEDULERS)
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


def test_closures_are_refused_before_they_run(engine: Any) -> None:
    with pytest.raises(ModelError, match="Closures re-run forward and backward"):
        engine.optimizer.step(lambda: pytest.fail("it ran"))
    assert engine.is_gradient_accumulation_boundary() is False


def test_a_frozen_parameter_in_a_group_is_left_alone() -> None:
    """Many scripts pass model.parameters() whole."""
    model = build_model()
    model[0].weight.requires_grad_(False)
    kept = model[0].weight.detach().clone()
    with tiered_zero.initialize(model=model, optimizer=build_optimizer(model), config=settings())[0] as engine:
        engine.backward(engine(batch(0)).square().mean())
        engine.step()
        assert torch.equal(engine.module.state_dict()["0.weight"], kept)


def test_step_hooks_of_the_users_see_each_step(engine: Any) -> None:
    """torch's own extension point for optimizers."""
    seen: list[str] = []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    engine.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    engine.backward(engine(batch(0)).square().mean())
    engine.optimizer.step()
    assert seen == ["before", "after"]
