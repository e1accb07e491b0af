"""What one run has saved another takes up: on any placement, cut otherwise, in another format, by any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import tiered_zero
from tests.support.models import ParityGPT, batch, rows
from tests.support.pairwise import by_turns
from tests.support.trainers import FAR, tiered
from tiered_zero.checkpoint.dcp import DcpReader
from tiered_zero.checkpoint.index import torch_dtype
from tiered_zero.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

PLACEMENTS = [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"), ("cpu", "nvme"), ("none", "cpu")]
BF16 = {"bf16": {"enabled": True}}


def build(seed: int) -> ParityGPT:
    torch.manual_seed(seed)
    return ParityGPT(num_blocks=1)


def train(engine: tiered_zero.Engine, first: int, stop: int) -> None:
    for number in range(first, stop):
        engine.backward(engine(*batch(number), number % 3 == 1))
        engine.step()


def values(engine: tiered_zero.Engine) -> dict[str, torch.Tensor]:
    """Everything by parameter name, whatever the placement: weights, masters, every state array and count."""
    found = {f"weight {name}": value.clone() for name, value in engine.module.state_dict().items()}
    for name, param in engine.module.named_parameters():
        master = engine.peek(name)
        if master is not None:
            found[f"master {name}"] = master
        for kind, value in engine.optimizer.read_state(param).items() if param.requires_grad else ():
            found[f"{kind} {name}"] = torch.as_tensor(value)
    return found


def assert_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_any_placement_takes_up_any_other(placement: tuple[str, str], swap_path: Path, tmp_path: Path) -> None:
    with tiered(build(0), swap_path, placement, **BF16) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        saved = values(engine)
        train(engine, 2, 4)
        expected = values(engine)
    at = PLACEMENTS.index(placement)
    for number, other in enumerate(PLACEMENTS):
        if number not in {(at + 1) % 5, (at + 2) % 5}:  # every one is saved by two others, and loads from two
            continue
        cuts: dict[str, Any] = {"zero": {"sub_group_size": 2048 * (1 + 2 * number)}}
        runtime: dict[str, Any] = {"unit_size_cap": 1000 * (1 + 9 * number)}
        if (other[0] == "none") == (other[1] == "none"):
            runtime["state_format"] = "bf16_remainder"
        with tiered(build(1), swap_path, other, runtime=runtime, **cuts, **BF16) as engine:
            engine.load_checkpoint(tmp_path)
            assert_same(saved, values(engine))
            train(engine, 2, 4)
            assert_same(expected, values(engine))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("first", ["bf16_remainder", "fp32"])
def test_remainders_and_fp32_write_the_same_files(first: str, swap_path: Path, tmp_path: Path) -> None:
    """Of the same bits; and each loads what the other has written."""
    files = {}
    for name in (first, "fp32" if first != "fp32" else "bf16_remainder"):
        with tiered(build(0), swap_path, ("cpu", "cpu"), runtime={"state_format": name}, **BF16) as engine:
            if files:
                engine.load_checkpoint(tmp_path / first)
            else:
                train(engine, 0, 2)
            engine.save_checkpoint(tmp_path / name)
        files[name] = list_tensors(tmp_path / name / "global_step2")
    left, right = files.values()
    assert_same(left, right)


def list_tensors(tag: Path) -> dict[str, torch.Tensor]:
    """Read a tag with plain Distributed Checkpoint."""
    with DcpReader(tag) as reader:
        found = {
            key: torch.zeros(entry.shape, dtype=torch_dtype(entry.dtype))
            for key, entry in reader.reader.manifest.tensors.items()
        }
        dcp.load(found, storage_reader=reader)
    return found


LOSSY = ("lossy_bf16_moments", "lossy_8bit_moments")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_codes_are_not_read_as_floats(swap_path: Path, tmp_path: Path) -> None:
    """Distributed Checkpoint compares no dtypes."""
    with tiered(build(0), swap_path, ("cpu", "cpu"), runtime={"state_format": LOSSY[1]}, **BF16) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
    with DcpReader(tmp_path) as reader:
        tensors = reader.reader.manifest.tensors
        key = next(key for key in tensors if key.startswith("exp_avg/"))
        with pytest.raises(CheckpointException, match="expected to hold floats"):
            dcp.load({key: torch.zeros(tensors[key].shape)}, storage_reader=reader)


@pytest.mark.parametrize(("saved", "placement"), by_turns(LOSSY, [("cpu", "cpu"), ("nvme", "nvme")]))
def test_a_lossy_format_becomes_fp32_and_itself_again(
    saved: str, placement: tuple[str, str], swap_path: Path, tmp_path: Path
) -> None:
    """fp32 holds each of its values, and so what comes back to the format is what was there."""
    runtime: dict[str, Any] = {"state_format": saved, "checkpoint": {"convert": True}}
    with tiered(build(0), swap_path, placement, runtime=runtime, **BF16) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "lossy")
        expected = values(engine)
    with tiered(build(1), swap_path, ("cpu", "cpu"), **BF16) as engine:
        engine.load_checkpoint(tmp_path / "lossy")
        assert_same(expected, values(engine))
        engine.save_checkpoint(tmp_path / "fp32")
    with tiered(build(1), swap_path, placement, runtime=runtime, **BF16) as engine:
        engine.load_checkpoint(tmp_path / "fp32")
        assert_same(expected, values(engine))


@pytest.mark.parametrize("wanted", LOSSY)
def test_state_is_not_rounded_unasked(wanted: str, swap_path: Path, tmp_path: Path) -> None:
    with tiered(build(0), swap_path, ("cpu", "cpu"), **BF16) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        saved = values(engine)
    with tiered(build(1), swap_path, ("cpu", "cpu"), runtime={"state_format": wanted}, **BF16) as engine:
        before = values(engine)
        with pytest.raises(ConfigError, match=r"would round \d+ state arrays.*convert"):
            engine.load_checkpoint(tmp_path)
        assert_same(before, values(engine))
    runtime: dict[str, Any] = {"state_format": wanted, "checkpoint": {"convert": True}}
    with tiered(build(1), swap_path, ("cpu", "cpu"), runtime=runtime, **BF16) as engine:
        engine.load_checkpoint(tmp_path)
        found = values(engine)
        assert_same(*({k: v for k, v in of.items() if not k.startswith("exp")} for of in (saved, found)))
        for name in (name for name in saved if name.startswith("exp")):
            torch.testing.assert_close(found[name], saved[name], rtol=0.02, atol=float(saved[name].abs().max()) * 0.02)


# -- other models and optimizers ---------------------------------------------------------------------------------------


class Strided(nn.Module):
    """Convolutions whose weights lie in memory as channels_last, or row-major; batch norm; a transposed matrix."""

    def __init__(self, channels_last: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 40, 3, padding=1)
        self.norm = nn.BatchNorm2d(40)
        self.second = nn.Conv2d(40, 40, 3, padding=1)
        self.matrix = nn.Parameter(torch.randn(30, 40).t())
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.empty(0))
        if channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        else:
            self.matrix = nn.Parameter(self.matrix.detach().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.norm(self.first(x)).relu()).mean((2, 3))
        return ((x @ self.matrix) * self.scalar).square().mean()


@pytest.mark.parametrize(
    ("saved", "loaded", "placement"),
    [
        *((True, False, place) for place in [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")]),
        *((True, True, ("nvme", "nvme")), (False, True, ("cpu", "cpu"))),
    ],
)
def test_the_order_in_memory_may_be_another(
    saved: bool, loaded: bool, placement: tuple[str, str], swap_path: Path, tmp_path: Path
) -> None:
    def make(channels_last: bool, seed: int) -> tiered_zero.Engine:
        torch.manual_seed(seed)
        return tiered(Strided(channels_last), swap_path, placement)

    def step(engine: tiered_zero.Engine) -> None:
        engine.backward(engine(torch.ones(2, 3, 6, 6)))
        engine.step()

    with make(saved, 0) as engine:
        step(engine)
        engine.save_checkpoint(tmp_path)
        expected = values(engine)
        step(engine)
        later = values(engine)
    with make(loaded, 1) as engine:
        engine.load_checkpoint(tmp_path)
        assert_same(expected, values(engine))
        assert engine.module.first.weight.is_contiguous() is not loaded
        step(engine)
        if saved == loaded:
            assert_same(later, values(engine))


def every(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: make([p for p in model.parameters() if p.requires_grad], **options)


OPTIMIZERS = {
    "sgd": every(torch.optim.SGD, lr=0.1),
    "momentum": every(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": every(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.2),
    "amsgrad": every(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "nadam": every(torch.optim.NAdam, lr=0.01),
    "fused": every(torch.optim.AdamW, lr=0.01, fused=True),
    "adafactor": every(torch.optim.Adafactor, lr=0.01),
    "rprop": every(torch.optim.Rprop, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on(name: str, swap_path: Path, tmp_path: Path) -> None:
    """In host memory and on nvme in turn: what a rule holds is told by its form, and moves as bytes."""
    make, placement = OPTIMIZERS[name], FAR[list(OPTIMIZERS).index(name) % 2]
    with tiered(build(0), swap_path, placement, make, **BF16) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path)
        saved = values(engine)
        train(engine, 1, 3)
        expected = values(engine)
    with tiered(build(1), swap_path, placement, make, **BF16) as engine:
        engine.load_checkpoint(tmp_path)
        assert_same(saved, values(engine))
        train(engine, 1, 3)
        assert_same(expected, values(engine))


@pytest.mark.parametrize("name", ["adagrad", "amsgrad", "nadam"])
def test_state_of_no_step_goes_on(name: str, swap_path: Path, tmp_path: Path) -> None:
    """torch's Adagrad makes its state before the first step, and its state_dict() has that of every parameter."""
    make = OPTIMIZERS[name]
    with tiered(build(0), swap_path, ("cpu", "cpu"), make, **BF16) as engine:
        engine.optimizer.load_state_dict(make(build(0)).state_dict())
        train(engine, 0, 1)  # one parameter is not used
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        engine.save_checkpoint(tmp_path)
        train(engine, 1, 3)
        expected = values(engine)
    with tiered(build(1), swap_path, ("cpu", "cpu"), make, **BF16) as engine:
        engine.load_checkpoint(tmp_path)
        train(engine, 1, 3)
        assert_same(expected, values(engine))


