"""Making, refusing, locking and removing a run's directories."""

import fcntl
import os
from pathlib import Path

import pytest

from tiered_zero.errors import ConfigError, StoreError
from tiered_zero.record import directory as swap_dir
from tiered_zero.record.directory import OWNER_NAME, SwapDir, list_runs, read_owner


def test_two_runs_on_one_path_are_apart_and_private(swap_path: Path) -> None:
    one, two = SwapDir.create([swap_path], model="gpt2", owner_note="rank 0"), SwapDir.create([swap_path])
    assert one.paths != two.paths and one.run_id != two.run_id
    for path in (*one.paths, *two.paths):
        assert path.stat().st_mode & 0o777 == 0o700
        assert (path / OWNER_NAME).stat().st_mode & 0o777 == 0o600
    owner = read_owner(one.paths[0])
    assert (owner.pid, owner.model, owner.note, owner.run_id) == (os.getpid(), "gpt2", "rank 0", one.run_id)
    assert {run.state for run in list_runs(swap_path)} == {"alive"}
    one.remove()
    one.remove()
    assert [run.run_id for run in list_runs(swap_path)] == [two.run_id]
    del two
    assert list(swap_path.iterdir()) == []


def test_a_release_that_was_interrupted_is_carried_through_by_the_next(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = SwapDir.create([swap_path])
    directory.keep()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fcntl, "flock", interrupt)
        directory.release()
    directory.release()
    SwapDir.open(directory.paths[0]).remove()  # no descriptor holds the lock
    assert list(swap_path.iterdir()) == []


def test_keep_stays_after_release_and_opens_again(swap_path: Path) -> None:
    directory = SwapDir.create([swap_path])
    directory.keep()
    directory.release()
    directory.release()
    again = SwapDir.open(directory.paths[0])
    assert (again.run_id, again.paths) == (directory.run_id, directory.paths)
    with pytest.raises(StoreError, match="live run"):
        SwapDir.open(directory.paths[0])
    again.release()
    SwapDir.open(directory.paths[0]).remove()
    assert list(swap_path.iterdir()) == []


def test_unfit_parents_are_refused_and_nothing_is_left(swap_path: Path) -> None:
    good, file = swap_path / "good", swap_path / "file"
    good.mkdir()
    file.touch()
    for parent, text in ((swap_path / "missing", "Create it"), (file, "is a file")):
        with pytest.raises(ConfigError, match=text):
            SwapDir.create([good, parent])
    assert list(good.iterdir()) == []
    with pytest.raises(StoreError, match="different swap paths"):
        SwapDir.create([good, good])


def test_the_last_constructor_that_fails_leaves_nothing(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    kept = SwapDir.create([swap_path])
    kept.keep()
    kept.release()
    is_open = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(SwapDir, "__init__", fail)
    with pytest.raises(MemoryError):
        SwapDir.create([swap_path])
    with pytest.raises(MemoryError):
        SwapDir.open(kept.paths[0])
    assert list(swap_path.iterdir()) == [*kept.paths] and set(os.listdir("/proc/self/fd")) <= is_open


@pytest.mark.parametrize(
    ("failure", "error"),
    [(OSError(28, "No space left on device"), StoreError), (KeyboardInterrupt(), KeyboardInterrupt)],
    ids=["no space", "a second Ctrl-C"],
)
def test_a_failure_half_way_leaves_nothing(
    failure: BaseException, error: type[BaseException], swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = [swap_path / "a", swap_path / "b"]
    for parent in parents:
        parent.mkdir()
    synced = []

    def fail_second(path: Path) -> None:
        synced.append(path)
        if len(synced) == 2:
            raise failure

    monkeypatch.setattr(swap_dir, "sync_directory", fail_second)
    with pytest.raises(error, match=".*No space left" if error is StoreError else None):
        SwapDir.create(parents)
    assert [list(parent.iterdir()) for parent in parents] == [[], []]


def test_a_removed_directory_is_no_error_at_release(swap_path: Path) -> None:
    directory = SwapDir.create([swap_path])
    (directory.paths[0] / OWNER_NAME).unlink()
    directory.paths[0].rmdir()
    directory.remove()


def test_a_run_with_a_path_missing_cannot_be_opened(swap_path: Path) -> None:
    parents = [swap_path / "a", swap_path / "b"]
    for parent in parents:
        parent.mkdir()
    directory = SwapDir.create(parents)
    directory.keep()
    directory.release()
    directory.paths[1].rename(swap_path / "elsewhere")
    for _ in range(2):
        with pytest.raises(StoreError, match=f"{directory.paths[1]} is missing"):
            SwapDir.open(directory.paths[0])


def test_open_refuses_what_is_no_run(swap_path: Path) -> None:
    with pytest.raises(StoreError, match="not a swap directory"):
        SwapDir.open(swap_path)
    directory = SwapDir.create([swap_path])
    (directory.paths[0] / OWNER_NAME).write_text("{}")
    with pytest.raises(StoreError, match="not a swap directory"):
        SwapDir.open(directory.paths[0])


def test_files_made_after_their_directory_was_opened_are_removed(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on btrfs, a descriptor lists what was there when it was made."""
    real_open, real_listdir = os.open, os.listdir
    listed: dict[int, list[str]] = {}

    def open_and_list(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = real_open(path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_DIRECTORY:
            listed[fd] = real_listdir(fd)
        return fd

    monkeypatch.setattr(os, "open", open_and_list)
    monkeypatch.setattr(os, "listdir", lambda path: listed[path] if isinstance(path, int) else real_listdir(path))
    directory = SwapDir.create([swap_path])
    (directory.paths[0] / "data.bin").touch()
    directory.remove()
    assert not caplog.messages and real_listdir(swap_path) == []
