"""The choice of an engine is made by trying, and every better one that is off has its reason."""

import errno
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.io.conftest import pages, takes_direct
from tiered_zero.errors import ConfigError
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.select import ENGINES, Selection, select_engine


@pytest.fixture
def with_native(native_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(native_dir))


@pytest.fixture
def without_native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(tmp_path))


def works(selection: Selection, directory: Path) -> bool:
    """The selected engine moves bytes, and nothing but the caller's file is in the directory."""
    data, into = pages(8192, b"selected"), pages(8192)
    file = selection.engine.open(str(directory / "data"), create=True)
    selection.engine.write(file, 0, data).wait()
    selection.engine.read(file, 0, into).wait()
    file.close()
    selection.engine.close()
    left = os.listdir(directory)
    (directory / "data").unlink()
    return into == data and left == ["data"]


@pytest.mark.usefixtures("with_native", "no_leaks")
def test_the_native_engine_comes_first(swap_path: Path) -> None:
    selection = select_engine(swap_path)
    direct = takes_direct(swap_path)
    assert selection.engine.name == "native" and selection.engine.direct == direct
    assert selection.reasons[-1].startswith("swap I/O: native engine, ")
    assert works(selection, swap_path)


@pytest.mark.usefixtures("without_native", "no_leaks")
def test_without_its_library_aiofiles_comes_next(swap_path: Path) -> None:
    selection = select_engine(swap_path)
    assert selection.engine.name == "aiofiles"
    assert selection.reasons[0].startswith("native is off: its library is missing")
    assert works(selection, swap_path)


@pytest.mark.usefixtures("without_native")
def test_with_nothing_that_works_the_error_names_every_reason(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiofiles.os", None)
    with pytest.raises(ConfigError, match=r"native is off: .*aiofiles is off: .*cannot be imported"):
        select_engine(swap_path)


@pytest.mark.parametrize("name", list(ENGINES))
@pytest.mark.usefixtures("with_native")
def test_an_engine_can_be_asked_for_by_name(swap_path: Path, name: str) -> None:
    selection = select_engine(swap_path, prefer=name, settings=IOSettings(queue_depth=2))
    assert selection.engine.name == name
    assert "2 requests at once" in selection.reasons[-1]
    assert works(selection, swap_path)


@pytest.mark.usefixtures("without_native")
def test_an_engine_asked_for_by_name_is_not_replaced(swap_path: Path) -> None:
    with pytest.raises(ConfigError, match="native is off"):
        select_engine(swap_path, prefer="native")
    with pytest.raises(ConfigError, match="no I/O engine 'libaio'; use auto, native, aiofiles"):
        select_engine(swap_path, prefer="libaio")


def refuse_direct(monkeypatch: pytest.MonkeyPatch, refused: Any) -> None:
    """pwritev through O_DIRECT fails with EINVAL where `refused(nbytes)`, as on XFS over 4096-byte sectors."""
    real = os.pwritev

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and refused(len(views[0])):
            raise OSError(errno.EINVAL, "refused")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)


@pytest.mark.usefixtures("no_leaks")
def test_a_file_system_of_4096_byte_sectors_takes_o_direct(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not takes_direct(swap_path):
        pytest.skip(f"the file system of {swap_path} has no O_DIRECT to refuse")
    refuse_direct(monkeypatch, lambda nbytes: nbytes % 4096)
    selection = select_engine(swap_path, prefer="aiofiles")
    assert selection.engine.direct and len(selection.reasons) == 1
    assert works(selection, swap_path)


@pytest.mark.usefixtures("no_leaks")
def test_o_direct_that_opens_but_cannot_write_falls_back_to_buffered(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch, lambda nbytes: True)
    selection = select_engine(swap_path, prefer="aiofiles")
    assert not selection.engine.direct
    tried, chosen = selection.reasons
    assert "O_DIRECT is off" in tried and "EINVAL" in tried and "aiofiles engine, buffered I/O, " in chosen
    assert works(selection, swap_path)


def test_an_engine_that_reads_other_bytes_than_were_written_is_refused(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        moved = real(fd, views, offset)
        views[0][moved - 1] ^= 1
        return moved

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ConfigError, match="read back is not what had been written"):
        select_engine(swap_path, prefer="aiofiles")
    assert os.listdir(swap_path) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ENOENT"):
        select_engine(tmp_path / "none", prefer="aiofiles")


def test_memory_for_requests_is_aligned() -> None:
    assert mmap.PAGESIZE % 4096 == 0  # what these tests take from mmap fits every alignment that is tried
