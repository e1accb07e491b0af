"""A save whose call fails: what runs is waited for, what was never queued is discarded."""

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
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.hardware.select import build_accelerator
from tiered_zero.update.overlapped import OverlappedPolicy

pytestmark = pytest.mark.usefixtures("one_thread")


def make(swap_path: Path, update: str, **runtime: Any) -> tiered_zero.Engine:
    torch.manual_seed(0)
    engine = tiered(ParityGPT(num_blocks=1), swap_path, ("cpu", "cpu"), runtime={"update": update, **runtime})
    engine.backward(engine(*batch(0)))
    engine.step()
    return engine


def raises_once(act: Callable[..., Any]) -> Callable[..., Any]:
    """`act`, with a MemoryError in place of its first run."""
    left = [MemoryError()]

    def run(*args: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return act(*args, **named)

    return run


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
        with pytest.raises(MemoryError):
            engine.save_checkpoint(tmp_path)
        assert list_tags(tmp_path) == []
        engine.flush()
        engine.save_checkpoint(tmp_path)
    assert [info.complete for info in list_tags(tmp_path)] == [True]
