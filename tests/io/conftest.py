"""The engines under test, the native one compiled here, and page-aligned memory for them."""

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.native_build import DIRECT_IO_SOURCE, compile_shared
from tiered_zero.io.engine import IOEngine, IOSettings
from tiered_zero.io.select import ENGINES

BuildEngine = Callable[..., IOEngine]


@pytest.fixture(scope="session")
def native_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the native engine's library, built from this tree."""
    directory = tmp_path_factory.mktemp("native")
    compile_shared(DIRECT_IO_SOURCE, directory / "_direct_io.so")
    return directory


@pytest.fixture(params=list(ENGINES))
def engine_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "native":
        monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(request.getfixturevalue("native_dir")))
    return name


@pytest.fixture
def build_engine(engine_name: str) -> Iterator[BuildEngine]:
    """Engines of the name under test, closed after it; small blocks, so that small requests are split too."""
    built: list[IOEngine] = []

    def build(*, direct: bool = False, block_size: int = 8192, queue_depth: int = 3, **others: float) -> IOEngine:
        settings = IOSettings(block_size=block_size, queue_depth=queue_depth)
        io_timeout_s = others.get("io_timeout_s", 20.0)
        engine = ENGINES[engine_name](direct=direct, settings=settings, io_timeout_s=io_timeout_s)
        built.append(engine)
        return engine

    yield build
    for engine in built:
        engine.close()


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest, swap_path: Path) -> bool:
    wanted: bool = request.param
    if wanted and not takes_direct(swap_path):
        pytest.skip(f"the file system of {swap_path} has no O_DIRECT; the buffered half of this test runs")
    return wanted


def takes_direct(directory: Path) -> bool:
    path = directory / "takes_direct"
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        try:
            return os.write(fd, mmap.mmap(-1, 4096)) == 4096
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)


def pages(nbytes: int, fill: bytes = b"") -> memoryview:
    """Page-aligned memory of `nbytes`, holding `fill` again and again."""
    view = memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    if fill:
        view[:] = (fill * (nbytes // len(fill) + 1))[:nbytes]
    return view
