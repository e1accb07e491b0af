"""Real processes end in every way while they hold a swap directory: what stays, what goes, and who may remove it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.sync_io import SyncEngine
from tests.support.inspection.insides import (
    SwapDir,
    SwapStore,
    collect_garbage,
    leftover_notices,
    list_runs,
    load_manifests,
)
from tiered_zero.errors import StoreError

ROOT = Path(__file__).parents[2]

IMPORTS = f"""
from {SwapDir.__module__} import SwapDir
from {SwapStore.__module__} import SwapStore
"""
"""Without torch, which takes ten times as long."""

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from tests.fakes.sync_io import SyncEngine
{imports}

directory = SwapDir.create([Path(path) for path in sys.argv[1].split(",")], model="gpt")
store = SwapStore(directory, SyncEngine(), capacity_nbytes=1 << 20)
record = store.reserve("a", 4096, committed=True)
store.write(record, memoryview(bytearray(b"x" * 4096))).wait()
{act}
print("ready", flush=True)
{end}
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(swap_path: Path) -> Iterator[Start]:
    """Runs the program above in a child until it has said "ready"."""
    children = []

    def begin(act: str = "", end: str = "time.sleep(500)", path: str = "") -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(imports=IMPORTS, act=act, end=end), path or str(swap_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        return child

    yield begin
    for child in children:
        child.kill()
        child.communicate()


def test_kill_9_is_seen_as_dead_and_collected_but_a_live_run_is_kept(swap_path: Path, start: Start) -> None:
    dead, live = start(), start()
    assert [run.state for run in list_runs(swap_path)] == ["alive", "alive"]
    dead.kill()
    dead.wait()
    states = {run.pid: run.state for run in list_runs(swap_path)}
    assert states == {dead.pid: "dead", live.pid: "alive"}
    assert [item.removed for item in collect_garbage(swap_path, dry_run=True)] == [
        run.state == "dead" for run in list_runs(swap_path)
    ]
    assert len(list_runs(swap_path)) == 2, "a dry run removes nothing"
    collect_garbage(swap_path)
    (left,) = list_runs(swap_path)
    assert (left.pid, left.state, left.model, left.nbytes >= 1 << 20) == (live.pid, "alive", "gpt", True)


def test_a_killed_run_resumes_from_its_commit_and_gc_keeps_that(swap_path: Path, start: Start) -> None:
    child = start(act="store.commit(7, {'loss': 2.5}); store.write(record, memoryview(bytearray(4096))).wait()")
    (run,) = list_runs(swap_path)
    with pytest.raises(StoreError, match=f"belongs to a live run .pid {child.pid}"):
        SwapDir.open(run.path)
    child.kill()
    child.wait()
    (kept,) = collect_garbage(swap_path)
    assert (kept.removed, kept.run.step) == (False, 7)
    store = SwapStore.recover(SwapDir.open(run.path), SyncEngine())
    into = memoryview(bytearray(4096))
    store.read(store.records()["a"], into).wait()
    committed, _ = load_manifests(run.path)
    assert committed is not None and committed.metadata == {"loss": 2.5}
    assert (store.step, bytes(into)) == (7, b"x" * 4096)
    (taken,) = list_runs(swap_path)
    assert (taken.state, taken.pid) == ("alive", os.getpid())
    store.close(remove=False)
    (gone,) = collect_garbage(swap_path, committed=True)
    assert gone.removed and gone.run.state == "dead", "its last owner, this process, has left it to be resumed"


COMMITTER = f"""{IMPORTS}
import mmap, sys
from pathlib import Path
from tiered_zero.io.select import select_engine

path = Path(sys.argv[1])
store = SwapStore(SwapDir.create([path]), select_engine(path).engine, capacity_nbytes=8 << 20)
records = [store.reserve(name, 1 << 20, committed=True) for name in "abc"]
memory = memoryview(mmap.mmap(-1, 1 << 20))
for step in range(1, 100_000):
    memory[:] = step.to_bytes(4, "little") * (1 << 18)
    for transfer in [store.write(record, memory) for record in records[: 1 + step % 3]]:
        transfer.wait()
    store.commit(step, {{}})
    print(step, flush=True)
