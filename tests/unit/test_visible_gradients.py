"""`param.grad` between backward and step(): a live view of the gradient's home, on every tier."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.configs import ADAMW, SMALL_DEVICE, config_of, zero_section
from tests.support.pairwise import by_turns
from tiered_zero.errors import ModelError

pytestmark = pytest.mark.usefixtures("one_thread")


def build(
    path: Path, device: str, threshold: int = 0, update: str = "barrier", steps: int = 1, **more: Any
) -> tiered_zero.Engine:
    config = {
        **config_of(zero_section(device, device, path, stage3_param_persistence_threshold=threshold), optimizer=ADAMW),
        "gradient_accumulation_steps": steps,
        "tiered_zero": {**SMALL_DEVICE, "device": "cpu", "update": update},
        **more,
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[0].bias.requires_grad_(False)
    return tiered_zero.initialize(model=model, config=config)[0]


def backward(engine: tiered_zero.Engine) -> None:
    engine.backward(engine(torch.ones(4, 8)).square().mean())


PLACES = [("none", 0), ("cpu", 0), ("nvme", 0), ("cpu", 1000)]
places = pytest.mark.parametrize(("device", "threshold"), PLACES)


@places
def test_a_gradient_is_one_object_in_the_shape_of_its_parameter(device: str, threshold: int, swap_path: Path) -> None:
    with build(swap_path, device, threshold) as engine:
        weight, frozen = engine.module[0].weight, engine.module[0].bias
        for _ in range(3):
            assert weight.grad is None and frozen.grad is None
            backward(engine)
            assert weight.grad is not None and weight.grad is weight.grad
            assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
            assert type(weight.grad) is torch.Tensor and not weight.grad.requires_grad
            assert frozen.grad is None
            engine.step()


@places
def test_a_gradient_kept_beyond_its_step_is_refused(device: str, threshold: int, swap_path: Path) -> None:
    """Its memory holds the next gradient: silently, without this."""
    ends: dict[str, Callable[[tiered_zero.Engine], Any]] = {
        "step": lambda engine: engine.step(),
        "zero_grad": lambda engine: engine.zero_grad(),
        "model.zero_grad": lambda engine: engine.module.zero_grad(),
        "abort_step": lambda engine: engine.abort_step(),
        "None": lambda engine: setattr(engine.module[0].weight, "grad", None),
    }
    with build(swap_path, device, threshold) as engine:
        for end in ends.values():
            backward(engine)
            kept = engine.module[0].weight.grad
            assert kept.norm() > 0
            end(engine)
            for use in (torch.Tensor.norm, torch.clone, lambda grad: grad * 2, lambda grad: grad.numpy()):
                with pytest.raises(ModelError, match=r"read as parameter\.grad in an earlier step.*clone\(\)"):
                    use(kept)
            assert repr(kept) == "ExpiredGradient()"


@places
def test_wrong_gradients_are_refused_with_what_was_expected(device: str, threshold: int, swap_path: Path) -> None:
    with build(swap_path, device, threshold) as engine:
        weight = engine.module[0].weight
        backward(engine)
        for wrong in (torch.ones(8), torch.ones(8, 8, dtype=torch.float64), torch.ones(8, 8, device="meta")):
            with pytest.raises(ModelError, match=r"shape \(8, 8\), torch\.float32, on cpu was expected for 0\.weight"):
                weight.grad = wrong
        with pytest.raises(ModelError, match="sparse"):
            weight.grad = torch.ones(8, 8).to_sparse()
        assert weight.grad.norm() > 0, "as it was"
        weight.grad = given = torch.ones(8, 8)
        assert weight.grad is given
        del weight.grad
        assert weight.grad is None


@pytest.mark.parametrize("accumulates", [False, True])
def test_where_updates_begin_in_backward_it_is_refused_from_the_first_step(accumulates: bool, swap_path: Path) -> None:
    steps = 2 if accumulates else 1
    with build(swap_path, "nvme", update="overlapped", steps=steps) as engine:
        weight = engine.module[0].weight

        def assign() -> None:
            weight.grad = torch.ones(8, 8)

        for _ in range(3):
            if accumulates:
                backward(engine)
                assert weight.grad.norm() > 0, "nothing begins in this backward"
                engine.step()
            backward(engine)
            for use in (lambda: weight.grad, assign):
                with pytest.raises(ModelError, match=r"0\.weight cannot be read.*optimizer_in_backward.*gradient_clip"):
                    use()
            with pytest.raises(ModelError, match="optimizer_in_backward"):
                nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
            assert engine.module[0].bias.grad is None
            engine.step()
            assert weight.grad is None


@places
def test_sums_of_16_bit_gradients_are_shown_in_fp32(device: str, threshold: int, swap_path: Path) -> None:
    with build(swap_path, device, threshold, steps=2, bf16={"enabled": True}) as engine:
        weight = engine.module[2].weight
        x = torch.ones(4, 8, dtype=torch.bfloat16)
        engine.backward(engine(x).square().mean())
        first = weight.grad.clone()
        engine.step()
        engine.backward(engine(x).square().mean())
        assert first.dtype == weight.grad.dtype == torch.float32
        assert torch.equal(weight.grad, 2 * first), "the same batch twice"
        weight.grad = weight.grad.bfloat16()
        weight.grad = weight.grad.float() * 0
        engine.step()
        assert engine.get_global_grad_norm() > 0
    with build(swap_path, device, threshold, bf16={"enabled": True}) as engine:
        engine.backward(engine(x).square().mean())
        assert engine.module[2].weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_copies_between_backward_and_step_are_plain(device: str, swap_path: Path) -> None:
    with build(swap_path, device) as engine:
        for _ in range(3):
            backward(engine)
            weight = engine.module[0].weight
            grad = weight.grad
            with tiered_zero.gathered(engine.module):
                assert weight.grad is grad
                copied = copy.deepcopy(engine.module[2].bias)
                assert torch.equal(engine.module[2](torch.zeros(8)), copied)
            assert type(copied) is nn.Parameter and copied.grad is None
            engine.step()
    if device == "none":
        assert {type(param) for param in engine.module.parameters()} == {nn.Parameter}, "after close()"


class OwnParameter(nn.Parameter):
    """A parameter class of the user's."""

    def describe(self) -> str:
        return f"{len(self)} rows"


