"""A limit on threads or address space is met when a run starts, as an error of ours, and not in mid-run."""

import threading
from pathlib import Path

import pytest

from tests.support.faulty_runs import build, train
from tiered_zero.errors import ConfigError, PlanError, StoreError
from tiered_zero.io.aiofile import AiofilesEngine
from tiered_zero.io.select import select_engine

pytestmark = pytest.mark.usefixtures("no_leaks")


def refuse(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if part in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.mark.parametrize("name", ["fetch", "reduce", "update", "tiered_zero-hash", "tiered_zero-store"])
def test_a_thread_that_cannot_be_started_fails_at_the_start(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with monkeypatch.context() as patch, pytest.raises((PlanError, StoreError), match=rf"{name} .*ulimit -v"):
        refuse(patch, name)
        build(swap_path, "overlapped")
    assert list(swap_path.iterdir()) == []


def test_no_thread_is_started_in_mid_run(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with build(swap_path, "overlapped") as engine, monkeypatch.context() as patch:
        refuse(patch, "")
        assert train(engine, 3) is None
        engine.flush()


def test_an_io_engine_without_threads_is_left_out(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "tiered-zero-aiofiles-loop")
    with pytest.raises(ConfigError, match=r"aiofiles is off: its threads cannot be started: .*ulimit -v"):
        select_engine(swap_path, prefer=AiofilesEngine.name)