"""


@pytest.mark.parametrize("num_commits", [1, 20])
def test_kill_9_amid_commits_loses_none_that_returned(swap_path: Path, num_commits: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", COMMITTER, str(swap_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    for _ in range(num_commits):
        child.stdout.readline()
    time.sleep(0.003)
    child.kill()
    last = int([str(num_commits), *child.communicate()[0].split()][-1])
    (run,) = list_runs(swap_path)
    store = SwapStore.recover(SwapDir.open(run.path), SyncEngine())
    assert store.step in (last, last + 1)
    for index, record in enumerate(store.records().values()):
        written = max((step for step in range(1, store.step + 1) if index <= step % 3), default=0)
        if written:
            into = memoryview(bytearray(1 << 20))
            store.read(record, into).wait()
            assert into == written.to_bytes(4, "little") * (1 << 18)
    store.close()


def test_committed_state_of_a_dead_run_is_removed_on_demand(swap_path: Path, start: Start) -> None:
    child = start(act="store.commit(7, {})")
    child.kill()
    child.wait()
    (gone,) = collect_garbage(swap_path, committed=True)
    assert gone.removed and list(swap_path.iterdir()) == []


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError", 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(500)", -signal.SIGINT),
        ("store.close(); store.close()", 0),
        ("del store, directory, record; import gc; gc.collect()", 0),
    ],
)
def test_every_orderly_end_leaves_nothing(swap_path: Path, start: Start, end: str, status: int) -> None:
    child = start(end=end + "\n" if "raise" not in end else "sys.stderr = open(os.devnull, 'w')\n" + end)
    assert child.wait(300) == status
    assert list(swap_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_committed_state(swap_path: Path, start: Start, number: signal.Signals) -> None:
    child = start(act="store.commit(1, {})")
    child.send_signal(number)
    child.wait(300)
    (run,) = list_runs(swap_path)
    assert (run.state, run.step) == ("dead", 1)


def test_sigterm_leaves_a_dead_run_which_a_collection_removes(swap_path: Path, start: Start) -> None:
    child = start()
    child.terminate()
    assert child.wait(300) == -signal.SIGTERM
    (left,) = list_runs(swap_path)
    assert (left.state, left.resumable) == ("dead", False)
    assert "swap gc" in leftover_notices([str(swap_path)])[0]
    (gone,) = collect_garbage(swap_path)
    assert gone.removed and list(swap_path.iterdir()) == []


def test_a_forked_child_owns_nothing(swap_path: Path, start: Start) -> None:
    child = start(act="pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)")
    assert [run.state for run in list_runs(swap_path)] == ["alive"]
    child.send_signal(signal.SIGINT)
    child.wait(300)
    assert list(swap_path.iterdir()) == []


def test_several_paths_die_together_and_the_commit_is_seen_from_each(swap_path: Path, start: Start) -> None:
    parents = [swap_path / "a", swap_path / "b"]
    for parent in parents:
        parent.mkdir()
    child = start(act="store.commit(4, {})", path=",".join(map(str, parents)))
    child.kill()
    child.wait()
    for parent in parents:
        (item,) = collect_garbage(parent)
        assert (item.removed, item.run.step) == (False, 4), "the second path holds half of a committed state"
    for parent in parents:
        assert collect_garbage(parent, committed=True)[0].removed


def test_a_directory_without_an_owner_is_left_alone_unless_asked_for(swap_path: Path) -> None:
    half = swap_path / "tiered_zero-half"
    half.mkdir(mode=0o700)
    (half / "data.bin").write_bytes(b"x")
    assert not collect_garbage(swap_path)[0].removed
    assert collect_garbage(swap_path, unknown=True)[0].removed and not half.exists()
