"""SIGINT waits for a safe point of the call that it comes in; a second one, or another's exception, ends the engine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tests.support.inspection import lane
from tests.support.inspection.insides import BarrierPolicy, OverlappedPolicy
from tests.support.trainers import tiered
from tiered_zero.concurrency.interrupts import INTERRUPTS, call_open, protected, shielded, wait_for_event
from tiered_zero.errors import EngineFailedError
from tiered_zero.stopping import TERMINATED


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    """Python's own, before and after."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    INTERRUPTS.install()
    yield
    signal.signal(signal.SIGINT, before)
    left, INTERRUPTS.pending = INTERRUPTS.pending, None
    assert left is None


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_soon(act: Callable[[], None] = interrupt) -> threading.Timer:
    timer = threading.Timer(0.05, act)
    timer.start()
    return timer


# -- the mechanism -----------------------------------------------------------------------------------------------------


def test_it_is_raised_as_the_outermost_protected_call_ends() -> None:
    seen: list[str] = []

    @protected
    def inner() -> None:
        interrupt()
        seen.append("inner")

    @protected
    def outer() -> None:
        inner()
        seen.append("outer")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert seen == ["inner", "outer"]


def test_it_is_raised_at_once_in_open_code_and_outside() -> None:
    seen: list[str] = []

    def user() -> None:
        interrupt()
        seen.append("user")

    @protected
    def call() -> None:
        call_open(user)

    for act in (call, user):
        before = INTERRUPTS.num_broken
        with pytest.raises(KeyboardInterrupt):
            act()
        assert not seen and INTERRUPTS.num_broken == before


def test_a_protected_call_in_open_code_is_a_safe_point_at_its_end() -> None:
    seen: list[str] = []

    @protected
    def hook() -> None:
        interrupt()
        seen.append("hook")

    def user() -> None:
        hook()
        seen.append("user")

    @protected
    def call() -> None:
        try:
            call_open(user)
        finally:
            seen.append("cleared up")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert seen == ["hook", "cleared up"]


def test_a_wait_is_a_safe_point_unless_it_is_shielded(monkeypatch: pytest.MonkeyPatch) -> None:
    event, waits = threading.Event(), threading.Event()
    plain_wait = event.wait

    def noted_wait(timeout_s: float | None = None) -> bool:
        waits.set()
        return plain_wait(timeout_s)

    monkeypatch.setattr(event, "wait", noted_wait)

    @protected
    def wait() -> None:
        wait_for_event(event)

    @shielded
    def wait_shielded() -> None:
        wait()  # an inner protected call does not lift the shield

    with pytest.raises(KeyboardInterrupt):
        timer = interrupt_soon()
        wait()
    timer.join()
    waits.clear()

    def set_once_pending() -> None:
        assert waits.wait(60)
        interrupt()
        deadline_s = time.monotonic() + 60
        while INTERRUPTS.pending is None and time.monotonic() < deadline_s:
            time.sleep(0.001)
        time.sleep(0.1)  # the wait would look at it by now
        event.set()

    with pytest.raises(KeyboardInterrupt):
        timer = interrupt_soon(set_once_pending)
        wait_shielded()
    assert event.is_set(), "it was raised behind the wait"
    timer.join()


def test_a_second_one_is_raised_at_once_and_counts_the_call_as_broken() -> None:
    seen: list[str] = []

    @shielded
    def call() -> None:
        interrupt()
        seen.append("first")
        interrupt()
        seen.append("second")

    before = INTERRUPTS.num_broken
    with pytest.raises(KeyboardInterrupt):
        call()
    assert seen == ["first"] and INTERRUPTS.num_broken > before


def test_a_second_one_while_the_first_unwinds_is_raised_at_once() -> None:
    seen: list[str] = []

    @shielded
    def clear_up() -> None:
        seen.append("begun")
        interrupt()
        seen.append("done")

    @protected
    def call() -> None:
        interrupt()
        try:
            INTERRUPTS.check()
        finally:
            clear_up()

    with pytest.raises(KeyboardInterrupt):
        call()
    assert seen == ["begun"]


def test_an_error_of_the_call_is_the_context_of_the_interrupt() -> None:
    @protected
    def call() -> None:
        interrupt()
        raise ValueError("its own")

    with pytest.raises(KeyboardInterrupt) as caught:
        call()
    assert isinstance(caught.value.__context__, ValueError)


