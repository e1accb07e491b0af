"""What scripts written for DeepSpeed rely on: its names, its calls, its answers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.configs import ADAMW, config_of, zero_section
from tests.support.inspection.insides import MISSING
from tests.support.models import rows as batch
from tests.support.models import two_layers as make_model
from tiered_zero.errors import ConfigError, MissingNameError, ModelError

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = config_of(optimizer=ADAMW)
OFFLOADED = zero_section("cpu", "cpu")


def test_a_step_within_an_accumulation_applies_nothing() -> None:
    with tiered_zero.initialize(model=make_model(), config={**CONFIG, "gradient_accumulation_steps": 2})[0] as engine:
        seen = []
        for step in range(4):
            engine.backward(engine(batch(step)).sum())
            engine.step()
            seen.append(engine.was_step_applied())
        assert seen == [False, True, False, True]


def test_the_unit_in_use_fits_where_fewer_live_parameters_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    zero = {**OFFLOADED, "stage3_max_live_parameters": 10}
    with tiered_zero.initialize(model=make_model(), config={**CONFIG, "zero_optimization": zero})[0] as engine:
        engine.backward(engine(batch()).sum())
        engine.step()
    assert "stage3_max_live_parameters: 10 is less than the 2048 elements that are in use at once" in caplog.text


def test_a_model_that_stays_on_the_device_whole_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for threshold in (127, 128):
        caplog.clear()
        zero = {**OFFLOADED, "stage3_param_persistence_threshold": threshold}
        tiered_zero.initialize(model=make_model(), config={**CONFIG, "zero_optimization": zero})[0].close()
        said = "zero_optimization.offload_param has nothing to move: no parameter has more than 128 elements"
        assert (said in caplog.text) == (threshold == 128)


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_engine_without_an_optimizer_evaluates(device: str, frozen: bool, swap_path: Path) -> None:
    model = make_model().requires_grad_(not frozen)
    expected, weights = model(batch()).detach(), {name: value.clone() for name, value in model.state_dict().items()}
    zero = {**OFFLOADED, "offload_param": {"device": device, "nvme_path": str(swap_path), "max_in_cpu": 0}}
    config = config_of(zero, bf16={"enabled": False})
    engine, optimizer, loader, scheduler = tiered_zero.initialize(model=model, config=config)
    with engine:
        assert (optimizer, engine.optimizer, loader, scheduler, engine.get_lr() + engine.get_mom()) == (
            None,
            None,
            None,
            None,
            [],
        )
        engine.eval()
        for _ in range(3):
            with torch.no_grad():
                assert torch.equal(engine(batch()), expected)
        found = engine.module.state_dict()
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        with tiered_zero.gathered(engine.module):
            assert torch.equal(next(engine.module.parameters()), weights["0.weight"])
        loss = engine(batch().requires_grad_()).sum()
        with pytest.raises(ModelError, match="This engine evaluates: initialize"):
            engine.backward(loss)
        with pytest.raises(ModelError, match="This engine evaluates: initialize"):
            engine.step()
        if not frozen:
            with pytest.raises(ModelError, match="This engine evaluates: initialize"):
                engine(batch()).sum().backward()
        with torch.no_grad():
            assert torch.equal(engine(batch()), expected)


def test_in_half_precision_an_evaluation_takes_two_bytes_an_element() -> None:
    config = config_of(OFFLOADED, bf16={"enabled": True})
    with tiered_zero.initialize(model=make_model(), config=config)[0] as engine:
        assert engine(batch().bfloat16()).dtype == torch.bfloat16
        assert {row.kind for row in engine.plan.rows} == {"param", "param_window"}


def build(**more: Any) -> tiered_zero.Engine:
    return tiered_zero.initialize(model=make_model(), config={**CONFIG, **more})[0]


def test_the_user_says_where_an_accumulation_ends() -> None:
    with build() as engine:
        before = engine.module.state_dict()
        applied = []
        for step, last in enumerate((False, False, True, None)):
            engine.set_gradient_accumulation_boundary(last)
            engine.backward(engine(batch(step)).sum())
            engine.step()
            applied.append((engine.was_step_applied(), engine.global_steps, engine.micro_steps))
            if not last and last is not None:
                assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
        assert applied == [(False, 0, 1), (False, 0, 2), (True, 1, 3), (True, 2, 4)]
        assert engine.global_samples == 8


@pytest.mark.parametrize("update", ["barrier", "overlapped"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("zero", [{}, OFFLOADED], ids=["resident", "cpu"])
def test_the_caller_decides_how_many_micro_batches_a_step_has(zero: Any, clipping: float, update: str) -> None:
    model, plain = make_model(), make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0)
    config = {**CONFIG, "managed_gradient_accumulation": False, "gradient_accumulation_steps": 2}
    config |= {"gradient_clipping": clipping, "zero_optimization": zero}
    config["tiered_zero"] = {**CONFIG["tiered_zero"], "update": update}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    with tiered_zero.initialize(model=model, config=config)[0] as engine:
        for number, micro in enumerate(range(count) for count in (1, 3, 2, 1, 4)):
            for index in micro:
                engine.backward(engine(batch(10 * number + index)).square().mean())
                (plain(batch(10 * number + index)).square().mean() / 2).backward()
                assert not engine.is_gradient_accumulation_boundary()
            engine.step()
            assert engine.was_step_applied()
            if clipping:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), clipping)
            optimizer.step()
            optimizer.zero_grad()
            assert all(
                torch.equal(a, b) for a, b in zip(engine.module.state_dict().values(), plain.parameters(), strict=True)
            )
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (5, 11, 44)
        engine.backward(engine(batch()).sum())
        engine.abort_step()
        assert engine.micro_steps == 11
        with pytest.raises(ModelError, match="managed_gradient_accumulation false, with which every"):
            engine.set_gradient_accumulation_boundary(True)


def test_gradients_are_divided_by_the_accumulation_steps_by_default() -> None:
    norms = []
    for scaled in (True, False):
        with build(gradient_accumulation_steps=4) as engine, engine.no_sync():
            for _ in range(4):
                engine.backward(engine(batch()).sum(), scale_wrt_gas=scaled)
                engine.step()
            norms.append(engine.get_global_grad_norm())
    assert norms[1] == pytest.approx(4 * norms[0])


@pytest.mark.parametrize("zero", [{}, OFFLOADED], ids=["resident", "cpu"])
def test_adam_without_bias_correction_has_the_bits_of_its_formula(zero: dict[str, Any], tmp_path: Path) -> None:
    params = {"lr": 0.01, "weight_decay": 0.1, "bias_correction": False}
    config = {**CONFIG, "optimizer": {"type": "AdamW", "params": params}, "zero_optimization": zero}
    model, plain = make_model(), make_model()
    moments = {name: (torch.zeros_like(weight), torch.zeros_like(weight)) for name, weight in plain.named_parameters()}
    for part in range(2):  # the second goes on from what the first has saved
        with tiered_zero.initialize(model=model, config=config)[0] as engine:
            if part:
                assert engine.load_checkpoint(tmp_path)[0] is not None
            for step in range(2):
                engine.backward(engine(batch(2 * part + step)).square().mean())
                engine.step()
                plain.zero_grad()
                plain(batch(2 * part + step)).square().mean().backward()
                with torch.no_grad():
                    for name, weight in plain.named_parameters():
                        exp_avg, exp_avg_sq = moments[name]
                        exp_avg.lerp_(weight.grad, 1 - 0.9)
                        exp_avg_sq.mul_(0.999).addcmul_(weight.grad, weight.grad, value=1 - 0.999)
                        weight.mul_(1 - 0.01 * 0.1).addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(1e-8), value=-0.01)
            engine.save_checkpoint(tmp_path)
            found = engine.module.state_dict()
        model = make_model()
    assert all(torch.equal(found[name], weight) for name, weight in plain.state_dict().items())


def test_questions() -> None:
    with build(zero_optimization=OFFLOADED, scheduler={"type": "WarmupLR"}) as engine:
        assert (engine.zero_optimization_stage(), engine.zero_optimization(), engine.zero_cpu_offload()) == (
            3,
            True,
            True,
        )
        assert (engine.local_rank, engine.global_rank, engine.world_size, engine.dp_world_size) == (0, 0, 1, 1)
        assert engine.get_batch_info() == (4, 4, 1)
        assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.dynamic_loss_scale()) == (False, False, False)
        assert (engine.gradient_clipping(), engine.get_mom()) == (0.0, [(0.9, 0.999)])
        assert engine.module_state_dict().keys() == engine.module.state_dict().keys()
        engine.set_lr(0.5)
        assert engine.get_lr() == [0.5]
        engine.destroy()
        with pytest.raises(ModelError, match="closed"):
            engine(batch())


def test_what_trainers_ask_of_the_engine() -> None:
    """Names that Accelerate, Transformers and Lightning use besides the calls."""
    with build(
        zero_optimization=OFFLOADED, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    ) as engine:
        assert engine._modules == {"module": engine.module}
        config = engine.config
        assert config.get("gradient_accumulation_steps") == 1 and config["zero_optimization"].get("stage") == 3
        assert config["tiered_zero"]["checkpoint"].get("async") is False and "train_batch_size" in config
        assert config.get("steps_per_print", 7) == 7 and config.get("comet") is None and "comet" not in config
        assert engine.tput_timer.avg_samples_per_sec() == 0.0
        engine.backward(engine(batch()).sum())
        engine.step()
        engine.tput_timer.update_epoch_count()
        assert engine.tput_timer.epoch_count == 1 and engine.tput_timer.avg_samples_per_sec() > 0
        assert engine.zero_gather_16bit_weights_on_model_save()
        next(engine.module.parameters()).requires_grad_(False)
        names = engine.module.state_dict().keys()
        assert engine._zero3_consolidated_16bit_state_dict().keys() == names
        assert names - engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True).keys() == {
            "0.weight"
        }


def test_another_scheduler_takes_over_and_is_saved(tmp_path: Path) -> None:
    def step(engine: tiered_zero.Engine) -> float:
        engine.backward(engine(batch()).sum())
        engine.step()
        return engine.get_lr()[0]

    with build(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 2}}) as engine:
        engine.set_lr(1.0)
        engine.lr_scheduler = None
        assert [step(engine), step(engine)] == [1.0, 1.0]
        engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.5)
        assert [step(engine), step(engine)] == [0.5, 0.25]
        engine.save_checkpoint(tmp_path)
        assert step(engine) == 0.125
        engine.load_checkpoint(tmp_path)
        assert engine.lr_scheduler.last_epoch == 2 and step(engine) == 0.125
        other = torch.optim.SGD(make_model().parameters(), lr=1.0)
        for wrong in ("x", torch.optim.lr_scheduler.StepLR(other, 1)):
            with pytest.raises(ConfigError, match="lr_scheduler"):
                engine.lr_scheduler = wrong


def test_the_optimizer_tells_overflow_and_scale() -> None:
    with build(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}) as engine:
        seen = []
        for scale in (1.0, float("inf"), 1.0):
            engine.backward(engine(batch().half()).float().sum() * scale)
            engine.step()
            seen.append((engine.optimizer.overflow, engine.optimizer.cur_scale, engine.optimizer.loss_scale))
        assert seen == [(False, 16.0, 16.0), (True, 8.0, 8.0), (False, 8.0, 8.0)]


def test_what_is_not_here_says_so() -> None:
    with build() as engine:
        for name in MISSING:
            assert not hasattr(engine, name)
            with pytest.raises(MissingNameError) as caught:
                getattr(engine, name)
            assert re.match(rf"engine\.{name} of DeepSpeed does not exist here: .*\.", str(caught.value))
            assert "Sequential" not in str(caught.value)


def test_an_unknown_name_blames_nobody() -> None:
    text = r"^Neither the engine nor its module \(Sequential\) has an attribute 'x'"
    with build() as engine, pytest.raises(AttributeError, match=text):
        engine.x  # noqa: B018


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_evaluations_outside_of_no_grad_keep_no_unit_on_the_device(device: str, swap_path: Path) -> None:
    """Each leaves a graph, which names every weight; plain PyTorch needs memory for activations alone."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
    inputs = [torch.randn(4, 64, requires_grad=True) for _ in range(3)]
    expected = [torch.autograd.grad(model(value).sum(), value)[0] for value in inputs]
    zero = {**OFFLOADED, "offload_param": {"device": device, "nvme_path": str(swap_path), "max_in_cpu": 0}}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0},
        "tiered_zero": {"device": "cpu", "device_memory_limit": 3 * (64 * 65 + 64) * 4},
    }
    with tiered_zero.initialize(model=model, config=config)[0] as engine:
        outs = [engine(value) for value in inputs]
        found = [torch.autograd.grad(out.sum(), value)[0] for out, value in zip(outs, inputs, strict=True)]
    assert all(map(torch.equal, found, expected))
