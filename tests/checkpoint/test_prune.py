"""What prune removes: old whole tags and superseded pointers; and what stays, whatever is asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.fakes.sync_io import SyncEngine
from tests.support.inspection.insides import SwapDir, SwapStore
from tests.support.tags import commit_metadata, data_file, fields, save_tag, tag_to_load, unfinished
from tiered_zero.checkpoint.index import LATEST_NAME, StoreLocation
from tiered_zero.checkpoint.tag import find_checkpoint, list_tags, look_at, prune
from tiered_zero.checkpoint.tag_writer import LOCK_NAME, TagWriter
from tiered_zero.errors import StoreError


def save(path: Path, step: int) -> None:
    save_tag(path, f"s{step}", {"x": torch.tensor([1.0, step])}, step, SyncEngine())


def names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if not name.startswith("."))


@dataclass
class Committer:
    """Commits in place, and leaves a pointer for each commit, as a run does."""

    save_dir: Path
    swap: SwapDir
    store: SwapStore

    def commit(self, step: int, *, tag: str | None = None, save_latest: bool = True) -> None:
        """`tag`: "" for a run that is killed before the tag is written."""
        name = f"s{step}" if tag is None else tag
        swap = StoreLocation(run_id=self.swap.run_id, paths=[str(path) for path in self.swap.paths])
        with TagWriter.begin(self.save_dir, name or "killed") as writer:
            self.store.commit(step, commit_metadata(step, writer.save_id, swap))
            if name:
                writer.prepare(fields(step, swap=swap), save_latest=save_latest)
                writer.publish_prepared()


@pytest.fixture
def run(swap_path: Path) -> Iterator[Committer]:
    swap = SwapDir.create([swap_path])
    store = SwapStore(swap, SyncEngine(), capacity_nbytes=1 << 16)
    yield Committer(swap_path / "ck", swap, store)
    store.close()


def removed(path: Path, keep: int) -> list[str]:
    """Also what a dry run says of it."""
    before = names(path)
    expected = [info.tag for info in prune(path, keep, dry_run=True)]
    assert names(path) == before
    assert [info.tag for info in prune(path, keep)] == expected
    assert names(path) == sorted({*before} - {*expected})
    return expected


def test_prune_keeps_the_newest_and_the_one_that_latest_names(tmp_path: Path) -> None:
    for step in (5, 6, 7, 8):
        save(tmp_path, step)
    save(tmp_path, 1)
    next((tmp_path / "s8").glob("data-*")).unlink()
    assert [info.tag for info in prune(tmp_path, keep=2)] == ["s5"]
    assert names(tmp_path) == [LATEST_NAME, "s1", "s6", "s7", "s8"], "a damaged one is not removed"
    assert prune(tmp_path, keep=2) == []
    with pytest.raises(StoreError, match="at least one"):
        prune(tmp_path, keep=0)


def test_superseded_pointers_are_removed_and_do_not_count(run: Committer) -> None:
    save(run.save_dir, 1)
    save(run.save_dir, 2)
    for step in (3, 4, 5, 6):
        run.commit(step)
    assert removed(run.save_dir, keep=2) == ["s1", "s3", "s4", "s5"]
    assert names(run.save_dir) == [LATEST_NAME, "s2", "s6"]
    assert find_checkpoint(run.save_dir).swap == run.swap.paths[0]
    assert removed(run.save_dir, keep=1) == ["s2"]
    assert tag_to_load(run.save_dir).step == 6


@pytest.mark.parametrize("save_latest", [True, False])
def test_the_only_pointer_to_a_commit_stays(run: Committer, save_latest: bool) -> None:
    for step in (1, 2, 3):
        run.commit(step, save_latest=save_latest)
    run.commit(4, tag="")
    assert removed(run.save_dir, keep=1) == ["s1", "s2"]
    found = find_checkpoint(run.save_dir)
    assert found.swap == run.swap.paths[0] and "has committed step 4 in place since" in found.lines[-1]


def test_a_lost_tag_leads_to_its_commit_by_the_newest_pointer(run: Committer) -> None:
    """A crash may leave `latest` with the name of a tag that is not there. A full save before is of an older step."""
    save(run.save_dir, 1)
    run.commit(2)
    run.commit(3, tag="")
    (run.save_dir / LATEST_NAME).write_text("s3")
    found = find_checkpoint(run.save_dir)
    assert found.swap == run.swap.paths[0] and "has committed step 3 in place since" in found.lines[-1]


def test_a_pointer_of_a_later_step_that_was_given_up_goes(run: Committer) -> None:
    """A run that went back to an older step: the pointer of its commit is the way to it, and no older one."""
    for step in (1, 2, 3):
        run.commit(step, tag=f"tag{step}")
    run.commit(2, tag="again")
    assert removed(run.save_dir, keep=1) == ["tag1", "tag2", "tag3"]
    assert names(run.save_dir) == ["again", LATEST_NAME]


def test_swap_directories_stay_and_pointers_into_one_that_cannot_be_read(run: Committer) -> None:
    for step in (1, 2):
        run.commit(step)
    for step in (3, 4):
        save(run.save_dir, step)
    hidden = run.swap.paths[0].with_name("unmounted")
    run.swap.paths[0].rename(hidden)
    assert removed(run.save_dir, keep=1) == ["s3"]
    hidden.rename(run.swap.paths[0])
    assert removed(run.save_dir, keep=1) == ["s1", "s2"], "not among the newest: only its tag goes"
    assert find_checkpoint(run.swap.paths[0]).swap == run.swap.paths[0]
    assert run.store.step == 2 and (run.swap.paths[0] / "manifest").exists()
    assert [info.tag for info in list_tags(run.save_dir)] == ["s4"]
    with pytest.raises(StoreError, match="at least one"):
        prune(run.save_dir, keep=0)


def test_files_of_others_in_a_tag_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A prune leaves the tag, too; a save replaces it."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    export = tmp_path / "s1" / "hf"
    export.mkdir()
    (export / "model.safetensors").write_text("weights")
    assert removed(tmp_path, 1) == ["s2"]
    assert "s1 has files that are no part of a checkpoint" in caplog.text and "'hf'" in caplog.text
    assert tag_to_load(tmp_path, "s1").complete
    save_tag(tmp_path, "s1", {"x": torch.tensor([4.0])}, 4, SyncEngine())
    assert tag_to_load(tmp_path, "s1").step == 4 and (export / "model.safetensors").read_text() == "weights"
    assert unfinished(tmp_path) == []


def test_files_of_a_killed_writer_that_cannot_be_removed_stop_no_save_and_no_prune(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    left = tmp_path / "left" / "data-00000-0123456789ab.bin"
    left.mkdir(parents=True)
    (tmp_path / LOCK_NAME).write_text("0123456789ab left")
    save(tmp_path, 2)
    assert f"Files in {left.parent} cannot be removed: EISDIR" in caplog.text and "removed 4" not in caplog.text
    assert tag_to_load(tmp_path).tag == "s2" and removed(tmp_path, 1) == ["s1"]


def test_what_a_killed_writer_left_stays_while_the_manifest_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The manifest may be that of the save which the lock file names."""
    save(tmp_path, 1)
    data = data_file(tmp_path / "s1")
    (tmp_path / LOCK_NAME).write_text(f"{look_at(tmp_path / 's1')[0].save_id} s1")
    (tmp_path / "s1" / "manifest.json").write_bytes(b"{}")
    save(tmp_path, 2)
    assert data.exists() and f"{tmp_path / 's1'}: what a writer left when it ended stays" in caplog.text


def test_a_prune_that_was_killed_is_ended_by_the_next_writer(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    data = data_file(tmp_path / "s1")
    (tmp_path / LOCK_NAME).write_text(f"{look_at(tmp_path / 's1')[0].save_id} s1")
    (tmp_path / "s1" / "manifest.json").unlink()
    assert look_at(tmp_path / "s1")[0].is_unfinished and data.exists()
    save(tmp_path, 3)
    assert names(tmp_path) == [LATEST_NAME, "s2", "s3"]
