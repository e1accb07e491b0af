"""Power fails after every operation of a recorded run, and un-synced writes are lost, torn or reordered: what is
recovered is the last commit that returned, or whole the one that was under way."""

import hashlib
import mmap
import os
import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from tests.fakes.crash_disk import CrashDisk, Operation, RecordingOS, fates
from tests.fakes.sync_io import SyncEngine
from tests.support.inspection.damage import store_damage
from tests.support.inspection.insides import (
    DATA_NAME,
    OWNER_NAME,
    Owner,
    SwapDir,
    SwapStore,
    files,
    manifest,
    swap_store,
)
from tiered_zero import system
from tiered_zero.errors import StoreError

PAGE = 4096
CAPACITY = 48 * PAGE


@dataclass
class Commit:
    """Operations `[begin, end)` of the log made `contents` durable; by step it is there from `prepared` on."""

    step: int
    begin: int
    prepared: int
    end: int
    contents: dict[str, bytes]


def aligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


def run(path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Operation], list[Commit]]:
    """A random run: partial rewrites, also of what is to be written once, scratch beside committed records, and
    recoveries from step 5 on.

    Step 6 is prepared and never confirmed: the recovery takes it (odd seeds) or goes back to step 5.
    """
    random = Random(seed)
    log: list[Operation] = []
    recording = RecordingOS(log)
    for module in (files, system):
        monkeypatch.setattr(module, "os", recording)
    monkeypatch.setattr(manifest, "CHUNK_NBYTES", 2 * PAGE)
    engine = SyncEngine(operations=log)
    directory = SwapDir.create([path])
    store = SwapStore(directory, engine, capacity_nbytes=CAPACITY)
    sizes = {"a": PAGE, "b": 3 * PAGE, "c": 6 * PAGE, "once": 4 * PAGE}
    contents: dict[str, bytearray] = {}
    commits: list[Commit] = []
    for name in "abc":
        store.reserve(name, sizes[name], committed=True)
    store.reserve("once", sizes["once"], committed=True, write_once=True)
    store.reserve("scratch", 2 * PAGE)
    for step in range(1, 8):
        for _ in range(random.randint(1, 5)):
            name = random.choice([*sizes, "scratch"])
            record = store.records()[name]
            pages = record.extent_nbytes // PAGE
            first = random.randrange(pages) if name in contents else 0
            last = random.randint(first + 1, pages) if name in contents else pages
            data = random.randbytes((last - first) * PAGE)
            store.write(record, aligned(data), first * PAGE).wait()
            if name != "scratch":
                contents.setdefault(name, bytearray(record.extent_nbytes))[first * PAGE : last * PAGE] = data
        commit = Commit(step, len(log), 0, 0, {name: bytes(data) for name, data in contents.items()})
        store.prepare(step, {"step": step})
        commit.prepared = len(log)
        if step != 6:
            store.confirm()
        if step >= 5:
            store.close(remove=False)
            directory = SwapDir.open(directory.paths[0])
            steps = {state.step for state in manifest.load(directory.paths[0]) if state is not None}
            assert steps == ({5, 6} if step == 6 else {step})
            store = SwapStore.recover(directory, engine, step=6 if step == 6 and seed % 2 else None)
            store.reserve("scratch", 2 * PAGE)
        commit.end = len(log)
        if step == 6 and seed % 2 == 0:
            contents = {name: bytearray(data) for name, data in commits[-1].contents.items()}  # 6 was given up
        else:
            commits.append(commit)
    store.close()
    return log, commits


