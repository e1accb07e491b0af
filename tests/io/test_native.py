"""What only the native engine shows: its library, and its rate while Python code computes."""

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.io.conftest import pages
from tests.support.native_build import DIRECT_IO_SOURCE, ROOT, compile_shared
from tiered_zero.errors import ConfigError
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.native import NativeEngine, _Request, load_library
from tiered_zero.native import find_library


def test_the_library_is_found_by_its_name(native_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(native_dir))
    assert find_library("_direct_io") == native_dir / "_direct_io.so"
    assert find_library("_none") is None


def test_no_library_is_a_reason_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="its library is missing: TIERED_ZERO_NATIVE_DIR"):
        load_library()
    (tmp_path / "_direct_io.so").write_bytes(b"no library")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_library()


def test_the_request_is_laid_out_as_in_c(native_dir: Path, tmp_path: Path) -> None:
    fields = [name for name, _ in _Request._fields_]
    offsets = ", ".join(f"(long)offsetof(tz_request, {name})" for name in fields)
    source = tmp_path / "layout.c"
    source.write_text(f'#include <stddef.h>\n#include "{DIRECT_IO_SOURCE}"\nlong offsets[] = {{{offsets}}};\n')
    library = ctypes.CDLL(str(compile_shared(source, tmp_path / "layout.so")))
    found = list((ctypes.c_long * len(fields)).in_dll(library, "offsets"))
    assert found == [getattr(_Request, name).offset for name in fields]


Build = Callable[..., NativeEngine]


@contextmanager
def no_switches() -> Iterator[None]:
    """While this is open other threads of Python run only where this one releases the GIL by itself."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(300.0)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


@pytest.fixture
def build(native_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(native_dir))

    def build(block_size: int = 1 << 20, queue_depth: int = 8) -> NativeEngine:
        settings = IOSettings(block_size=block_size, queue_depth=queue_depth)
        return NativeEngine(direct=False, settings=settings, io_timeout_s=120.0)

    return build


def test_its_workers_need_no_python(build: Build, swap_path: Path) -> None:
    """A request completes while the GIL is held."""
    engine = build(block_size=4096)
    file = engine.open(str(swap_path / "data"), create=True)
    deadline_s = time.monotonic() + 60
    with no_switches():
        transfer = engine.write(file, 0, pages(1 << 20, b"no GIL"))
        while not transfer.done() and time.monotonic() < deadline_s:
            ctypes.PyDLL(None).usleep(10_000)  # PyDLL: the GIL is held while it sleeps
        assert transfer.done()
    transfer.wait()
    file.close()
    engine.close()


def test_a_wait_lets_other_threads_run(build: Build) -> None:
    engine = build()
    never = _Request()
    turns: list[int] = []
    stop = threading.Event()

    def count() -> None:
        while not stop.wait(0.001):
            turns.append(1)

    thread = threading.Thread(target=count)
    thread.start()
    deadline_s = time.monotonic() + 60
    with no_switches():
        before = len(turns)
        while len(turns) == before and time.monotonic() < deadline_s:
            assert engine.library.wait(engine.pool, never, 10_000_000) == 0
        assert len(turns) > before
    stop.set()
    thread.join()
    engine.close()


def test_urgent_reads_are_claimed_before_all_that_no_worker_has(
    tmp_path: Path, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(tmp_path))
    include = f"-I{DIRECT_IO_SOURCE.parent}"
    library_path = compile_shared(ROOT / "tests/io/gated_reads.c", tmp_path / "_direct_io.so", include)
    library = ctypes.CDLL(str(library_path))
    num_noted = ctypes.c_int.in_dll(library, "num_noted")
    settings = IOSettings(block_size=4096, queue_depth=1)
    engine = NativeEngine(direct=False, settings=settings, io_timeout_s=120.0)
    path = swap_path / "data"
    path.write_bytes(bytes(16 * 4096))
    file = engine.open(str(path))
    transfers = [engine.write(file, 0, pages(4096)), engine.sync(file)]
    transfers += [engine.read(file, number * 4096, pages(2 * 4096)) for number in (0, 2)]
    while not num_noted.value:
        time.sleep(0.001)
    transfers += [engine.read(file, number * 4096, pages(2 * 4096), urgent=True) for number in (8, 10)]
    transfers += [engine.read(file, 4 * 4096, pages(4096)), engine.write(file, 0, pages(4096)), engine.sync(file)]
    ctypes.c_int.in_dll(library, "gate_is_open").value = 1
    for transfer in transfers:
        transfer.wait()
    noted = (ctypes.c_long * num_noted.value).in_dll(library, "noted")
    assert [offset // 4096 for offset in noted] == [0, 8, 9, 10, 11, 1, 2, 3, 4]
    file.close()
    engine.close()


def test_the_pool_lives_as_long_as_a_transfer_that_may_ask_it(build: Build, swap_path: Path) -> None:
    engine = build()
    freed: list[object] = []
    free_pool = engine.library.free_pool
    engine.library.free_pool = freed.append
    pool = engine.pool
    file = engine.open(str(swap_path / "data"), create=True)
    transfer = engine.write(file, 0, pages(4096))
    file.close()
    engine.close()
    del engine, file
    gc.collect()
    assert not freed
    transfer.wait()  # looks there for the last sign of life
    del transfer
    gc.collect()
    assert freed == [pool]
    free_pool(pool)


@pytest.mark.usefixtures("no_leaks")
def test_threads_end_and_descriptors_close(build: Build, swap_path: Path) -> None:
    def count(what: str) -> int:
        return len(os.listdir(f"/proc/self/{what}"))

    threads, descriptors = count("task"), count("fd")
    engine = build(queue_depth=6)
    assert count("task") - threads == 6
    file = engine.open(str(swap_path / "data"), create=True)
    engine.write(file, 0, pages(1 << 22)).wait()
    file.close()
    engine.close()
    assert count("fd") == descriptors, "at once, and not with the engine's last transfer"
    del engine, file
    gc.collect()
    assert count("fd") == descriptors


def test_thousands_of_small_requests(build: Build, swap_path: Path) -> None:
    engine = build()
    file = engine.open(str(swap_path / "data"), create=True)
    data = pages(5000 * 1024, bytes(range(256)))
    transfers = [engine.write(file, index * 1024, data[index * 1024 : index * 1024 + 1024]) for index in range(5000)]
    for transfer in transfers:
        transfer.wait()
    assert engine.in_flight() == [] and (swap_path / "data").read_bytes() == data
    file.close()
    engine.close()


def test_under_the_thread_sanitizer(tmp_path: Path) -> None:
    """A C program that submits from several threads, with syncs and failures between, built with -fsanitize=thread."""
    program = tmp_path / "race"
    compiler = shutil.which("cc") or pytest.skip("no C compiler on this machine")
    command = [compiler, "-g", "-O1", "-fsanitize=thread", "-pthread", "-I", str(ROOT / "tiered_zero/native")]
    made = subprocess.run(
        [*command, str(ROOT / "tests/io/race.c"), "-o", str(program)], check=False, capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no thread sanitizer here: {made.stderr.strip()[:200]}")
    ran = subprocess.run(
        [str(program), str(tmp_path / "data")], check=False, capture_output=True, text=True, timeout=300
    )
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert ran.returncode == 0, ran.stderr