def test_a_parameter_of_a_users_class_stays_one(swap_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    model.weight = OwnParameter(model.weight.detach())
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "tiered_zero": {"device": "cpu"},
    }
    with tiered_zero.initialize(model=model, config=config)[0] as engine:
        for _ in range(2):
            backward(engine)
            assert isinstance(model.weight, OwnParameter) and model.weight.describe() == "8 rows"
            assert model.weight.grad.norm() > 0
            assert type(copy.deepcopy(model.weight)) is OwnParameter
            engine.step()
    assert type(model.weight) is OwnParameter


SCALE = 2.0**16
"""One in fp16 times this is not finite."""


def half_backward(engine: tiered_zero.Engine, number: int = 0) -> None:
    rows = torch.linspace(-1, 1, 32).view(4, 8) / 64 + number / 8
    engine.backward(engine(rows.half()).float().square().mean() / 64)


def masters(engine: tiered_zero.Engine) -> dict[str, torch.Tensor]:
    found = {name: engine.peek(name) for name, param in engine.module.named_parameters() if param.requires_grad}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(("device", "threshold", "steps"), [("none", 0, 1), ("cpu", 0, 2), ("nvme", 0, 1)])
def test_a_loss_scale_is_not_seen(device: str, threshold: int, steps: int, swap_path: Path) -> None:
    """Reading changes no bit of the update; what is shown is the gradient without the scale, in fp32."""
    ends = []
    for reads in (False, True):
        options: dict[str, Any] = {"steps": steps, "gradient_clipping": 1e-3}
        with build(swap_path, device, threshold, fp16={"enabled": True, "loss_scale": SCALE}, **options) as engine:
            for number in range(4):
                half_backward(engine, number)
                for name, param in engine.module.named_parameters() if reads else ():
                    if param.requires_grad:
                        grad = param.grad
                        assert grad is param.grad and grad.dtype == torch.float32 and 0 < grad.norm() < 1
                        assert torch.equal(engine.peek(name, "grad"), grad)
                engine.step()
            ends.append(masters(engine))
            if reads:
                with pytest.raises(ModelError, match=r"read as parameter\.grad in an earlier step"):
                    grad.norm()
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize(
    ("by_hand", "place"),
    by_turns(["in place", "clipped", "numpy", "assigned", "assigned half", "poked", "added up"], PLACES, 2),
)
def test_gradients_without_the_scale_are_taken(by_hand: str, place: tuple[str, int], swap_path: Path) -> None:
    device, threshold = place
    steps = 2 if by_hand == "added up" else 1
    fp16 = {"enabled": True, "loss_scale": SCALE}
    with build(swap_path, device, threshold, steps=steps, gradient_clipping=0.0, fp16=fp16) as engine:
        weight = engine.module[2].weight
        plain = nn.Parameter(engine.peek("2.weight"))
        optimizer = torch.optim.AdamW([plain], **{**ADAMW["params"], "weight_decay": 0.0})
        for number in range(3):
            half_backward(engine, number)
            plain.grad = weight.grad.clone()
            if by_hand == "in place":
                weight.grad.mul_(3)
                plain.grad.mul_(3)
            elif by_hand == "clipped":
                nn.utils.clip_grad_norm_([weight], 1e-4)
                nn.utils.clip_grad_norm_([plain], 1e-4)
            elif by_hand == "numpy":
                weight.grad.detach().numpy()[1, 2] = 7
                plain.grad[1, 2] = 7
            elif by_hand == "poked":
                engine.poke("2.weight", "grad", plain.grad.fill_(100.0))
                assert torch.equal(engine.peek("2.weight", "grad"), plain.grad)
            elif by_hand == "added up":
                weight.grad.mul_(3)
                plain.grad.mul_(3)
                engine.step()
                half_backward(engine, number + 1)
                more = weight.grad - plain.grad
                assert more.norm() > 0
                plain.grad += more
            else:
                dtype = torch.half if by_hand == "assigned half" else torch.float32
                given = engine.module[0].weight.grad.to(dtype) if number % 2 else torch.ones(8, 8, dtype=dtype)
                weight.grad = given
                plain.grad = given.float().clone()
            assert torch.equal(weight.grad.float(), plain.grad)
            engine.step()
            optimizer.step()
            assert engine.was_step_applied() and torch.equal(engine.peek("2.weight"), plain)


