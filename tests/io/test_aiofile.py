"""What only the engine `aiofiles` shows: how its event loop ends."""

import gc
import logging
import threading
from pathlib import Path

import pytest

from tests.io.conftest import pages
from tiered_zero.errors import TransferError
from tiered_zero.io.aiofile import AiofilesEngine
from tiered_zero.io.engine import IOSettings


@pytest.mark.parametrize("is_running", [False, True], ids=["waiting for a worker", "on a worker"])
def test_a_request_that_is_stuck_at_close_ends_without_a_word(
    is_running: bool, swap_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = AiofilesEngine(direct=False, settings=IOSettings(queue_depth=1), io_timeout_s=1e-9)
    file = engine.open(str(swap_path / "data"), create=True)
    free, begun = threading.Event(), threading.Event()
    if is_running:
        real = file.sync

        def sync() -> None:
            begun.set()
            free.wait(60)
            real()

        monkeypatch.setattr(file, "sync", sync)
        transfer = engine.sync(file)
        assert begun.wait(60)
    else:
        engine._executor.submit(free.wait, 60)
        transfer = engine.write(file, 0, pages(4096))
    with pytest.raises(TransferError, match="made no progress"):
        transfer.wait()
    thread, loop = engine._thread, engine._loop
    with caplog.at_level(logging.DEBUG, logger="asyncio"):
        engine.close()
        free.set()
        thread.join(60)
        del engine, transfer
        gc.collect()
    assert not thread.is_alive() and loop.is_closed()
    assert not [record for record in caplog.records if record.name == "asyncio"]
