"""Power fails after every operation of recorded saves, and un-synced writes and names are lost, torn or reordered:
what is loaded is the last checkpoint whose save returned, or whole the one that was under way, and saving goes on."""

import hashlib
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.fakes.crash_disk import Operation, fates
from tests.fakes.crash_tree import CrashTree, RecordingTree, lay_out
from tests.fakes.sync_io import SyncEngine
from tests.support.forked import run_forked
from tests.support.inspection.insides import (
    LOCK_NAME,
    data_files,
    files,
    list_tags,
    prune,
    tag_writer,
)
from tests.support.inspection.insides import tag as tag_module
from tests.support.tags import equal_bits, load_tag, save_tag, tag_to_load, unfinished
from tiered_zero import system
from tiered_zero.errors import StoreError

PAGE = 4096
ROOT = Path(__file__).parents[2]


@dataclass
class Save:
    """Operations `[begin, end)` of the log wrote `tensors` as a step; `step` None: they pruned the directory."""

    tag: str
    step: int | None
    begin: int
    end: int
    tensors: dict[str, torch.Tensor]


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {key: torch.randn(numel, generator=generator) for key, numel in (("a", 5), ("b", 3 * PAGE // 4 + 77))}


def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Operation], list[Save]]:
    """Saves under new names, over an old name twice, and a prune."""
    log: list[Operation] = []
    tree = RecordingTree(log)
    for module in (tag_writer, data_files, files, tag_module, system):
        monkeypatch.setattr(module, "os", tree)
    engine = SyncEngine(operations=log)
    saves = []
    for step, tag in enumerate(["a", "b", "b", "c", "c"], start=1):
        save = Save(tag, step, len(log), 0, tensors_of(step))
        save_tag(path, tag, save.tensors, step, engine)
        save.end = len(log)
        saves.append(save)
    save = Save("c", None, len(log), 0, saves[-1].tensors)
    assert [info.tag for info in prune(path, keep=1)] == ["a", "b"]
    save.end = len(log)
    return log, [*saves, save]


def check_every_crash(log: list[Operation], saves: list[Save], root: Path, where: Path, number: int = 2) -> int:
    """Crash after each prefix of the log in several ways. Raises AssertionError on a lost or mixed state. What another
    crash has left too, with the same saves to answer for, is looked at once."""
    tree = CrashTree(str(root))
    by_step = {save.step: save for save in saves if save.step is not None}
    num_crashes, seen = 0, set[tuple[object, ...]]()
    for length in range(len(log) + 1):
        if length:
            tree.apply(log[length - 1])
        returned = [save for save in saves if save.end <= length and save.step is not None]
        under_way = [save for save in saves if save.begin < length < save.end and save.step is not None]
        allowed = {save.step for save in [*returned[-1:], *under_way]}
        for count, fate in enumerate(fates(length, number)):
            num_crashes += 1
            ruin = where / str(num_crashes)
            files = tree.crash(*fate, each_directory=bool(count % 2))
            left, saves_again = (
                hashlib.sha256(pickle.dumps(sorted(files.items()))).digest(),
                count == length % (number + 4),
            )
            if (state := (left, saves_again, len(returned), *(save.step for save in under_way))) in seen:
                continue
            seen.add(state)
            lay_out(files, ruin)
            here = ruin / "ck"
            try:
                info = tag_to_load(here)
            except StoreError as error:
                assert not returned, f"after operation {length} step {returned[-1].step} is lost: {error}"
            else:
                assert info.step in allowed, f"after operation {length}: step {info.step}, expected one of {allowed}"
                assert equal_bits(load_tag(info.path, SyncEngine()), by_step[info.step].tensors)
            for save in returned[-1:]:
                same = {other.step for other in [save, *under_way] if other.tag == save.tag}
                assert tag_to_load(here, save.tag).step in same, "a tag that is replaced is the old or the new one"
            if saves_again:
                save_tag(here, "next", tensors_of(0), 99, SyncEngine())
                assert tag_to_load(here).step == 99
                assert all(tag.complete for tag in list_tags(here)), list_tags(here)
                assert unfinished(here) == []
            shutil.rmtree(ruin)
    return num_crashes


@pytest.fixture
def ruins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the crashed directories are laid out; in memory if there is some, and synced nowhere."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as path:
        yield Path(path)


def test_every_crash_leaves_a_whole_checkpoint(tmp_path: Path, ruins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, saves = run(tmp_path / "ck", monkeypatch)
    monkeypatch.undo()
    assert {kind for kind, *_ in log} >= {"create", "write", "sync", "mkdir", "rename", "remove", "sync_directory"}
    assert check_every_crash(log, saves, tmp_path, ruins) > 500


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("sync", lambda path: path.endswith(".bin")),
        ("sync", lambda path: path.endswith("manifest.json.next")),
        ("sync", lambda path: path.endswith(LOCK_NAME)),
        ("sync_directory", lambda path: not path.endswith("ck")),
        ("sync_directory", lambda path: path.endswith("ck")),
    ],
    ids=["data", "manifest", "lock file", "tag", "save directory"],
)
def test_the_replay_notices_a_missing_sync(
    tmp_path: Path, ruins: Path, kind: str, where: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, saves = run(tmp_path / "ck", monkeypatch)
    monkeypatch.undo()
    without = [("nothing", "") if item[0] == kind and where(item[1]) else item for item in log]  # type: ignore[operator]
    assert without != log
    with pytest.raises((AssertionError, StoreError)):
        check_every_crash(without, saves, tmp_path, ruins)


@pytest.mark.timeout(600)
def test_killed_processes_leave_the_last_checkpoint_or_the_next(swap_path: Path) -> None:
    """12 real kill -9 at random moments of processes that save, replace and prune."""
    program = ROOT / "tests/crash/run_save_kills.py"
    done = run_forked(program, swap_path / "ck", 12, 1)
    assert done.returncode == 0, done.stderr
    children = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(children) == 12 and any(child["left"] for child in children), "some are killed in the middle of a save"
    # "known": from which it began, or that of its last save which returned; a save may be whole before it returns
    assert all(child["found"] in (child["known"], child["known"] + 1) for child in children), children
    save_tag(swap_path / "ck", "end", tensors_of(0), 10**6)
    assert unfinished(swap_path / "ck") == []
