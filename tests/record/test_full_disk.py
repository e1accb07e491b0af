"""Real small file systems: space is taken at start or not at all, and a store that has started does not run out.

They are mounted where this machine allows it (root; loop devices for ext4). Where it does not, the test says so and
skips; test_swap_store.py has the same cases with an injected ENOSPC, which always run.
"""

import mmap
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiered_zero.errors import StoreError
from tiered_zero.io.select import select_engine
from tiered_zero.record.directory import SwapDir, list_runs
from tiered_zero.record.store import SwapStore
from tiered_zero.sizes import MIB


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, swap_path: Path) -> Iterator[Path]:
    """An empty file system of 32 MiB."""
    point, image = swap_path / "mnt", swap_path / "image"
    point.mkdir()
    commands = [["mount", "-t", "tmpfs", "-o", "size=32m,mode=0700", "none", str(point)]]
    if request.param == "ext4":
        image.write_bytes(b"")
        os.truncate(image, 32 * MIB)
        commands = [["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(point)]]
    for command in commands:
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed here: no {request.param} to fill")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting is refused here: {' '.join(command)}: {done.stderr.strip()}")
    shutil.rmtree(point / "lost+found", ignore_errors=True)
    yield point
    subprocess.run(["umount", str(point)], check=True)


def free_nbytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def fill(path: Path) -> None:
    with open(path / "junk", "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


def test_too_small_is_a_clean_error_that_leaves_nothing(small_disk: Path, swap_path: Path) -> None:
    before = free_nbytes(small_disk)
    engine = select_engine(small_disk).engine
    with pytest.raises(StoreError, match=r"needs 64\.0 MiB .*free there"):
        SwapStore(SwapDir.create([small_disk]), engine, capacity_nbytes=64 * MIB)
    assert list(small_disk.iterdir()) == [] and free_nbytes(small_disk) == before
    other = swap_path / "large"
    other.mkdir()
    with pytest.raises(StoreError, match=str(small_disk)):
        SwapStore(SwapDir.create([other, small_disk]), engine, capacity_nbytes=128 * MIB)
    assert list(small_disk.iterdir()) == [] == list(other.iterdir())
    engine.close()


def test_a_started_store_never_runs_out_and_a_commit_that_does_can_be_repeated(small_disk: Path) -> None:
    engine = select_engine(small_disk).engine
    store = SwapStore(SwapDir.create([small_disk]), engine, capacity_nbytes=16 * MIB)
    record = store.reserve("a", 8 * MIB, committed=True)
    store.commit(1, {})
    fill(small_disk)
    memory = memoryview(mmap.mmap(-1, 8 * MIB))
    for value in (b"x", b"y"):
        memory[:] = value * (8 * MIB)
        store.write(record, memory).wait()
        with pytest.raises(StoreError, match="untouched"):
            store.commit(2, {"much": "text" * 20_000})
    (small_disk / "junk").unlink()
    store.commit(3, {})
    store.close(remove=False)
    (run,) = list_runs(small_disk)
    store = SwapStore.recover(SwapDir.open(run.path), engine)
    store.read(store.records()["a"], memory).wait()
    assert (store.step, bytes(memory)) == (3, b"y" * (8 * MIB))
    store.close()
    engine.close()
