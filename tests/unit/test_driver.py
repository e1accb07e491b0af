"""One thread at a time: a second one is refused, and what the first does is not disturbed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiered_zero
from tests.support.models import ParityGPT, batch
from tests.support.trainers import FAR, tiered, train


class Waiting(nn.Module):
    """Its forward waits inside until it is released, and so does its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(4))
        self.inside, self.release = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x * self.scale)
        self.wait()
        if x.requires_grad:
            x.register_hook(self.wait)
        return self.second(x).sum()

    def wait(self, *_: object) -> None:
        if threading.current_thread().name != "second":  # which is refused
            self.inside.set()
            assert self.release.wait(300)

    @contextmanager
    def held(self, call: Callable[[], object]) -> Iterator[None]:
        """While the block runs, a thread is inside of `call`."""
        self.release.clear()
        self.inside.clear()
        thread = threading.Thread(target=call, name="first")
        thread.start()
        try:
            assert self.inside.wait(300)
            yield
        finally:
            self.release.set()
            thread.join()


X = torch.ones(2, 4)

CALLS = {
    "engine": lambda engine: engine(X),
    "backward": lambda engine: engine.backward(torch.zeros((), requires_grad=True)),
    "step": lambda engine: engine.step(),
    "zero_grad": lambda engine: engine.zero_grad(),
    "abort_step": lambda engine: engine.abort_step(),
    "flush": lambda engine: engine.flush(),
    "close": lambda engine: engine.close(),
    "module": lambda engine: engine.module(X),
    "submodule": lambda engine: engine.module.first(X),
    "state_dict": lambda engine: engine.module.state_dict(),
    "gathered": lambda engine: tiered_zero.gathered(engine.module).__enter__(),
    "load_state_dict": lambda engine: engine.module.load_state_dict({}, strict=False),
    "a parameter": lambda engine: engine.module.first.weight.sum(),
}


def in_thread(call) -> BaseException | None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    return failures[0] if failures else None


