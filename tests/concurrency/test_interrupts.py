"""Ctrl-C ends a call between any two lines, and drops its step; it waits behind what cannot be undone."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tests.support.inspection.insides import BarrierPolicy, OverlappedPolicy, UpdatePipeline
from tests.support.trainers import tiered
from tests.support.walks import PACKAGE
from tiered_zero.concurrency.interrupts import hold_interrupts
from tiered_zero.errors import EngineFailedError
from tiered_zero.stopping import TERMINATED


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    """Python's own, before and after."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    left = signal.signal(signal.SIGINT, before)
    assert left is signal.default_int_handler


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)  # to the main thread, also from another


# -- the mechanism -----------------------------------------------------------------------------------------------------


def test_it_is_raised_as_the_outermost_block_ends() -> None:
    seen: list[str] = []

    @hold_interrupts()
    def call() -> None:
        with hold_interrupts():
            interrupt()
            seen.append("inner")
        seen.append("outer")

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            call()
    assert seen == ["inner", "outer"] * 2


def test_a_second_one_is_raised_at_once() -> None:
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        interrupt()
        seen.append("first")
        interrupt()
        seen.append("second")
    assert seen == ["first"]


def test_an_error_of_the_block_is_the_context_of_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, hold_interrupts():
        interrupt()
        raise ValueError("its own")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_of_the_program_stays(swap_path: Path) -> None:
    seen: list[int] = []

    def handle(number: int, _frame: object) -> None:
        seen.append(number)

    signal.signal(signal.SIGINT, handle)
    with engine_on(swap_path) as engine:
        engine.optimizer.register_step_pre_hook(once(interrupt))
        train(engine)
        assert signal.getsignal(signal.SIGINT) is handle
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handle and seen == [signal.SIGINT]


# -- engines -----------------------------------------------------------------------------------------------------------


def engine_on(
    swap_path: Path, update: str = "overlapped", clipping: float = 0.5, tier: str = "nvme"
) -> tiered_zero.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    runtime = {"unit_size_cap": 1, "update": update, **({"delay_start_step": 1} if update == "delayed" else {})}
    return tiered(model, swap_path, (tier, tier), clipping=clipping, runtime=runtime)


def train(engine: tiered_zero.Engine, first: int = 0, last: int = 3, past: bool = False) -> dict[str, Tensor]:
    """`past`: forward and backward past the engine."""
    for step in range(first, last):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        if past:
            engine.module(x).square().mean().backward()
        else:
            engine.backward(engine(x).square().mean())
        engine.step()
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


def once(act: Callable[[], object]) -> Callable[..., None]:
    """A hook that acts the first time."""
    left = [act]

    def hook(*_: object) -> None:
        if left:
            left.pop()()

    return hook


PLACES = ("forward", "backward", "step", "between")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("clipping", [0.5, 0.0])
def test_training_goes_on_after_one(place: str, clipping: float, swap_path: Path) -> None:
    """Where updates begin in backward (no clipping) an interrupt in it is raised as step() ends."""
    with engine_on(swap_path, clipping=clipping) as engine:
        expected = train(engine)
    with engine_on(swap_path, clipping=clipping) as engine:
        train(engine, 0, 1)
        if place == "forward":
            engine.module[1].register_forward_hook(once(interrupt))
        elif place == "backward":
            engine.module[1].register_full_backward_hook(once(interrupt))
        elif place == "step":
            engine.optimizer.register_step_pre_hook(once(interrupt))
        with pytest.raises(KeyboardInterrupt):
            train(engine, 1, 2)
            assert place == "between"
            interrupt()
        made = place in ("step", "between") or (place == "backward" and not clipping)
        assert engine.global_steps == 1 + made
        assert same(train(engine, 1 + made), expected), "repeated without abort_step()"


@pytest.mark.parametrize("update", ["barrier", "overlapped"])
def test_a_second_one_ends_the_engine_and_it_closes(update: str, swap_path: Path) -> None:
    def interrupt_twice() -> None:
        interrupt()
        interrupt()

    with engine_on(swap_path, update) as engine:
        train(engine, 0, 1)
        engine.optimizer.register_step_post_hook(once(interrupt_twice))
        with pytest.raises(KeyboardInterrupt):
            train(engine, 1, 2)
        for _ in range(2):
            with pytest.raises(EngineFailedError, match=r"after its update had begun.*load the last checkpoint"):
                train(engine, 1, 2)
    assert not list(swap_path.iterdir())


