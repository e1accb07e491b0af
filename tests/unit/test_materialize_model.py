"""A start that breaks off leaves nothing behind, and a model that it has not begun to move as it was."""

import inspect
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tests.fakes.io_faults import Fault
from tests.support.configs import SMALL_DEVICE, zero_section
from tests.support.faulty_runs import faulty_disks
from tests.support.pairwise import by_turns
from tiered_zero.errors import ParameterOffloadedError, TieredZeroError, TransferError
from tiered_zero.unit.guard import ClosedEngine, handler_of

pytestmark = [pytest.mark.usefixtures("one_thread", "no_leaks")]

PLACEMENTS = [(param, state) for param in ("none", "cpu", "nvme") for state in ("none", "cpu", "nvme")]


class Noted(nn.Parameter):
    """As users make them: a class of their own, with something noted on it."""

    note = ""


class Layer(nn.Module):
    """`breaks`: its initialiser raises, with a view of the weight in hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32, 32))
        self.register_buffer("scale", torch.empty(32))
        self.breaks = False
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)
        self.scale = torch.ones(32)
        first, *_ = self.weight.chunk(4)
        if self.breaks:
            raise ZeroDivisionError(f"in reset_parameters: {first.sum()}")

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.T * self.scale.to(x.dtype))


def build_model(on_meta: bool) -> nn.Sequential:
    """Tied, frozen and a user's own parameters; with `on_meta` all but the last layers are there."""
    torch.manual_seed(0)
    with torch.device("meta" if on_meta else "cpu"):
        layers = [Layer() for _ in range(4)]
    with torch.device("cpu"):
        layers.append(Layer())
    layers[1].weight.requires_grad_(False)
    layers[3].weight = layers[2].weight
    own = Noted(torch.randn(32, 32))
    own.note = "the user's"
    layers[4].weight = own
    return nn.Sequential(*layers, nn.Linear(32, 32), nn.BatchNorm1d(32))


def settings(path: Path, param: str, state: str, bf16: bool, update: str = "overlapped") -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero_section(param, state, path, sub_group_size=2048),
        "bf16": {"enabled": bf16},
        "tiered_zero": {**SMALL_DEVICE, "device": "cpu", "update": update, "unit_size_cap": 1100},
    }


def look(model: nn.Module) -> dict[str, Any]:
    """All that a run changes of a model while it has it."""
    found: dict[str, Any] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found[name] = (id(param), type(param), param.requires_grad, param.dtype, dict(param.__dict__))
        handler = handler_of(param)
        found[name] += (None if param.is_meta or isinstance(handler, ClosedEngine) else param.tolist(), handler)
        found[f"{name} hooks"] = dict(getattr(param, "_post_accumulate_grad_hooks", None) or {})
    for name, buffer in model.named_buffers():
        found[name] = (id(buffer), buffer.dtype, None if buffer.is_meta else buffer.tolist())
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if "hooks" in attribute:
                found[f"{name}.{attribute}"] = dict(value)
    return found


