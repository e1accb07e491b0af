"""The faulty engine does what its faults say: tests of others stand on it."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.io_faults import Fault, FaultyEngine
from tests.io.conftest import pages
from tiered_zero.errors import TransferError
from tiered_zero.io.aiofile import AiofilesEngine
from tiered_zero.io.engine import File, IOSettings

NBYTES = 8192


@pytest.fixture
def engine() -> Iterator[FaultyEngine]:
    inner = AiofilesEngine(direct=False, settings=IOSettings(), io_timeout_s=120.0)
    engine = FaultyEngine(inner, io_timeout_s=0.1)
    yield engine
    engine.close()


@pytest.fixture
def file(engine: FaultyEngine, swap_path: Path) -> Iterator[File]:
    file = engine.open(str(swap_path / "data"), create=True)
    engine.write(file, 0, pages(NBYTES, b"old")).wait()
    yield file
    file.close()


@pytest.mark.parametrize("kind", ["read", "write", "sync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_the_nth_request_fails_and_the_engine_latches(engine: FaultyEngine, file: File, kind: str, code: int) -> None:
    engine.add(Fault(kind, engine.count(kind) + 2, code))
    data = pages(NBYTES, b"new")
    submit = {
        "read": lambda: engine.read(file, 0, pages(NBYTES)),
        "write": lambda: engine.write(file, 0, data),
        "sync": lambda: engine.sync(file),
    }[kind]
    submit().wait()
    with pytest.raises(TransferError, match=errno.errorcode[code]):
        submit().wait()
    with pytest.raises(TransferError, match=errno.errorcode[code]):
        engine.sync(file)


@pytest.mark.parametrize("effect", ["short", "torn"])
def test_half_of_a_write_is_done(engine: FaultyEngine, file: File, effect: str) -> None:
    old, new = pages(NBYTES, b"old"), pages(NBYTES, b"new")
    engine.add(Fault("write", 2, effect))
    transfer = engine.write(file, 0, new)
    if effect == "short":
        with pytest.raises(TransferError, match="wanted 8192 bytes, got 4096"):
            transfer.wait()
    else:
        transfer.wait()
    assert Path(file.path).read_bytes() == bytes(new[:4096]) + bytes(old[4096:])


def test_a_bit_flips_in_the_file_or_in_memory(engine: FaultyEngine, file: File) -> None:
    new, into = pages(NBYTES, b"new"), pages(NBYTES)
    engine.add(Fault("write", 2, "flip", at=100), Fault("read", 2, "flip", at=7))
    engine.write(file, 0, new).wait()
    assert new == pages(NBYTES, b"new")
    for flipped in ([100], [7, 100], [100]):
        transfer = engine.read(file, 0, into)
        transfer.wait()
        transfer.wait()
        assert [at for at in range(NBYTES) if into[at] != new[at]] == flipped


def test_a_stall_lasts_until_it_is_released(engine: FaultyEngine, file: File) -> None:
    engine.add(Fault("read", 1, "stall"))
    transfer = engine.read(file, 0, pages(NBYTES))
    with pytest.raises(TransferError, match="1 requests in flight"):
        transfer.wait()
    assert not transfer.done()
    engine.release()
    transfer.wait()
    assert transfer.done() and engine.in_flight() == []
