"""bf16_remainder has the bits of fp32 in 12 bytes a parameter; the lossy formats train, and no cut changes their bits.

The model's first values are ties between two bf16 numbers in every third element, and one param group never moves, so
that its masters stay ties: where formats round them apart, losses and weights show it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered_zero
from tests.support.inspection import masters, units_on_device, unverified_nbytes
from tests.support.models import LENGTH, VOCAB, ParityGPT, batch
from tests.support.trainers import adamw, assert_same_bits, follow, num_different, tiered, train
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.plan.gpt_shape import GPTConfig

BF16 = {"bf16": {"enabled": True}}
UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
LOSSY = ("lossy_bf16_moments", "lossy_8bit_moments")
Script = Callable[[Any], list[Any]]


def build() -> ParityGPT:
    torch.manual_seed(0)
    model = ParityGPT()
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                bits = param.view(-1).view(torch.int32)[::3]
                bits.copy_((bits & -0x10000) | 0x8000)
    return model


def still_in_part(model: torch.nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2], "lr": 0.0}], lr=3e-3, amsgrad=True)


def data(number: int) -> tuple[Any, ...]:
    return (*batch(number), number % 5 == 1)


def course(engine: tiered_zero.Engine, accumulation: int) -> list[Any]:
    """Seven steps: one is skipped, weights are set by hand after another, and looked at after a third."""
    seen: list[Any] = []
    for number in range(7):
        for micro in range(accumulation):
            loss = engine(*data(number * accumulation + micro))
            engine.backward(loss * float("inf") if number == 3 and micro == 0 else loss)
            engine.step()
            seen.append(loss.detach())
        if number == 4:
            changed = [engine.module.tokens.weight, engine.module.never_used, engine.module.blocks[0].out.weight]
            with tiered_zero.gathered(changed, modify=True), torch.no_grad():
                for param in changed:
                    param[::2, 1] = 0.3
        if number == 5:
            seen += [value.clone() for value in engine.module.state_dict().values()]
    assert engine.skipped_steps == 1
    return [*seen, *masters(engine).values()]


def run(script: Script, path: Path, state_format: str, placement: tuple[str, str], *options: Any, **top: Any) -> Any:
    runtime = {"state_format": state_format, "delay_start_step": 2, **top.pop("runtime", {})}
    return follow(script, tiered(build(), path, placement, still_in_part, *options, runtime=runtime, **{**BF16, **top}))


@pytest.mark.parametrize(
    ("update", "accumulation", "clipping", "placements"),
    [
        ("barrier", 1, 0.5, [("cpu", "nvme"), ("none", "none")]),
        ("overlapped", 2, 0.0, [("cpu", "cpu"), ("nvme", "nvme")]),
        ("delayed", 1, 0.5, [("nvme", "nvme"), ("nvme", "cpu")]),
    ],
)
def test_remainders_give_the_bits_of_fp32(
    update: str, accumulation: int, clipping: float, placements: list[tuple[str, str]], swap_path: Path
) -> None:
    script, runtime = partial(course, accumulation=accumulation), {"update": update}
    expected = run(script, swap_path, "fp32", ("cpu", "cpu"), accumulation, clipping, runtime=runtime)
    for placement in placements:
        found = run(script, swap_path, "bf16_remainder", placement, accumulation, clipping, runtime=runtime)
        assert_same_bits(expected, found)


@pytest.mark.parametrize(
    ("placement", "runtime"),
    [(("cpu", "nvme"), {}), (("nvme", "nvme"), {"debug_delay_seed": 1, "debug_poison": True})],
    ids=["plain", "delays"],
)
def test_updates_that_begin_in_backward_too(
    placement: tuple[str, str], runtime: dict[str, Any], swap_path: Path
) -> None:
    script = partial(train, data=data, steps=5)
    expected = run(script, swap_path, "fp32", placement, **UNCHECKED)
    assert_same_bits(expected, run(script, swap_path, "bf16_remainder", placement, runtime=runtime, **UNCHECKED))


def test_torchs_own_code_joins_them_as_well(swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(tmp_path))
    script = partial(course, accumulation=1)
    expected = run(script, swap_path, "fp32", ("cpu", "cpu"))
    assert_same_bits(expected, run(script, swap_path, "bf16_remainder", ("nvme", "nvme")))


@pytest.mark.parametrize("state_format", LOSSY)
def test_no_cut_and_no_placement_changes_the_bits_of_a_lossy_format(state_format: str, swap_path: Path) -> None:
    script = partial(course, accumulation=1)
    records = [
        run(script, swap_path, state_format, placement, 1, 0.5, zero={"sub_group_size": size})
        for placement, size in ((("cpu", "cpu"), None), (("nvme", "nvme"), 2048), (("cpu", "nvme"), 6000))
    ]
    for record in records[1:]:
        assert_same_bits(records[0], record)
    exact = run(script, swap_path, "fp32", ("cpu", "cpu"), 1, 0.5)
    assert num_different(exact, records[0]) > 10, "lossy"


def test_a_gpt_learns_as_well_with_lossy_moments(swap_path: Path) -> None:
    """The mean loss of the last ten of 100 steps, relative to fp32's."""
    losses = {}
    for name in ("fp32", *LOSSY):
        torch.manual_seed(0)
        model = build_gpt(GPTConfig(layers=1, hidden=32, vocab=VOCAB, context=LENGTH))
        with tiered(model, swap_path, ("cpu", "cpu"), adamw, runtime={"state_format": name}, **BF16) as engine:
            seen = []
            for number in range(100):
                loss = engine(*batch(number, 4))
                engine.backward(loss)
                engine.step()
                seen.append(loss.item())
        losses[name] = sum(seen[-10:]) / 10
        assert losses[name] < 0.5 * seen[0], "it learns at all"
    assert losses["lossy_bf16_moments"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["lossy_8bit_moments"] == pytest.approx(losses["fp32"], rel=0.03)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1, momentum=0.9)


