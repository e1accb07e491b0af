"""Short transfers, retries and their bounds, without a file system in the way."""

import errno
from pathlib import Path

import pytest

from tiered_zero.errors import TransferError
from tiered_zero.io.aiofile import Progress
from tiered_zero.io.disk import DiskFile
from tiered_zero.io.engine import Request
from tiered_zero.system.resources import CLOSED


def progress_over(path: Path, kind: str, nbytes: int, alignment: int) -> tuple[Progress, DiskFile]:
    file = DiskFile(str(path), CLOSED, alignment=alignment, direct=alignment > 1, drain=lambda _: True)
    return Progress(Request(kind=kind, path=str(path), offset=0, nbytes=nbytes), file, 0, nbytes), file


@pytest.mark.parametrize("alignment", [1, 512, 4096])
def test_every_short_length_is_continued_from_an_aligned_offset(tmp_path: Path, alignment: int) -> None:
    for moved in range(1, 8192, 1 if alignment > 1 else 97):
        progress, _ = progress_over(tmp_path / "x", "write", 8192, alignment)
        progress.advance(moved)
        assert progress.start == moved // alignment * alignment and progress.pause_s == 0.0
        progress.advance(8192 - progress.start)
        assert progress.finished


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_interruptions_are_retried_within_bounds(tmp_path: Path, code: int) -> None:
    progress, _ = progress_over(tmp_path / "x", "write", 8192, 512)
    pauses = []
    with pytest.raises(TransferError, match=errno.errorcode[code]):
        for _ in range(100):
            progress.interrupted(code)
            pauses.append(progress.pause_s)
    assert len(pauses) == 15 and pauses == sorted(pauses) and 0.5 < sum(pauses) < 2.0


def test_a_byte_moved_resets_the_number_of_tries(tmp_path: Path) -> None:
    progress, _ = progress_over(tmp_path / "x", "write", 100, 1)
    for _ in range(50):
        progress.interrupted(errno.EAGAIN)
        progress.advance(2)
    assert progress.finished


def test_a_write_that_moves_nothing_fails_after_bounded_retries(tmp_path: Path) -> None:
    progress, _ = progress_over(tmp_path / "x", "write", 8192, 512)
    progress.advance(700)
    with pytest.raises(TransferError, match="wanted 8192 bytes, got 700: EIO"):
        for _ in range(100):
            progress.advance(100)  # from 512 on: no further than before


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EINVAL, errno.EBADF])
def test_other_errors_are_final(tmp_path: Path, code: int) -> None:
    progress, _ = progress_over(tmp_path / "x", "read", 8192, 512)
    progress.advance(1000)
    with pytest.raises(TransferError) as caught:
        progress.interrupted(code)
    text = str(caught.value)
    assert caught.value.errno == code and errno.errorcode[code] in text
    assert str(tmp_path / "x") in text and "wanted 8192 bytes, got 1000" in text and "free there" in text