def train(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> None:
    with tiered_zero.initialize(model=model, optimizer=optimizer, config=config)[0] as engine:
        dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
        for _ in range(2):
            loss = engine(torch.randn(4, 32, dtype=dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
        assert loss.isfinite()


@contextmanager
def interrupted(at_call: int) -> Iterator[list[str]]:
    """SIGINT as function number `at_call` of a birth begins. Yields the functions that began, up to the point from
    which on the engine is there."""
    calls: list[str] = []

    def trace(frame: FrameType, event: str, _argument: Any) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # what it raises when it is closed early goes nowhere
        if "/tiered_zero/" in path and (calls or name == "materialize_model"):
            calls.append(f"{Path(path).stem}.{name}")
            if calls[-1] == "teardown.__exit__":
                sys.settrace(None)
            elif len(calls) == at_call:
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGINT)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield calls
    finally:
        sys.settrace(before)


class Case:
    """A model with what belongs to it, as it was before; `check` what is left of a birth that broke off."""

    def __init__(self, path: Path, placement: tuple[str, str], bf16: bool, on_meta: bool) -> None:
        self.path = path
        self.model = build_model(on_meta)
        self.config = settings(path, *placement, bf16)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        for param in self.model.parameters():
            if not param.is_meta:
                param.grad = torch.ones_like(param)
        self.optimizer.step()  # a history for what has values
        self.optimizer.zero_grad()
        self.before = look(self.model)
        self.state = {id(param): dict(state) for param, state in self.optimizer.state.items()}

    def initialize(self) -> tiered_zero.Engine:
        return tiered_zero.initialize(model=self.model, optimizer=self.optimizer, config=self.config)[0]

    def check(self) -> None:
        """Nothing is left but a model of which parts may be gone: they say so, and no hook is on it."""
        state = {id(param): dict(state) for param, state in self.optimizer.state.items()}
        assert state.keys() == self.state.keys()
        assert all(found[name] is self.state[key][name] for key, found in state.items() for name in found)
        assert os.listdir(self.path) == []
        after = look(self.model)
        hooks = [name for name in self.before if "hooks" in name]
        assert [after[name] for name in hooks] == [self.before[name] for name in hooks]

    def check_untouched(self) -> None:
        self.check()
        after = look(self.model)
        assert {name: (value, after[name]) for name, value in self.before.items() if value != after[name]} == {}

    def train(self) -> None:
        """A second try."""
        with self.initialize() as engine:
            dtype = torch.bfloat16 if self.config["bf16"]["enabled"] else torch.float32
            for _ in range(2):
                loss = engine(torch.randn(4, 32).to(dtype)).float().square().mean()
                engine.backward(loss)
                engine.step()
            assert loss.isfinite()
        assert os.listdir(self.path) == []


@pytest.mark.parametrize(("placement", "bf16"), by_turns(PLACEMENTS, [False, True]))
def test_an_initialiser_that_raises(placement: tuple[str, str], bf16: bool, swap_path: Path) -> None:
    case = Case(swap_path, placement, bf16, on_meta=True)
    case.model[2].breaks = True
    with pytest.raises(ZeroDivisionError, match="in reset_parameters"):
        case.initialize()
    case.check()
    case = Case(swap_path, placement, bf16, on_meta=True)
    case.train()


@pytest.mark.parametrize(
    ("placement", "on_meta"), by_turns([("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "nvme")], [False, True])
)
def test_writes_that_fail(placement: tuple[str, str], on_meta: bool, swap_path: Path) -> None:
    case = Case(swap_path, placement, True, on_meta)
    with faulty_disks() as disks:
        case.initialize().close()
    num_writes = disks[0].count("write")
    assert num_writes > 4
    for nth in (1, num_writes // 2, num_writes):
        case = Case(swap_path, placement, True, on_meta)
        with faulty_disks(Fault("write", nth)), pytest.raises(TransferError):
            case.initialize()
        case.check()
    with pytest.raises(ParameterOffloadedError, match="engine that is closed"):
        case.model[0].weight.sum()
    Case(swap_path, placement, True, on_meta).train()


@pytest.mark.parametrize(
    ("placement", "on_meta"), by_turns([("nvme", "nvme"), ("none", "cpu"), ("cpu", "none")], [False, True])
)
def test_ctrl_c_at_any_time(placement: tuple[str, str], on_meta: bool, swap_path: Path) -> None:
    Case(swap_path, placement, True, on_meta).initialize().close()  # what a process does once
    case = Case(swap_path, placement, True, on_meta)
    with interrupted(0) as calls:
        engine = case.initialize()
    engine.close()
    case, num_broken = Case(swap_path, placement, True, on_meta), 0
    for at_call in range(1, len(calls) - 1, len(calls) // 12):
        try:
            with interrupted(at_call):
                engine = case.initialize()
        except KeyboardInterrupt as error:
            num_broken += 1
            case.check()
            if sys.version_info >= (3, 11):
                assert any("build the model anew" in note for note in error.__notes__)
            case = Case(swap_path, placement, True, on_meta)
        else:  # the start was over before: how many calls it takes depends on what must be waited for
            engine.close()
            case = Case(swap_path, placement, True, on_meta)
    assert num_broken >= 10
    case.train()


def test_a_loader_that_cannot_be_made(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(swap_path, ("nvme", "nvme"), True, on_meta=True)
    monkeypatch.setattr("tiered_zero.api.TrainingLoader.__init__", lambda *_args, **_options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiered_zero.initialize(model=case.model, optimizer=case.optimizer, training_data=[1], config=case.config)
    case.check_untouched()


def test_buffers_beside_tied_parameters_are_filled(swap_path: Path) -> None:
    """The tied layer's own initialiser sets its buffer, though its parameter was born with another module."""
    case = Case(swap_path, ("cpu", "cpu"), False, on_meta=True)
    with case.initialize() as engine:
        assert torch.equal(engine.module[3].scale, torch.ones(32))


def test_optimizer_state_that_does_not_fit(swap_path: Path) -> None:
    case = Case(swap_path, ("nvme", "nvme"), True, on_meta=False)
    key = case.model[0].weight
    case.optimizer.state[key]["exp_avg"] = case.state[id(key)]["exp_avg"] = torch.ones(3)
    with pytest.raises(TieredZeroError, match="exp_avg"):
        case.initialize()
    case.check_untouched()