def test_zeros_and_overflows_under_a_loss_scale(swap_path: Path) -> None:
    with build(swap_path, "cpu", fp16={"enabled": True, "loss_scale": SCALE}) as engine:
        weight, before = engine.module[2].weight, masters(engine)
        half_backward(engine)
        grad = weight.grad
        engine.zero_grad(set_to_none=False)
        assert weight.grad is grad and not grad.any()
        engine.abort_step()
        engine.backward(engine(torch.full((4, 8), 60.0).half()).float().square().mean() * 1e4)
        assert not weight.grad.isfinite().all()
        engine.step()
        assert not engine.was_step_applied()
        assert all(torch.equal(value, before[name]) for name, value in masters(engine).items())


def test_a_step_without_backward_is_warned_of_once(swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), build(swap_path, "cpu") as engine:
        backward(engine)
        engine.step()
        assert "without backward" not in caplog.text
        before = engine.module.state_dict()
        for _ in range(3):
            engine.step()
        assert sum("step() without backward()" in message for message in caplog.messages) == 1
        assert engine.global_steps == 4
        assert all(torch.equal(before[name], value) for name, value in engine.module.state_dict().items())


@places
def test_hooks_see_sums_of_16_bit_gradients_in_fp32(device: str, threshold: int, swap_path: Path) -> None:
    """Two backwards of one batch, each followed by a hook that halves: (g / 2 + g) / 2, which fp32 holds exactly."""
    seen: list[torch.dtype] = []

    def halve(param: nn.Parameter) -> None:
        assert param.grad is not None
        seen.append(param.grad.dtype)
        param.grad.mul_(0.5)

    with build(swap_path, device, threshold, bf16={"enabled": True}) as engine:
        weight = engine.module[2].weight
        x = torch.ones(4, 8, dtype=torch.bfloat16)
        engine.backward(engine(x).square().mean())
        first = weight.grad.float()
        engine.zero_grad()
        weight.register_post_accumulate_grad_hook(halve)
        for _ in range(2):
            engine.backward(engine(x).square().mean())
        assert seen == [torch.bfloat16, torch.float32]
        assert torch.equal(weight.grad, 0.75 * first)
        assert weight.grad_dtype == torch.bfloat16
        engine.step()


@places
def test_a_hook_that_raises_leaves_the_dtype_of_gradients(device: str, threshold: int, swap_path: Path) -> None:
    """The sum that the hook saw was fp32."""

    def fail(param: nn.Parameter) -> None:
        assert param.grad is not None
        if param.grad.dtype == torch.float32:
            raise ValueError("inside")

    with build(swap_path, device, threshold, bf16={"enabled": True}) as engine:
        weight = engine.module[2].weight
        weight.register_post_accumulate_grad_hook(fail)
        x = torch.ones(4, 8, dtype=torch.bfloat16)
        engine.backward(engine(x).square().mean())
        with pytest.raises(ValueError, match="inside"):
            engine.backward(engine(x).square().mean())
        assert weight.grad_dtype == torch.bfloat16
        engine.backward(engine(x).square().mean())
        engine.step()
