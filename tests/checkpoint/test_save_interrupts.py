"""A save that is under way as Ctrl-C or an error comes: it is written to its end or discarded, and nothing is left."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered_zero
from tests.support.inspection.insides import OverlappedPolicy, SwapStore
from tests.support.models import ParityGPT, batch
from tests.support.tags import unfinished
from tests.support.trainers import tiered
from tiered_zero.checkpoint.save import StateSaver
from tiered_zero.checkpoint.tag import list_tags
from tiered_zero.errors import StoreError

pytestmark = pytest.mark.usefixtures("one_thread")


def make(swap_path: Path, update: str, state: str = "cpu", **runtime: Any) -> tiered_zero.Engine:
    torch.manual_seed(0)
    engine = tiered(ParityGPT(num_blocks=1), swap_path, ("cpu", state), runtime={"update": update, **runtime})
    engine.backward(engine(*batch(0)))
    engine.step()
    return engine


def complete(save_dir: Path) -> set[str]:
    return {info.tag for info in list_tags(save_dir) if info.complete}


@pytest.mark.parametrize(
    ("update", "runtime"),
    [("barrier", {}), ("overlapped", {}), ("overlapped", {"checkpoint": {"async": True}})],
    ids=["barrier", "overlapped", "async"],
)
def test_ctrl_c_in_a_save_leaves_the_tag_or_nothing(
    update: str, runtime: dict[str, Any], swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes as the first byte is to be written, in the call or beside it; training and saving go on."""
    save = StateSaver.save

    def interrupt_and_save(self: StateSaver, *args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        save(self, *args)

    with make(swap_path, update, **runtime) as engine:
        engine.save_checkpoint(tmp_path, "good")
        engine.flush()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(StateSaver, "save", interrupt_and_save)
            engine.save_checkpoint(tmp_path, "bad")
            engine.flush()
            while True:  # it came on a lane: Python raises it on this thread
                threading.Event().wait(0.01)
        engine.flush()
        engine.save_checkpoint(tmp_path, "next")
    assert complete(tmp_path) - {"bad"} == {"good", "next"}
    assert unfinished(tmp_path) == []


@pytest.mark.parametrize("update", ["barrier", "overlapped"])
def test_ctrl_c_in_a_commit_comes_behind_it(
    update: str, swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is whole, and training and saving go on."""
    commit, is_there = SwapStore.commit, threading.Event()

    def interrupt_and_commit(self: SwapStore, *arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        threading.Timer(0.2, is_there.set).start()
        is_there.wait()
        commit(self, *arguments)

    with make(swap_path, update, "nvme", checkpoint={"in_place": True}) as engine:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(SwapStore, "commit", interrupt_and_commit)
            engine.save_checkpoint(tmp_path, "one")
        assert complete(tmp_path) == {"one"}
        engine.backward(engine(*batch(1)))
        engine.step()
        engine.save_checkpoint(tmp_path, "two")
    assert complete(tmp_path) == {"two"} and unfinished(tmp_path) == []


def test_an_asynchronous_save_that_was_never_begun_is_discarded(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing will ever write it, so that no later call may wait for it."""

    def refuse(self: OverlappedPolicy, *arguments: Any) -> None:
        raise StoreError("there is no lane, says the test")

    with make(swap_path, "overlapped", checkpoint={"async": True}) as engine:
        engine.flush()
        with monkeypatch.context() as patched, pytest.raises(StoreError, match="says the test"):
            patched.setattr(OverlappedPolicy, "run_behind", refuse)
            engine.save_checkpoint(tmp_path)
        assert list_tags(tmp_path) == []
        engine.flush()
        engine.save_checkpoint(tmp_path)
    assert [info.complete for info in list_tags(tmp_path)] == [True]
