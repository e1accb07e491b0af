"""A save that is under way as Ctrl-C or an error comes: it is written to its end or discarded, and nothing is left."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiered_zero
from tests.support.inspection.insides import OverlappedPolicy
from tests.support.models import ParityGPT, batch
from tests.support.trainers import tiered
from tiered_zero.checkpoint.directory import list_tags
from tiered_zero.checkpoint.last_save import QueuedSave
from tiered_zero.checkpoint.ranks import publish_together
from tiered_zero.checkpoint.saving import StateSaver
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.errors import StoreError
from tiered_zero.hardware.device.select import build_accelerator

pytestmark = pytest.mark.usefixtures("one_thread")


def make(swap_path: Path, update: str, **runtime: Any) -> tiered_zero.Engine:
    torch.manual_seed(0)
    engine = tiered(ParityGPT(num_blocks=1), swap_path, ("cpu", "cpu"), runtime={"update": update, **runtime})
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
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_share_is_written_to_its_end_though_its_rank_fails(tmp_path: Path) -> None:
    """Its files are closed behind the lane that writes them, and then removed."""
    save, gate, found = QueuedSave(TagWriter.begin(tmp_path, "one")), threading.Event(), list[bool]()
    accelerator, ranks = build_accelerator("cpu"), SimpleNamespace(world_size=1, rank=0)

    def act() -> None:
        assert gate.wait(60)
        found.append((tmp_path / save.tag.name).is_dir())

    def fail() -> Any:
        accelerator.lane("update").submit(lambda: save.write(act))
        save.cut.complete()
        save.is_queued = True
        threading.Timer(0.3, gate.set).start()
        raise StoreError("this rank cannot go on, says the test")

    with pytest.raises(StoreError, match="says the test"):
        publish_together(ranks, save, fail, lambda shares: None)  # type: ignore[arg-type]
    accelerator.close()
    assert found == [True] and not list(tmp_path.glob(".tmp-*"))


def test_a_save_that_was_never_queued_is_discarded(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing will ever write it, so that no later call may wait for it."""

    def refuse(self: OverlappedPolicy, *arguments: Any) -> None:
        raise StoreError("there is no lane, says the test")

    with make(swap_path, "overlapped") as engine:
        engine.flush()
        with monkeypatch.context() as patched, pytest.raises(StoreError, match="says the test"):
            patched.setattr(OverlappedPolicy, "run_behind", refuse)
            engine.save_checkpoint(tmp_path)
        assert list_tags(tmp_path) == []
        engine.flush()
        engine.save_checkpoint(tmp_path)
    assert [info.complete for info in list_tags(tmp_path)] == [True]
