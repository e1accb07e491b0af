"""Faults under the real engines: each is raised in the request that it befell, or mended; none passes in silence.

System calls fail by LD_PRELOAD (faulty_libc.c), one process an engine; then real file systems that are full, missing or
odd.
"""

import errno
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.io.conftest import BuildEngine, pages, takes_direct
from tests.io.fault_cases import CASES
from tests.support.file_systems import mounted
from tests.support.native_build import ROOT, compile_shared
from tiered_zero.errors import TransferError
from tiered_zero.io.native import NativeEngine
from tiered_zero.io.select import ENGINES, preflight_directory, select_engine

EXPECTED = {
    "eio_on_read": r"read of 40960 bytes .* wanted \d+ bytes, got 0: EIO \(.*\); .* free there\. The device reported",
    "eio_on_write": r"write of 40960 bytes .* wanted \d+ bytes, got 0: EIO",
    "enospc_on_write": r"write of 40960 bytes .* ENOSPC .* free there\. Free space there",
    "eio_on_sync": r"sync of .* failed: EIO .* resume from the last checkpoint\. \(1 call\)",
    "enospc_on_allocate": r"cannot reserve 1\.0 MiB \(1048576 bytes\) for .* ENOSPC",
    "no_fallocate": r"3145728 bytes in 3\d{6}, intact",
    "short_writes": "intact",
    "short_reads": "intact",
    "writes_of_nothing": r"write of 8192 bytes .* wanted 8192 bytes, got 0: EIO",
    "eintr_once": "intact",
    "eagain_once": "intact",
    "eagain_for_ever": r"read of 8192 bytes .* (EAGAIN|EIO) .*\(16 calls\)",
    "truncated": r"read of 40960 bytes .* met the end of the file: .* the file has 39960 bytes",
    "urgent_read_in_a_deep_queue": "came first",
    "stalled": r"read of 8192 bytes .* made no progress for 0\.3 s .*\n.*: 1 requests in flight\n.* 8192 bytes at 0 ",
}


@pytest.fixture(scope="module")
def outcomes(native_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], str]:
    """(engine, access, case) -> what came of it; the engines run side by side, each in a process."""
    library = compile_shared(ROOT / "tests/io/faulty_libc.c", native_dir / "faulty_libc.so", "-ldl")
    directory = tmp_path_factory.mktemp("faults")
    settings = {"LD_PRELOAD": str(library), "TIERED_ZERO_NATIVE_DIR": str(native_dir)}
    accesses = ["direct", "buffered"] if takes_direct(directory) else ["buffered"]
    children = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/io/fault_cases.py"), str(directory), name, *accesses],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ENGINES
    ]
    try:
        lines = [line for child in children for line in child.communicate(timeout=300)[0].splitlines()]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * len(children)
    assert os.listdir(directory) == []
    rows = [json.loads(line) for line in lines]
    return {(row["engine"], row["access"], row["case"]): row["came"] for row in rows}


@pytest.mark.parametrize(("engine", "case"), [*itertools.product(ENGINES, CASES)])
def test_a_failing_system_call(outcomes: dict[tuple[str, str, str], str], engine: str, case: str) -> None:
    came = {access: text for (name, access, key), text in outcomes.items() if (name, key) == (engine, case)}
    assert "buffered" in came
    for access, text in came.items():
        assert re.match(EXPECTED[case], text, re.DOTALL), f"{access}: {text}"


def test_a_full_table_of_descriptors(build_engine: BuildEngine, swap_path: Path) -> None:
    engine = build_engine()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open, limits[1]))
    files = []  # what nobody holds is closed
    try:
        with pytest.raises(TransferError, match=r"EMFILE .*ulimit -n") as caught:
            for index in range(num_open + 1):
                files.append(engine.open(str(swap_path / f"data{index}"), create=True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.errno == errno.EMFILE


def test_a_directory_removed_in_mid_run(build_engine: BuildEngine, swap_path: Path) -> None:
    engine = build_engine()
    directory = swap_path / "run"
    directory.mkdir()
    file = engine.open(str(directory / "data"), create=True)
    data, into = pages(20000, b"removed"), pages(20000)
    engine.write(file, 0, data).wait()
    shutil.rmtree(directory)
    engine.read(file, 0, into).wait()  # the open file lives on
    assert into == data
    with pytest.raises(TransferError, match=r"ENOENT .*has something removed the swap directory"):
        engine.open(str(directory / "more"), create=True)
    write_only = os.open(os.devnull, os.O_WRONLY)
    with pytest.raises(TransferError, match=r"EBADF.*free space there unknown"):
        os.dup2(write_only, file.fd)
        engine.read(file, 0, into).wait()
    os.close(write_only)
    file.close()


@pytest.fixture(params=["ext4", "xfs", "btrfs", "fuse", "tmpfs", "overlay"])
def real_fs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(request.param, tmp_path) as point:
        yield point


def test_a_real_file_system_takes_an_engine_and_runs_full(
    real_fs: Path, native_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(native_dir))
    preflight_directory(real_fs)
    selection = select_engine(real_fs)
    assert isinstance(selection.engine, NativeEngine)
    engine = selection.engine
    file, big = (engine.open(str(real_fs / name), create=True) for name in ("data", "big"))
    file.allocate(4 << 20)
    data, into = pages(4 << 20, b"a real file system"), pages(4 << 20)
    engine.write(file, 0, data).wait()
    engine.sync(file).wait()
    engine.read(file, 0, into).wait()
    assert into == data
    free_nbytes = os.statvfs(real_fs).f_bavail * os.statvfs(real_fs).f_frsize
    too_much = free_nbytes + (1 << 30)
    with pytest.raises(TransferError, match=rf"cannot reserve .*\({too_much} bytes\).*(ENOSPC|EFBIG)"):
        big.allocate(too_much)
    # Behind our back: bytes that were never reserved. A buffered write may come to light with the sync only.
    with pytest.raises(TransferError, match="ENOSPC"):
        for offset in range(0, too_much, 4 << 20):
            engine.write(big, offset, data).wait()
        engine.sync(big).wait()
    with pytest.raises(TransferError, match="ENOSPC"):
        engine.read(file, 0, into)
    for opened in (file, big):
        opened.close()
    engine.close()
    for name in ("data", "big"):
        (real_fs / name).unlink()
    assert [name for name in os.listdir(real_fs) if name != "lost+found"] == []
