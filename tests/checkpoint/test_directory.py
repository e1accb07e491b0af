"""Tags of a save directory: named when whole, replaced at once, found, listed; others are refused."""

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.fakes.sync_io import SyncEngine, SyncFile
from tests.support.inspection.insides import OWNER_NAME, SwapDir, SwapStore, prepare_file, unlock
from tests.support.tags import (
    commit_metadata,
    data_file,
    equal_bits,
    fields,
    load_tag,
    moved_by,
    newest_complete,
    open_tag,
    read_manifest,
    save_tag,
    tag_to_load,
    unfinished,
    write_padding,
    write_share,
)
from tiered_zero.checkpoint import tag_writer
from tiered_zero.checkpoint.index import LATEST_NAME, MANIFEST_NAME, StoreLocation
from tiered_zero.checkpoint.tag import (
    find_checkpoint,
    find_damage,
    list_tags,
    look_at,
    nothing_to_load,
    prune,
    read_latest,
)
from tiered_zero.checkpoint.tag_writer import LOCK_NAME, SaveDirectory, TagWriter
from tiered_zero.errors import StoreError, TransferError
from tiered_zero.io.select import PROBE_PREFIX, select_engine

TENSORS = {"x": torch.arange(3000, dtype=torch.float32), "y": torch.tensor([True, False])}


def save(path: Path, tag: str, step: int, **changes: object) -> None:
    save_tag(path, tag, {**TENSORS, "step": torch.tensor(step)}, step, SyncEngine(), **changes)


def step_of(path: Path) -> int:
    return int(load_tag(path, SyncEngine())["step"])


def names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name != LOCK_NAME)


def test_what_a_tag_is_on_the_disk(tmp_path: Path) -> None:
    save(tmp_path / "run" / "ck", "global_step1", 1)
    path = tmp_path / "run" / "ck"
    data = data_file(path / "global_step1").name
    assert names(path) == ["global_step1", LATEST_NAME] and names(path / "global_step1") == [data, MANIFEST_NAME]
    assert (path / LATEST_NAME).read_text() == "global_step1"
    modes = {found.name: found.stat().st_mode & 0o777 for found in [path, *path.rglob("*")]}
    assert modes == {
        **{"ck": 0o700, "global_step1": 0o700, data: 0o600, MANIFEST_NAME: 0o600, LATEST_NAME: 0o600, LOCK_NAME: 0o600}
    }
    assert (path / "global_step1" / data).stat().st_size % 4096 == 0


def test_a_tag_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, "best", step)
        assert step_of(tmp_path / "best") == step
        assert names(tmp_path) == ["best", LATEST_NAME]
        assert names(tmp_path / "best") == [data_file(tmp_path / "best").name, MANIFEST_NAME]


def test_a_tag_can_be_loaded_while_it_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, "best", 1)
    with TagWriter.begin(tmp_path, "best") as writer:
        share = write_share(writer, {**TENSORS, "step": torch.tensor(2)})
        assert [(info.tag, info.step, info.complete) for info in list_tags(tmp_path)] == [("best", 1, True)]
        assert step_of(tmp_path / "best") == 1
        writer.publish(fields(2), [share])
    assert step_of(tmp_path / "best") == 2


def test_the_directory_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "ck").symlink_to(tmp_path / "disk")
    save(tmp_path / "ck", "a", 1)
    assert read_latest(tmp_path / "ck") == "a" and tag_to_load(tmp_path / "ck").path == tmp_path / "ck" / "a"
    assert [info.complete for info in list_tags(tmp_path / "ck")] == [True]
    (tmp_path / "ck" / "b").symlink_to(tmp_path / "disk" / "a")
    with pytest.raises(StoreError, match="symbolic link"):
        find_checkpoint(tmp_path / "ck", "b")


def test_list_newest_and_latest(tmp_path: Path) -> None:
    assert list_tags(tmp_path) == [] and newest_complete(tmp_path) is None and read_latest(tmp_path) is None
    save(tmp_path, "a", 10)
    save(tmp_path, "b", 2)
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    infos = list_tags(tmp_path)
    assert [(info.tag, info.step, info.kind, info.complete, info.reason) for info in infos] == [
        ("b", 2, "full", True, ""),
        ("a", 10, "full", True, ""),
    ]
    assert infos[0].nbytes == sum(path.stat().st_blocks * 512 for path in (tmp_path / "b").iterdir())
    assert infos[0].created_s == 2.0 and infos[0].written_by is not None and infos[0].written_by.rule == "adam"
    newest = newest_complete(tmp_path)
    assert newest is not None and newest.tag == "a"
    assert tag_to_load(tmp_path).tag == "b", "`latest` is the last one saved"
    assert tag_to_load(tmp_path, "a").step == 10