def recover(files: dict[str, bytes], where: Path, step: int | None = None) -> tuple[SwapStore, dict[str, bytes]]:
    """The store that a new process finds after the crash, and what its records hold."""
    where.mkdir(mode=0o700)
    for name, content in files.items():
        (where / Path(name).name).write_bytes(content)
    names = {"run_id": where.name, "host": "", "model": "", "note": ""}
    (where / OWNER_NAME).write_bytes(Owner(**names, pid=0, created_s=0.0, paths=(str(where),)).encode())
    directory = SwapDir.open(where)
    try:
        store = SwapStore.recover(directory, SyncEngine(), step=step)
    except BaseException:
        directory.remove()
        raise
    found = {}
    for name, record in store.records().items():
        memory = aligned(bytes(record.extent_nbytes))
        try:
            store.read(record, memory).wait()
        except StoreError as error:
            if "never written" in str(error):
                continue
            raise
        found[name] = bytes(memory)
    return store, found


def check_every_crash(log: list[Operation], commits: list[Commit], where: Path, number: int = 3) -> int:
    """Crash after each prefix of the log in several ways. Raises AssertionError or StoreError on a lost state. What
    another crash has left too, with the same commits to answer for, is looked at once."""
    disk = CrashDisk({DATA_NAME: CAPACITY})
    num_crashes, seen = 0, set[tuple[object, ...]]()
    for length in range(len(log) + 1):
        if length:
            disk.apply(log[length - 1])
        returned = [commit for commit in commits if commit.end <= length]
        under_way = [commit for commit in commits if commit.begin < length < commit.end]
        allowed = {commit.step: commit for commit in [*returned[-1:], *under_way]}
        for fate in fates(length, number):
            num_crashes += 1
            files = disk.crash(*fate)
            left = hashlib.sha256(pickle.dumps(sorted(files.items()))).digest()
            state = left, *allowed, len(returned), *(commit.prepared <= length for commit in under_way)
            if state in seen:
                continue
            seen.add(state)
            directory = where / str(num_crashes)
            try:
                store, found = recover(files, directory)
            except StoreError as error:
                assert not returned, f"after operation {length} the commit of {returned[-1].step} is lost: {error}"
                continue
            assert store.step in allowed, f"after operation {length}: step {store.step}, expected one of {[*allowed]}"
            assert found == allowed[store.step].contents
            committed, _ = manifest.load(Path(store.paths[0]))
            assert committed is not None and committed.metadata == {"step": store.step}
            assert store_damage(store.paths) == []
            store.close()
            for commit in under_way:
                if commit.prepared <= length:
                    store, found = recover(files, directory, commit.step)
                    assert (store.step, found) == (commit.step, commit.contents)
                    store.close()
    return num_crashes


@pytest.fixture
def ruins(tmp_path: Path) -> Iterator[Path]:
    """Where the crashed directories are laid out; in memory if there is some, because nothing crashes there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as path:
        yield Path(path)


@pytest.mark.parametrize("seed", range(4))
def test_every_crash_leaves_a_whole_commit(
    swap_path: Path, ruins: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, commits = run(swap_path, seed, monkeypatch)
    monkeypatch.undo()
    assert check_every_crash(log, commits, ruins) > 300


def _without(log: list[Operation], kind: str, part: str) -> list[Operation]:
    return [("nothing", "") if item[0] == kind and part in Path(item[1]).name else item for item in log]


@pytest.mark.parametrize(
    ("kind", "part"), [("sync", DATA_NAME), ("sync", manifest.NEXT_NAME), ("sync_directory", "tiered_zero-")]
)
def test_the_replay_notices_a_missing_sync(
    swap_path: Path, ruins: Path, kind: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, commits = run(swap_path, 0, monkeypatch)
    monkeypatch.undo()
    with pytest.raises((AssertionError, StoreError)):
        check_every_crash(_without(log, kind, part), commits, ruins)


def test_the_replay_notices_a_reused_slot(swap_path: Path, ruins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_store, "other_slots", lambda durable, start, end: [manifest.Range(start, end, 0, None)])
    monkeypatch.setattr(SwapStore, "_hashed", lambda _commits, _record, ranges: ranges)  # which notices it before
    log, commits = run(swap_path, 0, monkeypatch)
    monkeypatch.undo()
    with pytest.raises((AssertionError, StoreError)):
        check_every_crash(log, commits, ruins)
