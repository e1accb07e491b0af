"""Named arrays for any program: plain NumPy AdamW whose moments rest on disk, no engine, no torch."""

import dataclasses
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.sync_io import SyncEngine
from tiered_zero.errors import CorruptionError, StoreError
from tiered_zero.sizes import MIB
from tiered_zero.store import ArrayStore, manifest, open_store, swap_store
from tiered_zero.store.stripes import DATA_NAME
from tiered_zero.store.swap_dir import SwapDir
from tiered_zero.store.swap_store import SwapStore

NUMEL = (9 << 20) // 4 + 3
"""More than one bounce buffer, and not a whole page."""


def test_a_vanilla_adamw_with_moments_on_disk_and_a_restart_gives_the_same_bits(swap_path: Path) -> None:
    def update(w: np.ndarray, m: np.ndarray, v: np.ndarray, step: int) -> None:
        grad = np.sin(w + step)
        m *= 0.9
        m += 0.1 * grad
        v *= 0.99
        v += 0.01 * grad * grad
        w -= 0.01 * (m / (np.sqrt(v) + 1e-8) + 0.1 * w)

    plain = [np.linspace(-1, 1, NUMEL, dtype=np.float32)] + [np.zeros(NUMEL, np.float32) for _ in range(2)]
    here = [array.copy() for array in plain]
    store = open_store(swap_path, capacity_nbytes=80 * MIB)
    for name, array in zip("wmv", here, strict=True):
        store.put(name, array)
    for step in range(4):
        update(*plain, step)
        for name, array in zip("wmv", here, strict=True):
            array.fill(np.nan)
            store.get(name, into=array)
        update(*here, step)
        for name, array in zip("wmv", here, strict=True):
            store.put(name, array)
        store.commit(step, {"lr": 0.01})
        if step == 1:
            store.put("w", np.zeros(NUMEL, np.float32))  # never committed
            store.close()
            store = open_store(swap_path)
            assert (store.step, store.metadata) == (1, {"lr": 0.01})
    for name, array in zip("wmv", plain, strict=True):
        assert store.get(name).tobytes() == array.tobytes()
    record = store.describe("w")
    assert (record.dtype, record.shape, record.nbytes) == ("f", (NUMEL,), 4 * NUMEL)
    store.close()


def test_replace_delete_and_errors(swap_path: Path) -> None:
    with open_store(swap_path, capacity_nbytes=MIB) as store:
        store.put("a", np.arange(6, dtype=np.int16).reshape(2, 3))
        assert store.describe("a").shape == (2, 3)
        store.put("a", b"longer than before" * 300)
        assert bytes(store.get("a")) == b"longer than before" * 300
        with pytest.raises(StoreError, match="has 5400 bytes; the memory"):
            store.get("a", into=bytearray(3))
        with pytest.raises(StoreError, match=r"no array 'b'; it has \['a'\]"):
            store.get("b")
        store.commit(1)
        with pytest.raises(StoreError, match="live run"):
            open_store(swap_path)
        store.delete("a")
        assert store.names() == []
        store.commit(2)
        store.put("big", bytes(MIB // 2))  # the space of all earlier ones is free again
    with open_store(swap_path) as store:
        assert (store.step, store.names()) == (2, [])


def test_without_a_commit_nothing_is_left_and_capacity_must_be_given(swap_path: Path) -> None:
    with pytest.raises(StoreError, match="give capacity_nbytes"):
        open_store(swap_path)
    with open_store(swap_path, capacity_nbytes=MIB, engine=SyncEngine()) as store:
        store.put("a", b"x")
    assert list(swap_path.iterdir()) == []


def test_a_changed_byte_is_an_error_in_a_new_process_too(swap_path: Path) -> None:
    with open_store(swap_path, capacity_nbytes=MIB) as store:
        store.put("a", b"x" * 5000)
        store.commit()
    (data,) = swap_path.glob(f"*/{DATA_NAME}")
    with open(data, "r+b") as file:
        file.seek(100)
        file.write(b"y")
    with open_store(swap_path) as store, pytest.raises(CorruptionError, match="'a'"):
        store.get("a")


def test_two_committed_states_in_one_directory_are_refused(swap_path: Path) -> None:
    for _ in range(2):
        store = SwapStore(SwapDir.create([swap_path]), SyncEngine(), capacity_nbytes=MIB)
        store.commit(1, {})
        store.close(remove=False)
    with pytest.raises(StoreError, match="2 committed states"):
        open_store(swap_path)


def test_a_failed_open_ends_the_ownership(swap_path: Path) -> None:
    with open_store(swap_path, capacity_nbytes=MIB) as store:
        store.commit()
    (data,) = swap_path.glob(f"*/{DATA_NAME}")
    data.unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match="is missing"):
            open_store(swap_path)


@pytest.mark.parametrize("how", ["missing", "cut", "overlap", "directory", "no memory", "no thread"])
def test_a_failed_open_leaks_no_descriptor(swap_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    with open_store(swap_path, capacity_nbytes=MIB) as store:
        store.put("a", b"x")
        store.commit()
    (data,) = swap_path.glob(f"*/{DATA_NAME}")
    if how == "cut":
        os.truncate(data, 4096)
    elif how == "overlap":
        state = manifest.load(data.parent)[0]
        assert state is not None
        record = dataclasses.replace(state.records[0], offsets=(0, 0))
        manifest.prepare(data.parent, dataclasses.replace(state, records=(record,)).encode())
        manifest.confirm(data.parent)
    elif how in ("missing", "directory"):
        data.unlink()
        if how == "directory":
            data.mkdir()
    elif how == "no memory":
        monkeypatch.setattr(ArrayStore, "__init__", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
    else:
        monkeypatch.setattr(swap_store, "Worker", lambda name: (_ for _ in ()).throw(StoreError("no thread")))

    def held() -> int:
        return len(os.listdir("/proc/self/fd")) + threading.active_count()

    counts = []
    for _ in range(3):
        with pytest.raises((StoreError, MemoryError)):
            open_store(swap_path)
        counts.append(held())
    assert counts[0] == counts[2]


def test_a_state_that_cannot_be_read_does_not_hide_another(swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = []
    for step in (1, 2):
        store = SwapStore(directory := SwapDir.create([swap_path]), SyncEngine(), capacity_nbytes=MIB)
        store.commit(step, {})
        store.close(remove=False)
        paths.append(directory.paths[0])
    (paths[1] / "manifest").write_bytes(b"{}")
    with open_store(swap_path) as opened:
        assert opened.step == 1
    assert f"{paths[1]} may hold a state, but cannot be opened" in caplog.text