@pytest.mark.parametrize(
    ("tier", "update", "clipping", "past"),
    [
        ("nvme", "overlapped", 0.5, False),
        ("nvme", "overlapped", 0.5, True),
        ("nvme", "barrier", 0.0, False),
        ("cpu", "delayed", 0.5, False),
        ("cpu", "overlapped", 0.0, False),
        ("none", "barrier", 0.5, False),
    ],
)
def test_one_at_any_call_of_ours_drops_the_step_or_latches(
    tier: str, update: str, clipping: float, past: bool, swap_path: Path, tmp_path: Path
) -> None:
    """Thrown into every so many functions of the package that the main thread calls in a step and a save, which is
    repeated each time. As from a handler of the program, nothing holds it back: it latches where the update has begun.
    """
    with engine_on(swap_path, update, clipping, tier=tier) as engine:
        train(engine, 0, 2, past)
        calls = throw_at(sys.maxsize, lambda: step_and_save(engine, 2, past, tmp_path))
        expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    num_dropped = num_latched = 0
    engine = None
    for at in range(STRIDE // 2, calls, STRIDE):
        if engine is None:
            engine = engine_on(swap_path, update, clipping, tier=tier)
            train(engine, 0, 2, past)
            engine.save_checkpoint(tmp_path, "start")
        with suppress(KeyboardInterrupt):
            throw_at(at, partial(step_and_save, engine, 2, past, tmp_path))
        try:
            engine.abort_step()
            if engine.global_steps == 2:
                step_and_save(engine, 2, past, tmp_path)
            assert same(engine.module.state_dict(), expected), f"after one at call {at} of {calls}"
            engine.load_checkpoint(tmp_path, "start")
            num_dropped += 1
        except EngineFailedError:
            with pytest.raises(EngineFailedError, match="load the last checkpoint"):
                engine.flush()
            num_latched += 1
            engine.close()
            engine = None
    if engine is not None:
        engine.close()
    assert num_dropped > num_latched and not list(swap_path.iterdir())


STRIDE = 61


def step_and_save(engine: tiered_zero.Engine, step: int, past: bool, path: Path) -> None:
    train(engine, step, step + 1, past)
    engine.save_checkpoint(path, "saved")


def throw_at(number: int, act: Callable[[], object]) -> int:
    """Raise KeyboardInterrupt in the package function that `act` calls as the `number`-th one. Returns how many it
    calls."""
    num_calls = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num_calls
        code, caller = frame.f_code, frame.f_back.f_code
        # Python drops what is thrown into a generator that is freed, or into a finalizer
        is_lost = code.co_flags & inspect.CO_GENERATOR or "__del__" in (code.co_name, caller.co_name)
        is_lost = is_lost or caller is weakref.finalize.__call__.__code__
        if event == "call" and code.co_filename.startswith(PACKAGE) and not is_lost:
            num_calls += 1
            if num_calls == number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize("past", [False, True])
def test_a_second_one_in_the_clean_up_is_made_up_for_by_the_next_call(
    past: bool, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_on(swap_path) as engine:
        expected = train(engine)
    with engine_on(swap_path) as engine:
        train(engine, 0, 1)
        engine.module[1].register_forward_hook(once(interrupt))
        with monkeypatch.context() as patch:
            patch.setattr(OverlappedPolicy, "drop", lambda *_: interrupt())
            with pytest.raises(KeyboardInterrupt):
                train(engine, 1, 2, past)
            with pytest.raises(KeyboardInterrupt):
                engine.abort_step()
        assert same(train(engine, 1), expected)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("inside", [False, True])
def test_no_memory_drops_the_step_and_inside_of_the_update_ends_the_engine(
    inside: bool, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    with engine_on(swap_path, "barrier") as engine:
        expected = train(engine)
    with engine_on(swap_path, "barrier") as engine:
        train(engine, 0, 1)
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(*((UpdatePipeline, "step") if inside else (BarrierPolicy, "prepare")), fail)
            train(engine, 1)
        if inside:
            with pytest.raises(EngineFailedError, match="after its update had begun"):
                train(engine, 1)
        else:
            assert same(train(engine, 1), expected)


def test_an_engine_on_another_thread_is_not_interrupted(swap_path: Path) -> None:
    """The main thread is, where it waits."""
    with engine_on(swap_path) as engine:
        expected = train(engine)
    found: list[dict[str, Tensor]] = []

    def work() -> None:
        with engine_on(swap_path) as engine:
            engine.module[1].register_forward_hook(once(interrupt_in_forward))
            found.append(train(engine))
        ended.set()

    def interrupt_in_forward() -> None:
        assert waits.wait(60)
        interrupt()
        assert raised.wait(60)

    waits, raised, ended = (threading.Event() for _ in range(3))
    worker = threading.Thread(target=work)
    with pytest.raises(KeyboardInterrupt):
        worker.start()
        waits.set()
        ended.wait(60)
    raised.set()
    worker.join()
    assert same(found[0], expected)


def test_a_stop_request_drops_the_step(swap_path: Path) -> None:
    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with tiered_zero.stop_on_signals(at_boundary=False), engine_on(swap_path) as engine:
        engine.optimizer.register_step_pre_hook(once(terminate))
        with pytest.raises(SystemExit) as ended:
            train(engine)
        assert ended.value.code == TERMINATED and engine.global_steps == 0
        train(engine)


def test_a_block_that_another_thread_collects_leaves_ctrl_c_alone() -> None:
    def abandoned() -> Iterator[None]:
        with hold_interrupts():
            yield

    block = abandoned()
    next(block)
    thread = threading.Thread(target=block.close)
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("closes", [True, False])
def test_ctrl_c_is_held_no_longer_than_its_engine(swap_path: Path, closes: bool) -> None:
    """An error between a backward that has begun updates and step() leaves the step untaken."""
    engine = tiered(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), swap_path, gradient_clipping=0.0)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        is_held = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        engine.step() if not is_held else None
    assert is_held, "from the second step on updates begin in backward"
    if closes:
        with pytest.raises(EngineFailedError, match="some of the step's updates had begun"):
            engine.close()
    else:
        with suppress(ValueError), engine:
            raise ValueError("the program's own")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