def some(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices alone: what else requires a gradient is in no group."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad and p.dim() > 1], lr=0.01)


@pytest.mark.parametrize(
    ("update", "placement"), by_turns(["overlapped", "delayed"], [("cpu", "cpu"), ("nvme", "nvme")])
)
def test_parameters_in_no_group_come_along(
    placement: tuple[str, str], update: str, swap_path: Path, tmp_path: Path
) -> None:
    runtime = {"update": update, "delay_start_step": 0}
    with tiered(build(0), swap_path, placement, some, runtime=runtime, **BF16) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        train(engine, 2, 5)
        expected = engine.module.state_dict()
        assert torch.equal(expected["norm.weight"], torch.ones(32, dtype=torch.bfloat16)), "it is never stepped"
    with tiered(build(1), swap_path, placement, some, runtime=runtime, **BF16) as engine:
        with tiered_zero.gathered(engine.module.norm.weight, modify=True), torch.no_grad():
            engine.module.norm.weight.fill_(3.0)
        engine.load_checkpoint(tmp_path)
        train(engine, 2, 5)
        assert_same(expected, engine.module.state_dict())


def test_native_and_torch_code_take_up_each_other(swap_path: Path, tmp_path: Path) -> None:
    """AdamW on the kernel counts steps in a number, torch's own code in a tensor."""
    makers = [every(torch.optim.AdamW, lr=0.01), every(torch.optim.AdamW, lr=0.01, foreach=False, fused=True)]
    for number, (first, then) in enumerate([makers, makers[::-1]]):
        path = tmp_path / str(number)
        with tiered(build(0), swap_path, ("cpu", "cpu"), first) as engine:
            train(engine, 0, 2)
            engine.save_checkpoint(path)
            saved = values(engine)
        with tiered(build(1), swap_path, ("cpu", "cpu"), then) as engine:
            engine.load_checkpoint(path, load_optimizer_states=True)
            assert_same(saved, values(engine))
            train(engine, 2, 3)


def test_a_model_without_an_optimizer_takes_the_weights(swap_path: Path, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    with tiered(model, swap_path, ("nvme", "nvme"), every(torch.optim.AdamW), **BF16) as engine:
        engine.backward(engine(rows().bfloat16()).square().mean())
        engine.step()
        engine.save_checkpoint(tmp_path)
        expected = engine.module.state_dict()
    other = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    config = {"train_micro_batch_size_per_gpu": 1, "tiered_zero": {"device": "cpu"}, **BF16}
    with tiered_zero.initialize(model=other, config=config)[0] as engine:
        engine.load_checkpoint(tmp_path)
        assert_same(expected, engine.module.state_dict())


def still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)


@pytest.mark.parametrize(
    ("placement", "saved"),
    [
        (("cpu", "cpu"), "fp32"),
        (("nvme", "nvme"), "bf16_remainder"),
        (("none", "none"), "fp32"),
        (("none", "none"), "bf16_remainder"),
    ],
)
def test_ties_between_two_parameters_stay(
    saved: str, placement: tuple[str, str], swap_path: Path, tmp_path: Path
) -> None:
    """A master halfway between two bf16 numbers needs the bit that rests in the sign of the second moment."""
    model = build(0)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                bits = param.view(-1).view(torch.int32)
                bits.copy_((bits & -0x10000) | 0x8000)
    expected = {name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad}
    del param, bits
    with tiered(model, swap_path, placement, still, runtime={"state_format": saved}, **BF16) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        moments = values(engine)
    with tiered(build(1), swap_path, placement, still, runtime={"state_format": "bf16_remainder"}, **BF16) as engine:
        engine.load_checkpoint(tmp_path)
        assert_same(moments, values(engine))
        train(engine, 2, 3)
        for name, value in expected.items():
            found = engine.peek(name)
            assert found is not None
            assert torch.equal(found, value), name
