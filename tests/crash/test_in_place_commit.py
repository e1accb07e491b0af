"""Power fails after every operation of saves in place, in the swap directory and in the save directory: what is loaded
is the last commit that returned, or the one under way, whole."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.fakes.crash_disk import Choice, Operation, fates
from tests.fakes.crash_tree import CrashTree, RecordingTree, lay_out
from tests.fakes.sync_io import SyncEngine
from tests.support.configs import SMALL_DEVICE
from tests.support.inspection.insides import (
    DATA_NAME,
    OWNER_NAME,
    TensorReader,
    files,
    find_checkpoint,
    list_runs,
    list_tags,
    open_commit,
    rack,
    tag_writer,
)
from tests.support.inspection.insides import tag as tag_module
from tests.support.tags import moved_by, raw_bytes, read_all
from tiered_zero import system
from tiered_zero.errors import StoreError

TAGS = ["a", "b", "b", "c"]
"""Of each commit: new names, and one that is replaced."""

FP32: dict[str, Any] = {}
HALVES_IN_MEMORY = {"bf16": {"enabled": True}, "state_format": "bf16_remainder", "params": {"device": "cpu"}}
"""Each commit copies parameters."""

HALVES_ON_ANOTHER_DISK = {
    **HALVES_IN_MEMORY,
    "params": {"device": "nvme", "nvme_path": "params", "max_in_cpu": 0, "buffer_size": 4096},
}
"""Each commit is of two stores."""


@dataclass
class Saves:
    """What was recorded. Of each save: where in `log` its call began, its commit got its name, its commit had
    returned, and its call had; a digest of what it holds; the weights after it."""

    log: list[Operation]
    begun: list[int]
    renamed: list[int]
    committed: list[int]
    ended: list[int]
    digests: list[str]
    weights: list[dict[str, torch.Tensor]]


@pytest.fixture
def root() -> Iterator[Path]:
    """In memory if there is some: nothing crashes there, and many small files are written."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path) / "root"


def config(root: Path, checkpoint: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(root / "swap")}
    own = {**settings}
    params, state_format = {**own.pop("params", {"device": "none"})}, own.pop("state_format", "fp32")
    if "nvme_path" in params:
        params["nvme_path"] = str(root / params["nvme_path"])
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3 if params != {"device": "none"} else 2,
            "offload_param": params,
            "offload_optimizer": nvme,
            "sub_group_size": 2048,
            "stage3_param_persistence_threshold": 0,
        },
        "tiered_zero": {
            **{**SMALL_DEVICE, "device": "cpu", "update": "barrier"},
            **{"state_format": state_format, "checkpoint": checkpoint},
        },
        **own,
    }


def start(root: Path, checkpoint: dict[str, Any], settings: dict[str, Any]) -> tiered_zero.Engine:
    model = nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Linear(48, 16).requires_grad_(False))
    return tiered_zero.initialize(model=model, config=config(root, checkpoint, settings))[0]


