"""Power fails after every operation of steps that are committed in place: the last commit that returned is read, or the
one under way, whole, whatever the tag in the save directory says by then."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tiered_zero
from tests.fakes.crash_disk import CrashDisk, Operation, RecordingOS, fates
from tests.fakes.sync_io import SyncEngine
from tiered_zero.checkpoint.committed import CommittedState
from tiered_zero.checkpoint.resume import find_checkpoint
from tiered_zero.errors import StoreError
from tiered_zero.store import durable, manifest
from tiered_zero.store.owner import OWNER_NAME
from tiered_zero.store.runs import list_runs
from tiered_zero.store.stripes import DATA_NAME
from tiered_zero.tiers import rack


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """Nothing crashes there: many small files are written."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as path:
        yield Path(path)


def digest(state: CommittedState) -> str:
    """Of every element of every key."""
    whole = hashlib.sha256()
    for key, place in sorted(state.places.places.items()):
        itemsize = state.manifest.tensors[key].itemsize
        for part in place.parts:
            whole.update(key.encode() + state.read(part.sources[0], (part.stop - part.start) * itemsize))
    return whole.hexdigest()


def run(swap_path: Path, save_dir: Path, log: list[Operation]) -> tuple[list[int], list[int], list[str]]:
    """Three steps, each committed. Returns, of each, where in the log its manifest was begun and where it had returned,
    and the digest of what it holds."""
    nvme = {"device": "nvme", "nvme_path": str(swap_path)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": nvme, "sub_group_size": 2048},
        "tiered_zero": {"device": "cpu", "update": "barrier", "checkpoint": {"in_place": True}},
    }
    model = nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48))
    begun, ended, digests = [], [], []
    with tiered_zero.initialize(model=model, config=config)[0] as engine:
        for _ in range(3):
            engine.backward(engine(torch.randn(4, 48)).square().mean())
            engine.step()
            before = len(log)
            engine.save_checkpoint(save_dir)
            engine.flush()
            ended.append(len(log))
            creates = (at for at in range(before, len(log)) if log[at][0] == "create" and "manifest" in log[at][1])
            begun.append(next(creates))
            with CommittedState.open(next(swap_path.iterdir())) as state:
                digests.append(digest(state))
    return begun, ended, digests


def test_every_crash_leaves_a_whole_step(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap_path, save_dir = in_memory / "swap", in_memory / "saved"
    swap_path.mkdir(mode=0o700)
    log: list[Operation] = []
    recording = RecordingOS(log)
    for module in (manifest, durable):
        monkeypatch.setattr(module, "os", recording)
    engine = SyncEngine(operations=log)
    monkeypatch.setattr(rack, "select_engine", lambda *paths, **options: SimpleNamespace(engine=engine, reasons=()))
    begun, ended, digests = run(swap_path, save_dir, log)
    monkeypatch.undo()
    assert len(set(digests)) == 3
    (directory,) = swap_path.iterdir()
    disk = CrashDisk({DATA_NAME: (directory / DATA_NAME).stat().st_size})
    num_crashes = 0
    for length in range(len(log) + 1):
        if length:
            disk.apply(log[length - 1])
        returned = [step for step, end in enumerate(ended, 1) if end <= length]
        under_way = [step for step, start in enumerate(begun, 1) if start <= length and step not in returned]
        for fate in fates(length, 1):
            num_crashes += 1
            lay_out(directory, disk.crash(*fate))
            try:
                state = CommittedState.open(directory)
            except StoreError as error:
                assert not returned, f"after operation {length} the commit of step {returned[-1]} is lost: {error}"
                continue
            with state:
                assert state.step in (*returned[-1:], *under_way), f"after operation {length}: step {state.step}"
                assert digest(state) == digests[state.step - 1], f"after operation {length}"
            for step in range(1, state.step + 1):  # the tags that may be the last whole ones by then
                found = find_checkpoint(save_dir / f"global_step{step}")
                assert found.swap == directory
                assert bool(found.lines) is (step != state.step)
    assert num_crashes > 200
    (left,) = list_runs(swap_path)
    assert (left.step, left.resumable) == (3, True)


def lay_out(directory: Path, files: dict[str, bytes]) -> None:
    """As a crash has left it: under the same path, which the commit knows."""
    for path in directory.iterdir():
        if path.name != OWNER_NAME:
            path.unlink()
    for name, content in files.items():
        (directory / Path(name).name).write_bytes(content)