def fused(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], fused=True)


def unfused(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])


@pytest.mark.parametrize(
    ("state_format", "placement", "options", "message"),
    [
        ("bf16_remainder", ("cpu", "cpu"), {"bf16": {}}, "expected bfloat16 parameters.*float32"),
        ("bf16_remainder", ("cpu", "cpu"), {"bf16": {}, "fp16": {"enabled": True}}, "expected bfloat16.*float16"),
        (
            "bf16_remainder",
            ("none", "cpu"),
            {},
            "on the device and its optimizer does not.*offload_param.device to cpu",
        ),
        ("bf16_remainder", ("cpu", "none"), {}, "off the device and its optimizer on it"),
        *((name, ("cpu", "cpu"), {"make_optimizer": sgd}, "with SGD") for name in ("bf16_remainder", *LOSSY)),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_way_out(
    state_format: str, placement: tuple[str, str], options: dict[str, Any], message: str, swap_path: Path
) -> None:
    given = {**BF16, **options, "runtime": {"state_format": state_format}}
    with pytest.raises(tiered_zero.ConfigError, match=message):
        tiered(ParityGPT(), swap_path, placement, **given)
    assert not any(swap_path.iterdir())


def test_parameters_read_by_the_update_are_verified(swap_path: Path) -> None:
    """They are written in the cuts in which they are read, also by hand: a rotten one cannot become a master."""
    runtime = {"state_format": "bf16_remainder"}
    with tiered(build(), swap_path, ("nvme", "nvme"), adamw, runtime=runtime, **BF16) as engine:
        for number in range(3):
            engine.backward(engine(*batch(number)))
            engine.step()
            with tiered_zero.gathered(engine.module.tokens.weight, modify=True), torch.no_grad():
                engine.module.tokens.weight[0] += 0.5
        engine.flush()
        assert unverified_nbytes(engine, "param") == 0


@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
@pytest.mark.parametrize("threshold", [None, 40])
def test_halves_of_masters_never_stay_on_the_device(
    threshold: int | None, placement: tuple[str, str], swap_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Small parameters stay there in every other format, and by default: here with the bits of fp32, and one notice."""
    found = []
    for state_format in ("fp32", "bf16_remainder"):
        options = {"zero": {"stage3_param_persistence_threshold": threshold}, "runtime": {"state_format": state_format}}
        engine = tiered(build(), swap_path, placement, **options, **BF16)
        assert bool(units_on_device(engine)) == (state_format == "fp32")
        found.append(follow(lambda engine: train(engine, batch, 3), engine))
    assert_same_bits(*found)
    notices = [line for line in caplog.messages if "no parameter stays on the device with bf16_remainder" in line]
    assert len(notices) == (threshold is not None)


@pytest.mark.parametrize("state_format", ["bf16_remainder", *LOSSY])
def test_fused_is_stepped_by_the_projects_own_rule(
    state_format: str, swap_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients ask for fused by default; state is loaded from it, and into it."""

    def script(engine: Any) -> list[Any]:
        seen = train(engine, batch, 2)
        state = engine.optimizer.state_dict()
        fused(build()).load_state_dict(state)
        engine.optimizer.load_state_dict(state)
        return [*seen, *train(engine, batch, 1)]

    options = {"runtime": {"state_format": state_format}, **BF16}
    expected = follow(script, tiered(build(), swap_path, ("cpu", "cpu"), unfused, **options))
    assert "fused=True" not in caplog.text
    assert_same_bits(expected, follow(script, tiered(build(), swap_path, ("cpu", "cpu"), fused, **options)))
    assert caplog.text.count("AdamW with fused=True is stepped as with fused=False, which rounds otherwise") == 1


class OddShapes(torch.nn.Module):
    """Parameters without dimensions, without elements, and of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 7)
        self.scale, self.one = torch.nn.Parameter(torch.tensor(0.7)), torch.nn.Parameter(torch.ones(1))
        self.empty, self.none = torch.nn.Parameter(torch.zeros(0, 4)), torch.nn.Parameter(torch.zeros(0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        loss = (self.first(rows.to(self.one.dtype)) * self.scale * self.one).float().square().mean()
        return loss + self.empty.float().sum() + self.none.float().sum()


@pytest.mark.parametrize("state_format", ["fp32", "bf16_remainder", *LOSSY])
def test_odd_shapes_have_state_in_every_format(state_format: str, swap_path: Path) -> None:
    """On the device, where torch's own code steps, and far from it; state is loaded back, and training goes on."""

    def script(engine: Any) -> list[Any]:
        seen: list[Any] = []
        for number in range(3):
            engine.backward(engine(torch.linspace(-1, 1, 20).view(4, 5) + number))
            engine.step()
            state = engine.optimizer.state_dict()
            engine.optimizer.load_state_dict(state)
            seen += [engine.peek("scale"), engine.peek("scale", "exp_avg_sq"), engine.peek("one", "exp_avg")]
            assert engine.peek("empty") is None and engine.peek("none", "exp_avg") is None
            assert [state["state"][0]["exp_avg"].shape, state["state"][1]["exp_avg"].shape] == [(), (1,)]
        return seen

    runtime = {"state_format": state_format}
    plain = follow(script, tiered(OddShapes(), swap_path, ("none", "none"), runtime=runtime, **BF16))
    for placement in (("cpu", "cpu"), ("nvme", "nvme")):
        engine = tiered(OddShapes(), swap_path, placement, runtime=runtime, **BF16)
        assert_same_bits(plain, follow(script, engine))