def test_without_a_whole_latest_the_newest_whole_one_is_taken_and_what_was_skipped_is_said(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, f"s{step}", step)
    data_file(tmp_path / "s3").unlink()
    os.truncate(data_file(tmp_path / "s2"), 100)
    info, skipped = tag_to_load(tmp_path), find_checkpoint(tmp_path).lines
    assert info.tag == "s1"
    assert [line.split(":")[0] for line in skipped] == [
        f"Skipped what {tmp_path / LATEST_NAME} names",  # not said twice
        "Skipped s2",
    ]
    assert f"{tmp_path / 's3'} cannot be loaded" in skipped[0] and "is missing" in skipped[0]
    assert "has 100 bytes; expected" in skipped[1]
    (tmp_path / LATEST_NAME).unlink()
    assert find_checkpoint(tmp_path).lines[0] == f"{tmp_path} has no file latest."
    (tmp_path / "s1" / MANIFEST_NAME).write_bytes(b"{}")
    with pytest.raises(StoreError, match=r"There is no complete checkpoint in .*Skipped s1"):
        find_checkpoint(tmp_path)
    with pytest.raises(StoreError, match=r"s2 cannot be loaded: .* has 100 bytes"):
        find_checkpoint(tmp_path, "s2")
    with pytest.raises(StoreError, match=r"There is no checkpoint .*/s9\.$"):
        find_checkpoint(tmp_path, "s9")
    save(tmp_path, "s4", 4)
    save(tmp_path, "s5", 5)
    with pytest.raises(StoreError, match=r"There is no checkpoint .*/s9\. The newest there: s5, s4\.$"):
        find_checkpoint(tmp_path, "s9")
    with pytest.raises(StoreError, match="There is no checkpoint"):
        find_checkpoint(tmp_path / "none")
    with pytest.raises(StoreError, match=r"s2 cannot be loaded: .* has 100 bytes"):
        find_checkpoint(tmp_path / "s2")
    assert find_checkpoint(tmp_path / "s4").path == tmp_path / "s4"


@pytest.mark.parametrize("text", ["../x", "/etc", "", ".hidden", "a\nb", "x" * 300, "latest", "latest.next", "\udcff"])
def test_a_bad_latest_or_tag_leads_nowhere_else(tmp_path: Path, text: str) -> None:
    save(tmp_path, "a", 1)
    (tmp_path / LATEST_NAME).write_bytes(text.encode("utf-8", "surrogateescape"))
    info, skipped = tag_to_load(tmp_path), find_checkpoint(tmp_path).lines
    assert info.tag == "a" and "names no checkpoint" in skipped[0]
    for act in (lambda: find_checkpoint(tmp_path, text), lambda: TagWriter.begin(tmp_path, text)):
        with pytest.raises(StoreError, match="tag must"):
            act()


def test_what_fails_before_the_rename_leaves_the_last_tag_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)

    def fail(kind: str, number: int) -> None:
        if kind == "write":
            raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="could not be written") as caught:
        save_tag(tmp_path, "a", TENSORS, 2, SyncEngine(before=fail))
    assert str(tmp_path) in str(caught.value) and "untouched" in str(caught.value)
    with pytest.raises(RuntimeError, match="mine"), TagWriter.begin(tmp_path, "b"):
        raise RuntimeError("mine")
    with TagWriter.begin(tmp_path, "b") as writer, pytest.raises(StoreError, match="must be JSON"):
        writer.publish(fields(1, driver={"x": object()}), [])
    assert names(tmp_path) == ["a", LATEST_NAME] and step_of(tmp_path / "a") == 1
    save(tmp_path, "a", 3)
    assert step_of(tmp_path / "a") == 3, "the lock is free again"


def test_space_is_checked_first(tmp_path: Path) -> None:
    parts = r"4\.00 TiB of tensors, and 4\.0 MiB that are kept for its manifest"
    with pytest.raises(
        StoreError, match=rf"needs 4\.00 TiB \(4398050705408 bytes\) in {tmp_path}: {parts}; .* are free"
    ):
        TagWriter.begin(tmp_path, "a", needed_nbytes=4 << 40)
    assert names(tmp_path) == []


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with TagWriter.begin(tmp_path, "a") as writer:
        with pytest.raises(StoreError, match="Another process is writing a checkpoint in"):
            TagWriter.begin(tmp_path, "b")
        with pytest.raises(StoreError, match="is writing"):
            prune(tmp_path, 1)
        assert [(info.tag, info.complete) for info in list_tags(tmp_path)] == [("a", False)]
        writer.publish(fields(1), [])
        assert not writer.discard(), "idempotent"
    save(tmp_path, "b", 2)


