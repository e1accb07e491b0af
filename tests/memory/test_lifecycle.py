"""Engines leave nothing behind: no memory, no thread, no open file, no swap file; whether they end well or badly."""

import contextlib
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.inspection.insides import OffloadedParameter, assembly_build, materialize
from tests.support.models import ParityGPT, batch
from tests.support.trainers import FAR, tiered, train


def held() -> tuple[set[int], set[str]]:
    """Threads by id; open files by what they are, except those of the interpreter's own making."""
    gc.collect()
    threads = {thread.native_id or 0 for thread in threading.enumerate()}
    links = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return threads, {link for link in links if "/proc/" not in link}


def is_held_by(before: tuple[set[int], set[str]]) -> bool:
    """Whether nothing is held that was not before; what earlier tests have left may end at any time."""
    return all(now <= then for now, then in zip(held(), before, strict=True))


def tensor_nbytes() -> int:
    """Bytes of all live tensors: a closed engine that anything still refers to keeps its model's and its arena's."""
    gc.collect()
    kinds = (torch.Tensor, nn.Parameter, OffloadedParameter)  # other classes (a compiler's fakes) need not have bytes
    found = [t for t in gc.get_objects() if type(t) in kinds]
    with torch._C.DisableTorchFunctionSubclass():  # parameters of a closed engine refuse it
        storages = [t.untyped_storage() for t in found if t.layout is torch.strided]  # no engine makes others
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def one_life(swap_path: Path, placement: tuple[str, str]) -> None:
    torch.manual_seed(0)
    with tiered(ParityGPT(), swap_path, placement) as engine:
        train(engine, batch, 1)
        engine.module.state_dict()


@pytest.mark.parametrize("placement", FAR, ids="-".join)
def test_20_open_and_close_cycles(placement, swap_path):
    for cycle in range(20):
        if cycle == 5:
            before = held(), tensor_nbytes()
        one_life(swap_path, placement)
        assert not any(swap_path.iterdir())
    assert is_held_by(before[0]) and tensor_nbytes() <= before[1]


def test_close_twice_and_close_after_an_error(swap_path, no_leaks):
    engine = tiered(ParityGPT(), swap_path)
    engine.close()
    engine.close()
    with pytest.raises(ZeroDivisionError), tiered(ParityGPT(), swap_path) as engine:
        engine(*batch(0))
        raise ZeroDivisionError
    with tiered(ParityGPT(), swap_path) as engine:
        engine.backward(engine(*batch(0)))  # closed between backward and step
    assert not any(swap_path.iterdir())


class Unborn(nn.Module):
    """Its last layer is on meta and nothing initialises it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.bad = nn.Parameter(torch.empty(64, device="meta"))


def raising(error: BaseException) -> Any:
    def raise_it(*_: Any) -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("place", ["scheduler", "birth", "gradients", "hooks"])
def test_initialize_that_fails_leaves_nothing(place, error, swap_path, monkeypatch, no_leaks):
    """Broken off at several places after the swap files were made, by an error and by the user."""
    targets = {
        "birth": (materialize.UnitPlacer, "place"),
        "gradients": (assembly_build, "GradientStore"),
        "hooks": (assembly_build, "ModuleHooks"),
    }
    before = held()
    if place in targets:
        monkeypatch.setattr(*targets[place], raising(error))
    with pytest.raises(type(error)):
        tiered(ParityGPT(), swap_path, make_scheduler=raising(error) if place == "scheduler" else None)
    assert not any(swap_path.iterdir())
    assert is_held_by(before)


def test_a_model_that_cannot_be_initialized_leaves_nothing(swap_path, no_leaks):
    before = held()
    with pytest.raises(tiered_zero.errors.ModelError, match="bad"):
        tiered(Unborn(), swap_path)
    assert not any(swap_path.iterdir())
    assert is_held_by(before)