WAYS = {
    "engine": lambda engine: engine.backward(engine(X)),
    "module": lambda engine: engine.backward(engine.module(X)),
    "submodule": lambda engine: engine.backward(nn.Sequential(engine.module)(X)),
    "engine.backward": lambda engine: engine.backward(engine.module.loss),
    "loss.backward": lambda engine: engine.module.loss.backward(),
    "autograd.grad": lambda engine: engine.backward(
        engine(X) * torch.autograd.grad(engine.module.loss, list(engine.module.parameters()))[0].sum()
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_second_thread_is_refused_while_the_first_is_inside(way, swap_path):
    """Every entry; what the first thread does goes on with its own bits."""
    runs = []
    for calls in ({}, CALLS):
        torch.manual_seed(0)
        model = Waiting()
        model.release.set()
        with tiered(model, swap_path, clipping=0.5) as engine:
            model.loss, others = engine(X), [engine(X), engine(X)]
            calls = calls and calls | {
                "loss.backward": lambda _, loss=others[0]: loss.backward(),
                "autograd.grad": lambda _, loss=others[1], bias=model.first.bias: torch.autograd.grad(loss, bias),
            }
            with model.held(lambda engine=engine: WAYS[way](engine)):
                errors = {name: in_thread(lambda call=call: call(engine)) for name, call in calls.items()}
            engine.step()
            train(engine, lambda _: (X,), 2)
            runs.append(model.state_dict())
    torch.testing.assert_close(*runs, rtol=0, atol=0)
    for name, error in errors.items():
        if name == "a parameter":
            assert isinstance(error, tiered_zero.errors.ParameterOffloadedError)
        else:
            assert isinstance(error, tiered_zero.errors.ModelError) and "'second'" in str(error), (name, error)
            assert "'first'" in str(error) and "lock" in str(error)


def test_nothing_is_left_of_a_gradient_that_is_refused(swap_path):
    """Of one layer autograd needs no weight: a gradient is the first that is heard of its backward."""
    runs = []
    for disturbs in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4))
        with tiered(model, swap_path, clipping=0.5) as engine:
            loss, other = engine(X).sum(), engine(X).square().sum()
            if disturbs:
                with tiered_zero.gathered(model):
                    assert isinstance(in_thread(other.backward), tiered_zero.errors.ModelError)
            engine.backward(loss)
            engine.step()
            runs.append(model.state_dict())
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_a_second_load_is_refused_and_the_first_is_kept(swap_path):
    runs = []
    for disturbs in (False, True):
        torch.manual_seed(0)
        model = Waiting()
        model.release.set()
        with tiered(model, swap_path, clipping=0.5) as engine:
            state = {name: value * 2 for name, value in model.state_dict().items()}
            model.second.register_load_state_dict_pre_hook(model.wait)
            with model.held(lambda model=model, state=state: model.load_state_dict(state)):
                if disturbs:
                    error = in_thread(lambda model=model: model.first.load_state_dict({}, strict=False))
                    assert isinstance(error, tiered_zero.errors.ModelError)
            train(engine, lambda _: (X,), 1)
            runs.append(model.state_dict())
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.mark.parametrize("begin", ["engine.backward", "loss.backward"])
def test_a_thread_of_autograd_works_for_the_one_that_waits(begin, swap_path):
    """Autograd runs checkpoints that are deeper than 60 inside of each other on threads of its own."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Waiting()
            self.threads: set[threading.Thread] = set()

        def forward(self, x: torch.Tensor, depth: int = 70) -> torch.Tensor:
            if depth:
                return checkpoint(self.forward, x, depth - 1, use_reentrant=True)
            if torch.is_grad_enabled():
                self.threads.add(threading.current_thread())
            return self.layer(x)

    model = Deep()
    model.layer.release.set()
    with tiered(model, swap_path, clipping=0.5) as engine:
        loss = engine(X.clone().requires_grad_())
        with model.layer.held(lambda: engine.backward(loss) if begin == "engine.backward" else loss.backward()):
            error = in_thread(lambda: engine(X))
            assert isinstance(error, tiered_zero.errors.ModelError) and "'first'" in str(error)
        engine.step()
        assert [thread.name for thread in model.threads] != ["first"]
        assert model.layer.second.weight.grad is None and engine.global_steps == 1


@pytest.mark.parametrize("placement", FAR, ids="-".join)
def test_three_threads_at_once_get_right_outputs_or_an_error(placement, swap_path):
    with tiered(ParityGPT(), swap_path, placement, clipping=0.5) as engine, torch.no_grad():
        expected = engine(*batch(0))
        outputs, errors, start = [], [], threading.Barrier(3)

        def use() -> None:
            start.wait()
            for _ in range(20):
                try:
                    with torch.no_grad():
                        outputs.append(engine(*batch(0)))
                except tiered_zero.errors.ModelError as error:
                    errors.append(error)

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outputs) + len(errors) == 60 and outputs
        assert all(torch.equal(output, expected) for output in outputs)


def test_one_thread_after_another_is_fine(swap_path):
    with tiered(ParityGPT(), swap_path, clipping=0.5) as engine:
        for _ in range(2):
            assert in_thread(lambda: train(engine, batch, 1)) is None
            train(engine, batch, 1)
        with tiered_zero.gathered(engine.module.norm):
            assert isinstance(in_thread(lambda: engine(*batch(0))), tiered_zero.errors.ModelError)
        assert in_thread(lambda: engine(*batch(0))) is None


def test_a_thread_that_died_inside_bars_nobody(swap_path):
    """An interrupt passes hooks by, so its claim stays; it ends with the thread."""

    class Ending(nn.Module):
        armed = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.armed:
                raise SystemExit
            return x

    model = nn.Sequential(nn.Linear(4, 4), ending := Ending())
    with tiered(model, swap_path, clipping=0.5) as engine:
        assert isinstance(in_thread(lambda: engine.module(X)), SystemExit)
        ending.armed = False
        engine.backward(engine(X).sum())
        engine.step()