def test_a_lock_that_a_forked_child_inherited_ends_with_the_save(tmp_path: Path) -> None:
    with TagWriter.begin(tmp_path, "a") as writer:
        inherited = os.dup(writer._directory._lock)
        writer.publish(fields(1), [])
    save(tmp_path, "b", 2)
    os.close(inherited)


def test_saves_that_fail_leave_no_thread_no_file_and_no_lock(swap_path: Path, no_leaks: None) -> None:
    for number in range(5):
        with pytest.raises(StoreError, match="must be JSON"), TagWriter.begin(swap_path, "a") as writer:
            write_padding(writer, "x", 2_800_000)
            writer.publish(fields(number, driver={"x": object()}), [])
        writer = TagWriter.begin(swap_path, "a")
        write_padding(writer, "x", 2_800_000)
        writer.discard()
        writer.discard()
    assert names(swap_path) == []


def test_what_a_killed_writer_left_is_removed_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, "a", 1)
    code = (
        "import os, signal, sys\n"
        "from tiered_zero.checkpoint.tag_writer import TagWriter\n"
        "writer = TagWriter.begin(sys.argv[1], 'global_step2', needed_nbytes=8192)\n"
        "open(writer.path / f'data-00000-{writer.save_id}.bin', 'wb').write(bytes(8192))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert names(tmp_path) == ["a", "global_step2", LATEST_NAME]
    (left,) = (info for info in list_tags(tmp_path) if not info.complete)
    assert left.is_unfinished and left.reason.startswith("it is being written or")
    with caplog.at_level(logging.WARNING, "tiered_zero"):
        save(tmp_path, "b", 3)
    assert [record.getMessage() for record in caplog.records if record.name == "tiered_zero"] == [
        f"{tmp_path}: removed 8.0 KiB, which a writer of checkpoint global_step2 left when it ended."
    ]
    assert names(tmp_path) == ["a", "b", LATEST_NAME]


@pytest.mark.parametrize("is_published", [True, False])
def test_the_next_writer_ends_a_replacement_that_was_cut_short(
    tmp_path: Path, is_published: bool, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, "a", 1)
    first = data_file(tmp_path / "a")
    old = first.read_bytes()
    writer = TagWriter.begin(tmp_path, "a")
    share = write_share(writer, {**TENSORS, "step": torch.tensor(2)})
    journal = (tmp_path / LOCK_NAME).read_bytes()
    if is_published:
        writer.publish(fields(2), [share])
        writer.discard()
        first.write_bytes(old)  # as of a writer that died before it removed the file
        (tmp_path / LOCK_NAME).write_bytes(journal)
    else:
        unlock(writer._directory._lock)  # type: ignore[union-attr]
    assert tag_to_load(tmp_path, "a").step == 1 + is_published and len(unfinished(tmp_path)) == 1
    save(tmp_path, "b", 3)
    assert names(tmp_path) == ["a", "b", LATEST_NAME] and unfinished(tmp_path) == []
    assert step_of(tmp_path / "a") == 1 + is_published and "checkpoint a left when it ended" in caplog.text


@pytest.mark.parametrize("replaced", [False, True])
def test_the_trial_of_an_engine_that_was_killed_leaves_nothing(tmp_path: Path, replaced: bool) -> None:
    """A writer tries I/O engines in the tag's directory."""
    if replaced:
        save(tmp_path, "a", 1)
    writer = TagWriter.begin(tmp_path, "a")
    (writer.path / f"{PROBE_PREFIX}0123").write_bytes(bytes(512))
    unlock(writer._directory._lock)  # type: ignore[union-attr]
    save(tmp_path, "b", 2)
    assert names(tmp_path) == [*(["a"] if replaced else []), "b", LATEST_NAME]
    assert not any(path.name.startswith(PROBE_PREFIX) for path in tmp_path.rglob(".*"))


def test_a_replaced_tag_of_an_older_version_leaves_no_data(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    new = data_file(tmp_path / "a")
    old = new.rename(new.with_name("data-00000.bin"))
    with pytest.raises(StoreError, match="is missing"):
        read_manifest(tmp_path / "a")
    writer = TagWriter.begin(tmp_path, "a")
    writer.discard()
    assert old.exists(), "a save that is not published leaves the tag as it is"
    save(tmp_path, "a", 2)
    assert not old.exists() and step_of(tmp_path / "a") == 2


@pytest.mark.parametrize("journal", [b"", b"0123456789ab", b"0123456789ab ../a", b"\xff", b"0123456789ab none", b"x a"])
def test_a_lock_file_that_names_no_save_removes_nothing(tmp_path: Path, journal: bytes) -> None:
    save(tmp_path, "a", 1)
    (tmp_path / LOCK_NAME).write_bytes(journal)
    save(tmp_path, "b", 2)
    assert step_of(tmp_path / "a") == 1 and step_of(tmp_path / "b") == 2


def test_verify_names_every_damaged_chunk(swap_path: Path) -> None:
    save_tag(swap_path, "a", {"x": torch.randn(900_000)}, 1)
    assert find_damage(swap_path / "a") == []
    path = data_file(swap_path / "a")
    with open(path, "r+b") as file:
        for offset in (5, (2 << 20) + 7, path.stat().st_size - 1):
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
    problems = find_damage(swap_path / "a")
    assert [problem.partition("offset ")[2].split()[0] for problem in problems] == ["0", "2097152", "3145728"]
    assert all(str(path) in problem and "xxh3" in problem for problem in problems)
    with pytest.raises(StoreError, match="are not those written"):
        load_tag(swap_path / "a")
    path.unlink()
    with pytest.raises(StoreError, match=f"a cannot be loaded: it is not whole: {path.name} is missing"):
        find_damage(swap_path / "a")
    with pytest.raises(StoreError, match=r"none cannot be loaded: it is not there\. Name a directory"):
        find_damage(swap_path / "none")


FOREIGN: dict[str, tuple[list[str], str]] = {
    "dcp": ([".metadata", "__0_0.distcp"], "torch.distributed.checkpoint's own format, whose metadata is a pickle"),
    "deepspeed": (["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "of DeepSpeed"),
    "torch": (["pytorch_model.bin"], "torch.save's files, which are pickled"),
    "weights": (["model.safetensors"], "exported weights"),
    "nothing": (["readme"], "is not a checkpoint: it has no manifest.json"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_checkpoints_are_refused_as_what_they_are(tmp_path: Path, kind: str) -> None:
    files, message = FOREIGN[kind]
    (tmp_path / "t").mkdir()
    for name in files:
        (tmp_path / "t" / name).write_bytes(b"\x80\x04.")
    for act in (
        lambda: find_checkpoint(tmp_path, "t"),
        lambda: open_tag(tmp_path / "t"),
        lambda: read_manifest(tmp_path / "t"),
    ):
        with pytest.raises(StoreError, match=message):
            act()
    infos = list_tags(tmp_path)
    assert [(info.tag, info.complete) for info in infos] == ([("t", False)] if kind != "nothing" else [])
    if kind != "nothing":
        assert message in infos[0].reason
        with pytest.raises(StoreError, match=message):
            find_checkpoint(tmp_path / "t")
    assert nothing_to_load(tmp_path / "t") == ""
    (tmp_path / "file").write_bytes(b"PK\x03\x04")
    with pytest.raises(StoreError, match="it is a file; expected a directory that save_checkpoint wrote"):
        find_checkpoint(tmp_path, "file")


@pytest.mark.parametrize("name", ["runs/", "train.log", "latest", ".metadata", "__0_0.distcp"])
def test_a_directory_with_anything_else_is_no_new_start(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    assert nothing_to_load(tmp_path) == "" == nothing_to_load(tmp_path, resumes=True)
    with pytest.raises(StoreError, match=f"{tmp_path}.*({name.strip('/')}|pickle)"):
        find_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torch_distributed_is_no_new_start(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert nothing_to_load(tmp_path) == ""
    with pytest.raises(
        StoreError, match=r"is a checkpoint of torch\.distributed\.checkpoint's own format.*Load it with"
    ):
        find_checkpoint(tmp_path)


def test_what_systems_and_killed_runs_leave_is_a_new_start(tmp_path: Path) -> None:
    assert nothing_to_load(tmp_path / "none") == "it does not exist"
    for name in ("lost+found", ".snapshot"):
        (tmp_path / name).mkdir()
    run = tmp_path / "tiered_zero-20260101-000000-1-0123"
    run.mkdir()
    for name in (OWNER_NAME, "data.bin"):
        (run / name).touch()
    assert nothing_to_load(tmp_path) == "it is empty" and list_tags(tmp_path) == []
    with pytest.raises(StoreError, match=rf"holds swap directories \({run.name}\): name one"):
        find_checkpoint(tmp_path)
    shutil.rmtree(run)
    writer = TagWriter.begin(tmp_path, "global_step1")
    write_padding(writer, "x", 4096)
    assert nothing_to_load(tmp_path) == "its first save was not completed"
    writer.discard()
    run.mkdir()
    for name in (OWNER_NAME, "data.bin"):
        (run / name).touch()
    assert nothing_to_load(tmp_path, resumes=True) == "", "a run's swap directory may be what was meant"
    with pytest.raises(StoreError, match="There is no checkpoint"):
        nothing_to_load(tmp_path / "none", resumes=True)
    with pytest.raises(StoreError, match="is no directory that save_checkpoint wrote"):
        nothing_to_load(run / "data.bin")


def test_a_checkpoint_without_its_manifest_is_named_as_that(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    (tmp_path / "a" / MANIFEST_NAME).unlink()
    with pytest.raises(StoreError, match=r"it is a checkpoint that has lost its manifest\.json"):
        find_checkpoint(tmp_path, "a")


def link_tag(path: Path) -> None:
    os.rename(path / "a", path.parent / "elsewhere")
    os.symlink(path.parent / "elsewhere", path / "a")


def link_data(path: Path) -> None:
    data = data_file(path / "a")
    os.rename(data, path.parent / "data")
    os.symlink(path.parent / "data", data)


def link_manifest(path: Path) -> None:
    os.rename(path / "a" / MANIFEST_NAME, path.parent / "manifest")
    os.symlink(path.parent / "manifest", path / "a" / MANIFEST_NAME)


def fifo_for_data(path: Path) -> None:
    data = data_file(path / "a")
    os.unlink(data)
    os.mkfifo(data)


def fifo_for_manifest(path: Path) -> None:
    os.unlink(path / "a" / MANIFEST_NAME)
    os.mkfifo(path / "a" / MANIFEST_NAME)


def directory_for_data(path: Path) -> None:
    data = data_file(path / "a")
    os.unlink(data)
    os.mkdir(data)


def longer_data(path: Path) -> None:
    data = data_file(path / "a")
    os.truncate(data, data.stat().st_size + 4096)


def huge_manifest(path: Path) -> None:
    os.truncate(path / "a" / MANIFEST_NAME, 1 << 40)


SWAPPED: list[tuple[Callable[[Path], None], str]] = [
    (link_tag, "it is a symbolic link"),
    (link_data, "is a symbolic link"),
    (link_manifest, "cannot be read: ELOOP"),
    (fifo_for_data, "is no file"),
    (fifo_for_manifest, "is no file; expected a file"),
    (directory_for_data, "is a directory"),
    (longer_data, "bytes; expected"),
    (huge_manifest, "expected at most"),
]


@pytest.mark.parametrize(("change", "message"), SWAPPED)
def test_only_plain_files_of_the_declared_sizes_are_opened(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "ck"
    save(path, "a", 1)
    change(path)
    for act in (lambda: find_checkpoint(path, "a"), lambda: open_tag(path / "a"), lambda: find_damage(path / "a")):
        with pytest.raises(StoreError, match=message):
            act()
    assert all(not info.complete for info in list_tags(path))


def test_names_that_are_taken_by_something_else_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    os.symlink(tmp_path, tmp_path / "link")
    for name in ("file", "link"):
        with pytest.raises(StoreError, match=rf"{name} is a .*, and is not replaced .* Name another tag\."):
            TagWriter.begin(tmp_path, name)
    assert (tmp_path / "file").read_text() == "x" and (tmp_path / "link").is_symlink()
    with pytest.raises(StoreError, match=r"cannot be saved to .*file"):
        TagWriter.begin(tmp_path / "file", "a")
    with pytest.raises(StoreError, match="cannot be saved to"):
        TagWriter.begin(tmp_path / "a\0b", "a")
    os.symlink("/etc/passwd", tmp_path / "other.lock")
    (tmp_path / LOCK_NAME).unlink(missing_ok=True)
    os.symlink("/etc/passwd", tmp_path / LOCK_NAME)
    with pytest.raises(StoreError, match="ELOOP"):
        TagWriter.begin(tmp_path, "a")


def test_a_directory_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StoreError, match=r"cannot be saved to .*: ENOLCK .*on a disk with file locks"):
        SaveDirectory.open(tmp_path)


def test_a_latest_that_cannot_be_written_leaves_all_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "a", 1)

    def fail(path: Path, data: bytes) -> None:
        if path.name == LATEST_NAME:
            raise OSError(28, "No space left on device")
        prepare_file(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(tag_writer, "prepare_file", fail)
        with pytest.raises(StoreError, match="The disk is full: checkpoint b could not be written"):
            save(tmp_path, "b", 2)
    assert names(tmp_path) == ["a", LATEST_NAME] and tag_to_load(tmp_path).tag == "a"


def test_a_pointer_is_whole_while_the_swap_store_holds_its_step(swap_path: Path) -> None:
    directory = SwapDir.create([swap_path])
    engine = select_engine(swap_path).engine
    store = SwapStore(directory, engine, capacity_nbytes=1 << 20)
    swap = StoreLocation(run_id=directory.run_id, paths=[str(path) for path in directory.paths])
    with TagWriter.begin(swap_path / "ck", "s4") as writer:
        store.commit(4, commit_metadata(4, writer.save_id, swap))
        writer.publish(fields(4, swap=swap), [])
    assert read_manifest(swap_path / "ck" / "s4").swap == swap
    store.prepare(5, {"commit_id": "y"})
    assert tag_to_load(swap_path / "ck").step == 4, "still the committed one"
    store.confirm()
    with pytest.raises(StoreError, match=r"it was superseded: .* has committed step 5 in place since"):
        read_manifest(swap_path / "ck" / "s4")
    store.close(remove=True)
    with pytest.raises(StoreError, match="which is gone"):
        read_manifest(swap_path / "ck" / "s4")
    engine.close()


class FullFile(SyncFile):
    def allocate(self, nbytes: int) -> None:
        error = TransferError(f"cannot reserve {nbytes} bytes for {self.path}")
        error.errno = errno.ENOSPC
        raise error


class FullEngine(SyncEngine):
    def open(self, path: str, *, create: bool = False, writable: bool = True) -> SyncFile:
        return FullFile(path, super().open(path, create=create, writable=writable).fd)


def test_a_full_disk_in_the_middle_is_named_with_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "a", 1)
    monkeypatch.setattr(tag_writer, "_check_space", lambda path, needed_nbytes: None)

    message = r"The disk is full: checkpoint b .* free there\. It needs 11\.7 KiB"
    writer = TagWriter.begin(tmp_path, "b", needed_nbytes=12_000)
    with moved_by(FullEngine()), pytest.raises(StoreError, match=message) as caught, writer, writer.writing():
        writer.publish(fields(2), [write_share(writer, TENSORS)])
    assert str(tmp_path) in str(caught.value)
    assert names(tmp_path) == ["a", LATEST_NAME] and equal_bits(
        load_tag(tmp_path / "a", SyncEngine()), {**TENSORS, "step": torch.tensor(1)}
    )


@pytest.mark.parametrize("kind", ["full", "pointer"])
def test_a_save_that_cannot_be_made_durable_leaves_the_replaced_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    save(tmp_path, "a", 1)
    old = data_file(tmp_path / "a")
    with TagWriter.begin(tmp_path, "a") as writer, monkeypatch.context() as patched:
        real = os.fsync

        def sync(fd: int) -> None:
            if writer.is_published and os.path.samefile(f"/proc/self/fd/{fd}", tmp_path / "a"):
                raise OSError(errno.EIO, "Input/output error")
            real(fd)

        patched.setattr(os, "fsync", sync)
        with pytest.raises(StoreError, match=r"a is complete, but it or `latest` may not be durable: .*Errno 5"):
            if kind == "full":
                writer.publish(fields(2), [write_share(writer, {"step": torch.tensor(2)})])
            else:
                swap = {"run_id": "0" * 32, "paths": [str(tmp_path)]}
                writer.prepare(fields(2, swap=swap))
                writer.publish_prepared()
    assert look_at(tmp_path / "a")[0].step == 2 and writer.is_published
    assert old.exists(), "which the manifest before names, if the disk has that one"
    assert "cannot be removed" not in caplog.text
    save(tmp_path, "b", 3)
    assert names(tmp_path) == ["a", "b", LATEST_NAME] and tag_to_load(tmp_path).tag == "b" and not old.exists()
