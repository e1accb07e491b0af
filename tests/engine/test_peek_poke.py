"""engine.peek and engine.poke: a master, a gradient, a moment by a parameter's name, on every tier and format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models import HIDDEN, VOCAB, ParityGPT, batch, two_layers
from tests.support.pairwise import by_turns
from tests.support.trainers import same_bits, tiered, train
from tiered_zero.engine.engine import Engine
from tiered_zero.errors import ModelError

PLACEMENTS = [("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")]
FORMATS = ("fp32", "bf16_remainder", "lossy_bf16_moments", "lossy_8bit_moments")
PLACED = [
    (state_format, placement)
    for state_format in FORMATS
    for placement in PLACEMENTS
    if (state_format, placement) != ("bf16_remainder", ("none", "cpu"))  # refused at the start
]


def opened(state_format: str, placement: tuple[str, str], swap_path: Path, **options: object) -> Engine:
    bf16 = {"bf16": {"enabled": state_format != "fp32"}}
    runtime = {"state_format": state_format, **options}
    return tiered(two_layers(), swap_path, placement, runtime=runtime, **bf16)


def run_steps(engine: Engine, steps: int) -> None:
    for number in range(steps):
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(rows.to(next(engine.module.parameters()).dtype)).float().square().mean())
        engine.step()


def ties(shape: tuple[int, ...]) -> torch.Tensor:
    """Values that bf16 rounds up, down, and from a tie, of both signs; zeros and infinities."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int64).to(torch.int32)
    bits.view(-1)[::3] = (bits.view(-1)[::3] & -0x10000) | 0x8000
    found = bits.view(torch.float32).clone()
    found[~found.isfinite()] = 1.5
    found.view(-1)[:4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    return found


@pytest.mark.parametrize(("placed", "steps"), by_turns(PLACED, [0, 2]))
def test_a_master_takes_every_value_exactly(placed: tuple[str, tuple[str, str]], steps: int, swap_path: Path) -> None:
    state_format, placement = placed
    with opened(state_format, placement, swap_path) as engine:
        run_steps(engine, steps)
        names = [name for name, _ in engine.module.named_parameters()]
        others = {name: engine.peek(name) for name in names}
        moments = {name: engine.peek(name, "exp_avg_sq") for name in names} if "8bit" not in state_format else {}
        value = ties((16, 8))
        engine.poke("0.weight", "master", value)
        found = engine.peek("0.weight", "master")
        assert found is not None and same_bits(found, value)
        weight = engine.module.state_dict()["0.weight"]
        assert same_bits(weight, value.to(weight.dtype))
        assert all(same_bits(engine.peek(name), others[name]) for name in names[1:]), "neighbours keep theirs"
        for name, moment in moments.items():
            if moment is None:
                assert steps == 0 and engine.peek(name, "exp_avg_sq") is None
            else:
                assert same_bits(engine.peek(name, "exp_avg_sq"), moment)


@pytest.mark.parametrize(("state_format", "placement"), PLACED)
def test_state_is_set_as_its_format_can_hold_it(state_format: str, placement: tuple[str, str], swap_path: Path) -> None:
    with opened(state_format, placement, swap_path) as engine:
        assert engine.peek("2.bias", "exp_avg") is None
        with pytest.raises(ModelError, match=r"2\.bias has no optimizer state before its first step"):
            engine.poke("2.bias", "exp_avg", torch.ones(4))
        with pytest.raises(ModelError, match="Expected a tensor as the value; found float"):
            engine.poke("2.bias", "master", 1.0)  # type: ignore[arg-type]
        run_steps(engine, 1)
        master = engine.peek("0.weight")
        value = torch.linspace(0, 1, 128).view(16, 8)
        for name, other in (("exp_avg", "exp_avg_sq"), ("exp_avg_sq", "exp_avg")):
            untouched = [engine.peek("0.weight", other), engine.peek("0.bias", name), engine.peek("2.weight", name)]
            engine.poke("0.weight", name, value)
            kept = value.bfloat16().float() if state_format == "lossy_bf16_moments" else value
            found = engine.peek("0.weight", name)
            assert found is not None
            if state_format == "lossy_8bit_moments":  # half a code: 0.5 / 127 of a square, 0.5 / 255 of a fourth power
                assert torch.allclose(found, value, rtol=0, atol=0.008)
                engine.poke("0.weight", name, found)
                kept, found = found, engine.peek("0.weight", name)
            assert torch.equal(found, kept)
            for before, after in zip(
                untouched,
                [engine.peek("0.weight", other), engine.peek("0.bias", name), engine.peek("2.weight", name)],
                strict=True,
            ):
                assert same_bits(after, before)
        assert torch.equal(engine.peek("0.weight", "step"), torch.tensor(1.0))
        with pytest.raises(ModelError, match="Expected optimizer state 'exp_avg' or 'exp_avg_sq'; found 'step'"):
            engine.poke("0.weight", "step", torch.tensor(5.0))
        assert same_bits(engine.peek("0.weight"), master), "its marks are in the signs of exp_avg_sq"


@pytest.mark.parametrize(
    ("update", "placement"), by_turns(["barrier", "overlapped", "delayed"], [("cpu", "cpu"), ("nvme", "nvme")])
)
def test_remainders_go_on_from_what_was_set_as_fp32_does(
    placement: tuple[str, str], update: str, swap_path: Path
) -> None:
    found = []
    for state_format in ("fp32", "bf16_remainder"):
        runtime = {"state_format": state_format, "update": update, "delay_start_step": 1}
        with tiered(two_layers(), swap_path, placement, runtime=runtime, bf16={"enabled": True}) as engine:
            for number in range(3):
                run_steps(engine, 2)
                engine.poke("2.weight", "master", torch.full((4, 16), 1 + 2**-8 + number * 2**-20))
            run_steps(engine, 2)
            found.append({name: engine.peek(name) for name, _ in engine.module.named_parameters()})
    assert all(same_bits(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_gradients_between_backward_and_step(placement: tuple[str, str], swap_path: Path) -> None:
    with tiered(two_layers(), swap_path, placement, clipping=1e9) as engine:
        assert engine.peek("0.weight", "grad") is None
        with pytest.raises(ModelError, match="There is no gradient to set"):
            engine.poke("0.weight", "grad", torch.zeros(16, 8))
        engine.backward(engine(torch.ones(4, 8)).square().mean())
        assert engine.peek("0.weight", "grad") is not None
        with pytest.raises(ModelError, match=r"gradient of shape \(16, 8\); found \(3,\)"):
            engine.poke("0.weight", "grad", torch.zeros(3))
        for name, param in engine.module.named_parameters():
            engine.poke(name, "grad", torch.zeros(param.shape))
        engine.step()
        assert engine.get_global_grad_norm() == 0.0
        assert engine.peek("0.weight", "grad") is None


def test_names(swap_path: Path) -> None:
    with tiered(ParityGPT(), swap_path, ("nvme", "nvme")) as engine:
        train(engine, batch, 1)
        assert same_bits(engine.peek("head.weight"), engine.peek("tokens.weight"))
        engine.poke("head.weight", "master", torch.ones(VOCAB, HIDDEN))
        assert torch.equal(engine.module.state_dict()["tokens.weight"], torch.ones(VOCAB, HIDDEN))
        with pytest.raises(ModelError, match=r"found 'norm\.wieght'\. Did you mean 'norm\.weight'\?"):
            engine.peek("norm.wieght")
        with pytest.raises(
            ModelError, match="Expected optimizer state 'exp_avg' or 'exp_avg_sq' or 'step'; found 'momentum'"
        ):
            engine.peek("norm.weight", "momentum")
        assert engine.peek("scale") is None and engine.peek("scale", "exp_avg") is None
        with pytest.raises(ModelError, match="scale is not trained"):
            engine.poke("scale", "master", torch.zeros(HIDDEN))
