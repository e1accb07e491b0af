"""Short transfers, retries and their bounds in the engine `aiofiles`, over faked system calls."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.io.conftest import pages
from tiered_zero.errors import TransferError
from tiered_zero.io.aiofile import AiofilesEngine
from tiered_zero.io.engine import IOSettings

Write = Callable[[int, int], int]


class Writer:
    """Writes one block of 8192 bytes to a fresh file over a faked pwritev, which gets (bytes, offset)."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, int]] = []
        self._monkeypatch = monkeypatch
        settings = IOSettings(block_size=8192, queue_depth=1)
        self.engine = AiofilesEngine(direct=False, settings=settings, io_timeout_s=120.0)
        self.file = self.engine.open(str(path), create=True)

    def write(self, act: Write) -> None:
        def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
            self.calls.append((len(views[0]), offset))
            return act(*self.calls[-1])

        self._monkeypatch.setattr(os, "pwritev", pwritev)
        self.engine.write(self.file, 0, pages(8192)).wait()


@pytest.fixture
def writer(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    writer = Writer(swap_path / "data", monkeypatch)
    yield writer
    writer.file.close()
    writer.engine.close()


@pytest.mark.parametrize(("direct", "alignment"), [(False, 1), (True, 4096)])
def test_a_short_transfer_is_continued_from_an_aligned_offset(writer: Writer, direct: bool, alignment: int) -> None:
    writer.file.direct = direct
    lengths = iter([700, 4096, 5000])
    writer.write(lambda nbytes, offset: min(nbytes, next(lengths, nbytes)))
    done = 0
    for (nbytes, offset), moved in zip(writer.calls, [700, 4096, 5000], strict=False):
        assert offset == done // alignment * alignment and nbytes == 8192 - offset
        done = max(done, offset + min(nbytes, moved))
    assert done >= 8192 or writer.calls[-1][1] == done // alignment * alignment


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_interruptions_are_retried_within_bounds(writer: Writer, code: int) -> None:
    def write(nbytes: int, offset: int) -> int:
        raise OSError(code, "x")

    with pytest.raises(TransferError, match=errno.errorcode[code]):
        writer.write(write)
    assert len(writer.calls) == 16


def test_a_byte_moved_resets_the_number_of_tries(writer: Writer) -> None:
    def write(nbytes: int, offset: int) -> int:
        if len(writer.calls) % 2:
            raise OSError(errno.EAGAIN, "x")
        return nbytes if len(writer.calls) > 40 else 2

    writer.write(write)
    assert writer.calls[-1] == (8192 - 40, 40)


def test_a_write_that_moves_nothing_fails_after_bounded_retries(writer: Writer) -> None:
    writer.file.direct = True
    lengths = iter([5000])
    with pytest.raises(TransferError, match="wanted 8192 bytes, got 5000: EIO"):
        writer.write(lambda nbytes, offset: next(lengths, 100))  # from 4096 on: no further than before
    assert len(writer.calls) == 17


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EINVAL, errno.EBADF])
def test_other_errors_are_final(writer: Writer, code: int) -> None:
    def write(nbytes: int, offset: int) -> int:
        if len(writer.calls) == 1:
            return 1000
        raise OSError(code, "x")

    with pytest.raises(TransferError) as caught:
        writer.write(write)
    text = str(caught.value)
    assert len(writer.calls) == 2 and caught.value.errno == code and errno.errorcode[code] in text
    assert writer.file.path in text and "wanted 8192 bytes, got 1000" in text and "free there" in text