def test_only_what_is_thrown_into_protected_code_breaks_a_call() -> None:
    def throw(error: BaseException) -> None:
        raise error

    def broken(act: Callable[[], object], kind: type[BaseException]) -> bool:
        before = INTERRUPTS.num_broken
        with pytest.raises(kind):
            protected(act)()
        return INTERRUPTS.num_broken > before

    assert broken(lambda: throw(SystemExit(1)), SystemExit)
    assert broken(lambda: throw(KeyboardInterrupt()), KeyboardInterrupt)
    assert not broken(lambda: call_open(throw, SystemExit(1)), SystemExit)
    assert not broken(lambda: throw(MemoryError()), MemoryError)


def test_a_handler_of_the_program_stays(swap_path: Path) -> None:
    seen: list[int] = []

    def handle(number: int, _frame: object) -> None:
        seen.append(number)

    signal.signal(signal.SIGINT, handle)
    with engine_on(swap_path) as engine:
        assert signal.getsignal(signal.SIGINT) is handle
        train(engine)
    assert signal.getsignal(signal.SIGINT) is handle


def test_the_handler_is_there_from_the_first_call_to_the_last_close(swap_path: Path) -> None:
    """Notebooks put Python's own handler in its place before each cell."""
    INTERRUPTS.uninstall()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (swap_path / "a").mkdir()
    (swap_path / "b").mkdir()
    first, second = engine_on(swap_path / "a"), engine_on(swap_path / "b")
    first.close()
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train(second)
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    second.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(tiered_zero.TieredZeroError):
        tiered_zero.initialize(model=nn.Linear(2, 2), config={"zero_optimization": {"stage": 9}})
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# -- engines -----------------------------------------------------------------------------------------------------------


def engine_on(swap_path: Path, update: str = "overlapped", clipping: float = 0.5, width: int = 8) -> tiered_zero.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    return tiered(model, swap_path, ("nvme", "nvme"), clipping=clipping, runtime={"unit_size_cap": 1, "update": update})


def train(engine: tiered_zero.Engine, first: int = 0, last: int = 3) -> dict[str, Tensor]:
    for step in range(first, last):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
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


def test_a_forward_is_interrupted_while_it_waits_and_leaves_the_fetch_alone(swap_path: Path) -> None:
    """Behind a transfer that hangs. The unit arrives later, as one that was prefetched."""
    with engine_on(swap_path) as engine:
        expected = train(engine)
    with engine_on(swap_path) as engine:
        train(engine, 0, 1)
        engine.flush()
        hung = threading.Event()
        lane(engine, "fetch").submit(hung.wait)
        with pytest.raises(KeyboardInterrupt):
            timer = interrupt_soon()
            train(engine, 1)
        assert not hung.is_set()
        timer.join()
        hung.set()
        assert same(train(engine, 1), expected)


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
            with pytest.raises(EngineFailedError, match=r"broken off.*second Ctrl-C.*load the last checkpoint"):
                train(engine, 1, 2)
    assert not list(swap_path.iterdir())


def test_an_exception_of_another_handler_in_our_code_ends_the_engine(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the user's forward it drops the step, as any exception."""

    def handle(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    with engine_on(swap_path) as engine:
        expected = train(engine)
    with engine_on(swap_path) as engine:
        engine.module[1].register_forward_hook(once(interrupt))
        with pytest.raises(KeyboardInterrupt):
            train(engine)
        assert same(train(engine), expected)
        prepare = OverlappedPolicy.prepare

        def interrupted(policy: OverlappedPolicy) -> None:
            interrupt()
            prepare(policy)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(OverlappedPolicy, "prepare", interrupted)
            train(engine)
        with pytest.raises(EngineFailedError, match="broken off"):
            train(engine)


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
            patch.setattr(BarrierPolicy, "_step" if inside else "prepare", fail)
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


def test_a_stop_request_ends_at_a_safe_point(swap_path: Path) -> None:
    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with tiered_zero.stop_on_signals(at_boundary=False), engine_on(swap_path) as engine:
        engine.optimizer.register_step_pre_hook(once(terminate))
        with pytest.raises(SystemExit) as ended:
            train(engine)
        assert ended.value.code == TERMINATED and engine.global_steps == 1
        train(engine, 1)


def test_nothing_runs_but_one_look_where_no_signal_comes() -> None:
    """Hooks pay for it: no call of the mechanism."""
    called: list[str] = []

    def trace(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == sys.modules[INTERRUPTS.__module__].__file__:
            called.append(frame.f_code.co_name)

    act = protected(lambda: None)
    sys.setprofile(trace)
    act()
    sys.setprofile(None)
    assert called == ["protected_<lambda>"]
