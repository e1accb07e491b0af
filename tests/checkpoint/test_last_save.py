"""A save that is interrupted at any place: what runs is waited for, what does not is discarded, and nothing is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiered_zero
from tests.support.models import ParityGPT, batch
from tests.support.trainers import tiered
from tiered_zero.checkpoint.directory import list_tags
from tiered_zero.checkpoint.last_save import QueuedSave, _Phase
from tiered_zero.checkpoint.ranks import publish_together
from tiered_zero.checkpoint.saving import StateSaver
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.hardware.select import build_accelerator
from tiered_zero.store.transfers import Worker
from tiered_zero.update.overlapped import OverlappedPolicy
from tiered_zero.update.policy import UpdatePolicy

pytestmark = pytest.mark.usefixtures("one_thread")


def make(swap_path: Path, update: str, **runtime: Any) -> tiered_zero.Engine:
    torch.manual_seed(0)
    engine = tiered(ParityGPT(num_blocks=1), swap_path, ("cpu", "cpu"), runtime={"update": update, **runtime})
    engine.backward(engine(*batch(0)))
    engine.step()
    return engine


def raises_once(act: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
    """`act`, with a KeyboardInterrupt before its first run, or behind it."""
    left = [KeyboardInterrupt()]

    def run(*args: Any, **named: Any) -> Any:
        if left and not after:
            raise left.pop()
        result = act(*args, **named)
        if left:
            raise left.pop()
        return result

    return run


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "tiered" in thread.name}


@pytest.mark.parametrize("runtime", [{}, {"checkpoint": {"async": True}}], ids=["at the cut", "async"])
def test_a_save_that_runs_is_waited_for_though_its_call_was_interrupted(
    runtime: dict[str, Any], swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes as soon as it is queued, when the caller does not know of it yet; its writes come later."""
    gate, save = threading.Event(), StateSaver.save

    def wait_and_save(self: StateSaver, *args: Any) -> None:
        assert gate.wait(60)
        save(self, *args)

    monkeypatch.setattr(StateSaver, "save", wait_and_save)
    monkeypatch.setattr(UpdatePolicy, "at_cut", raises_once(UpdatePolicy.at_cut, after=True))
    with make(swap_path, "overlapped", **runtime) as engine:
        engine.flush()
        with pytest.raises(KeyboardInterrupt):
            engine.save_checkpoint(tmp_path)
        timer = threading.Timer(0.3, gate.set)
        timer.start()
    timer.join()
    # cancelled before its thread had come to it, or written to its end: never cut off
    assert [info.complete for info in list_tags(tmp_path)] in ([], [True])
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_share_is_written_to_its_end_though_its_rank_was_interrupted(tmp_path: Path) -> None:
    """Its files are closed behind the lane that writes them, and then removed."""
    save, gate, found = QueuedSave(TagWriter.begin(tmp_path, "one")), threading.Event(), list[bool]()
    accelerator, ranks = build_accelerator("cpu"), SimpleNamespace(world_size=2, rank=0, fail=lambda message: None)

    def act() -> None:
        assert gate.wait(60)
        found.append((tmp_path / save.tag.name).is_dir())

    def interrupted() -> Any:
        accelerator.lane("update").submit(lambda: save.write(act))
        while save._phase is not _Phase.ON_LANE:
            time.sleep(0.001)
        threading.Timer(0.3, gate.set).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish_together(ranks, save, interrupted, lambda shares: None)  # type: ignore[arg-type]
    gate.set()
    accelerator.close()
    assert found == [True] and not list(tmp_path.glob(".tmp-*"))


def test_a_save_that_was_never_queued_is_discarded(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing will ever write it, so that no later call may wait for it."""
    with make(swap_path, "overlapped") as engine:
        engine.flush()
        monkeypatch.setattr(OverlappedPolicy, "run_behind", raises_once(OverlappedPolicy.run_behind))
        with pytest.raises(KeyboardInterrupt):
            engine.save_checkpoint(tmp_path)
        assert list_tags(tmp_path) == []
        engine.flush()
        engine.save_checkpoint(tmp_path)
    assert [info.complete for info in list_tags(tmp_path)] == [True]


@pytest.mark.parametrize("place", ["before a byte", "as its threads end", "as it is removed", "as its name is given"])
def test_an_interrupted_save_says_so_and_leaves_nothing(
    place: str, swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = threads()
    with make(swap_path, "barrier") as engine:
        engine.save_checkpoint(tmp_path, "good")
        with monkeypatch.context() as patched:
            if place == "as its threads end":
                patched.setattr(Worker, "close", raises_once(Worker.close))
            elif place == "before a byte":
                patched.setattr(StateSaver, "save", raises_once(StateSaver.save))
            elif place == "as it is removed":
                patched.setattr(StateSaver, "save", raises_once(StateSaver.save, after=True))
                patched.setattr(Worker, "close", raises_once(Worker.close))
            else:
                patched.setattr(TagWriter, "_write_manifest", raises_once(TagWriter._write_manifest, after=True))
            with pytest.raises(KeyboardInterrupt):
                engine.save_checkpoint(tmp_path, "bad")
        assert caplog.text.count("checkpoint bad was not written: KeyboardInterrupt came in its middle") == 1
        assert [(info.tag, info.complete) for info in list_tags(tmp_path) if info.complete] == [("good", True)]
        engine.flush()
        assert [path.name for path in tmp_path.glob(".tmp-*")] == []
        engine.save_checkpoint(tmp_path, "next")
    assert threads() <= before
    assert {info.tag for info in list_tags(tmp_path) if info.complete} == {"good", "next"}


def test_an_interrupt_behind_the_rename_does_not_deny_the_checkpoint(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TagWriter, "publish", raises_once(TagWriter.publish, after=True))
    with make(swap_path, "barrier") as engine, pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint(tmp_path)
    assert [info.complete for info in list_tags(tmp_path)] == [True]
    assert "was not written" not in caplog.text
