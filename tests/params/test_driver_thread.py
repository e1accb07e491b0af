"""One thread at a time: a second one is refused, and what the first does is not disturbed."""

import threading

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.models import ParityGPT, batch
from tests.support.trainers import FAR, tiered, train


class Waiting(nn.Module):
    """Its forward waits inside until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(4))
        self.inside, self.release = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x * self.scale)
        self.inside.set()
        assert self.release.wait(300)
        return self.second(x).sum()


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
    "a parameter": lambda engine: engine.module.second.weight.sum(),
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


@pytest.mark.parametrize("way", ["engine", "module", "submodule"])
def test_a_second_thread_is_refused_while_the_first_is_inside(way, swap_path):
    """Every entry; the first thread's forward goes on with its own bits."""
    model = Waiting()
    model.release.set()
    with tiered(model, swap_path, clipping=0.5) as engine:
        expected = engine(X).detach()
        model.release.clear()
        model.inside.clear()
        found: list[torch.Tensor] = []
        call = {"engine": engine, "module": model, "submodule": nn.Sequential(model)}[way]
        first = threading.Thread(target=lambda: found.append(call(X).detach()), name="first")
        first.start()
        assert model.inside.wait(300)
        errors = {name: in_thread(lambda call=call: call(engine)) for name, call in CALLS.items()}
        model.release.set()
        first.join()
        for name, error in errors.items():
            if name == "a parameter":
                assert isinstance(error, tiered_zero.ParameterOffloadedError)
            else:
                assert isinstance(error, tiered_zero.ModelError) and "'second'" in str(error), (name, error)
                assert "'first'" in str(error) and "lock" in str(error)
        assert torch.equal(found[0], expected)
        for _ in range(2):
            engine.backward(engine(X))
            engine.step()


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
                except tiered_zero.ModelError as error:
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
            assert isinstance(in_thread(lambda: engine(*batch(0))), tiered_zero.ModelError)
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