def weights_of(engine: tiered_zero.Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def digest(state: TensorReader) -> str:
    """Of every element of every key, and of the step that the driver says."""
    whole = hashlib.sha256(str(state.manifest.step).encode())
    for key, tensor in sorted(read_all(state).items()):
        whole.update(key.encode() + raw_bytes(tensor))
    return whole.hexdigest()


def record(root: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> Saves:
    """Commit after each of four steps. Frozen weights are changed before the last."""
    saves = Saves([], [], [], [], [], [], [])
    log = saves.log
    tree = RecordingTree(log)
    for module in (files, system, tag_writer, tag_module):
        monkeypatch.setattr(module, "os", tree)
    engine = SyncEngine(operations=log)
    monkeypatch.setattr(rack, "select_engine", lambda *paths, **options: SimpleNamespace(engine=engine, reasons=()))
    parents = [root / "swap", *([root / "params"] if settings is HALVES_ON_ANOTHER_DISK else [])]
    for parent in parents:
        parent.mkdir(mode=0o700, parents=True)
    dtype = torch.bfloat16 if "bf16" in settings else torch.float32
    torch.manual_seed(0)
    with start(root, {"in_place": True}, settings) as run:
        (swap,) = (root / "swap").iterdir()
        for tag in TAGS:
            run.backward(run(torch.randn(4, 48, dtype=dtype)).square().mean())
            run.step()
            if tag == "c":
                with tiered_zero.gathered(run.module[2].weight, modify=True), torch.no_grad():
                    run.module[2].weight.add_(1)
            saves.begun.append(len(log))
            run.save_checkpoint(root / "saved", tag=tag)
            saves.ended.append(len(log))
            own = range(saves.begun[-1], saves.ended[-1])
            names = "rename", str(swap / "manifest.next"), str(swap / "manifest")
            saves.renamed.append(next(at for at in own if log[at] == names))
            synced = ("sync_directory", str(swap))
            saves.committed.append(next(at for at in own if at > saves.renamed[-1] and log[at] == synced) + 1)
            with moved_by(SyncEngine()), open_commit(swap) as state:
                saves.digests.append(digest(state))
            saves.weights.append(weights_of(run))
    monkeypatch.undo()
    length, before = len(log), []
    for parent in parents:
        (own,) = parent.iterdir()
        data = str(own / DATA_NAME)
        at = log.index(("create", data)) + 1
        log[at:at] = [("truncate", data, os.stat(data).st_size), ("sync", data)]
        before += [("mkdir", str(parent)), ("mkdir", str(own)), ("sync_directory", str(parent))]
    log[:0] = [*before, ("sync_directory", str(root))]
    for numbers in (saves.begun, saves.renamed, saves.committed, saves.ended):
        numbers[:] = [number + len(log) - length for number in numbers]
    return saves


def any_names(seed: int) -> Choice:
    """Names of one directory that reach the disk in any order, which no file system promises not to do."""
    random = Random(seed)
    return lambda entries: [entry for entry in entries if random.random() < 0.5]


def torn(writes: list[Any]) -> list[Any]:
    """All but the second half of a file's last write."""
    if not writes or writes[-1][1] is None:
        return writes
    offset, data = writes[-1]
    return [*writes[:-1], (offset, data[: len(data) // 2])]


def check_every_crash(saves: Saves, root: Path, settings: dict[str, Any], resume_every: int = 0) -> int:
    """Crash after each operation of the saves in several ways. Raises AssertionError on a lost or mixed state.

    What another crash has left too, with the same saves to answer for, is looked at once. `resume_every`: after so many
    crashes a run goes on from what is left, and is looked at whole.
    """
    (swap,) = (root / "swap").iterdir()
    owners = {path: path.read_bytes() for path in root.glob(f"*/*/{OWNER_NAME}")}
    tree = CrashTree(str(root))
    num_crashes, seen = 0, set[tuple[Any, ...]]()
    for length, operation in enumerate(saves.log, 1):
        tree.apply(operation)
        if length < saves.begun[0]:
            continue
        certain = [number for number, end in enumerate(saves.committed, 1) if end <= length]
        returned = [number for number, end in enumerate(saves.ended, 1) if end <= length]
        under_way = [number for number, at in enumerate(saves.renamed, 1) if at < length and number not in certain]
        allowed = {*certain[-1:], *under_way}
        where = f"after operation {length}, {operation[:2]}"
        more: list[tuple[Choice, Choice]] = [(list, any_names(length)), (list, lambda e: e[-1:]), (torn, list)]
        for count, fate in enumerate([*fates(length, 1), *more]):
            num_crashes += 1
            files = tree.crash(*fate, each_directory=bool(count % 2))
            left = hashlib.sha256(pickle.dumps(sorted(files.items()))).digest()
            if (state := (left, *certain[-1:], *under_way, *returned)) in seen:
                continue
            seen.add(state)
            shutil.rmtree(root)
            lay_out(files, root)
            for path, owner in owners.items():
                path.write_bytes(owner)
            try:
                commit = open_commit(swap)
            except StoreError as error:
                assert not certain, f"{where}: the commit of step {certain[-1]} is lost: {error}"
                assert not returned
                continue
            with moved_by(SyncEngine()), commit:
                step = commit.manifest.step
                assert step in allowed, f"{where}: step {step}, expected one of {allowed}"
                assert digest(commit) == saves.digests[step - 1], where
            check_tags(root, swap, step, returned, where)
            if resume_every and returned and len(seen) % resume_every == 0:
                check_resumed(saves, root, settings, step)
    return num_crashes


def check_tags(root: Path, swap: Path, step: int, returned: list[int], where: str) -> None:
    """Whatever the save directory says by now, it leads to the commit, or says that it was superseded."""
    saved = root / "saved"
    if returned:
        found = find_checkpoint(saved)
        assert found.swap == swap, f"{where}: {found}"
        tags = {info.tag for info in list_tags(saved) if info.path.name == info.tag}
        assert tags >= {TAGS[number - 1] for number in returned}, f"{where}: a tag of a save that returned is lost"
    for info in list_tags(saved) if saved.exists() else ():
        if info.complete:
            assert info.step == step, f"{where}: {info.tag} says step {info.step}, and the commit is of step {step}"
            assert find_checkpoint(saved, info.tag).swap == swap
        elif info.kind:
            with pytest.raises(StoreError, match="superseded"):
                find_checkpoint(saved, info.tag)


def check_resumed(saves: Saves, root: Path, settings: dict[str, Any], step: int) -> None:
    with start(root, {"in_place": True, "resume": str(root / "saved")}, settings) as engine:
        assert engine.global_steps == step
        expected = saves.weights[step - 1]
        assert [name for name, value in weights_of(engine).items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize(
    "settings",
    [FP32, HALVES_IN_MEMORY, HALVES_ON_ANOTHER_DISK],
    ids=["fp32", "halves in memory", "halves on another disk"],
)
def test_every_crash_leaves_a_whole_step(root: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    saves = record(root, monkeypatch, settings)
    assert len(set(saves.digests)) == len(TAGS)
    assert {kind for kind, *_ in saves.log} >= {"create", "write", "sync", "mkdir", "rename"}
    assert check_every_crash(saves, root, settings, resume_every=50) > 600
    (left,) = list_runs(root / "swap")
    assert (left.step, left.resumable) == (len(TAGS), True)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("sync", "swap/*/" + DATA_NAME),
        ("sync", "swap/*/manifest.next"),
        ("sync", "saved/*/manifest.json.next"),
        ("sync_directory", "swap/*"),
        ("sync_directory", "saved"),
        ("sync", "params/*/" + DATA_NAME),
        ("sync_directory", "params/*"),
    ],
)
def test_the_replay_notices_a_missing_sync(root: Path, monkeypatch: pytest.MonkeyPatch, kind: str, path: str) -> None:
    settings = HALVES_ON_ANOTHER_DISK if path.startswith("params") else FP32
    saves = record(root, monkeypatch, settings)
    without = [
        ("nothing", "") if item[0] == kind and Path(item[1]).match(str(root / path)) else item
        for item in saves.log[saves.begun[0] :]
    ]
    saves.log[saves.begun[0] :] = without
    assert ("nothing", "") in without
    with pytest.raises((AssertionError, StoreError)):
        check_every_crash(saves, root, settings)
