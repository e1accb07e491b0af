"""What prune removes: old whole tags and superseded pointers; and what stays, whatever is asked."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.fakes.sync_io import SyncEngine
from tests.support.inspection.insides import SwapDir, SwapStore
from tests.support.tags import fields, save_tag, tag_to_load, write_share
from tiered_zero.checkpoint.index import LATEST_NAME
from tiered_zero.checkpoint.tag import find_checkpoint, list_tags, prune
from tiered_zero.checkpoint.tag_writer import TagWriter
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
        commit_id = secrets.token_hex(4)
        self.store.commit(step, {"commit_id": commit_id})
        name = f"s{step}" if tag is None else tag
        if name:
            paths = [str(path) for path in self.swap.paths]
            swap = {"run_id": self.swap.run_id, "paths": paths, "commit_id": commit_id}
            with TagWriter.begin(self.save_dir, name, engine=SyncEngine()) as writer:
                writer.prepare(fields(step, kind="in_place", swap=swap), save_latest=save_latest)
                writer.publish_pointer()


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


def test_a_tag_with_files_of_others_stays_and_stops_no_save_and_no_prune(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    export = tmp_path / "s1" / "hf"
    export.mkdir()
    (export / "model.safetensors").write_text("weights")
    assert removed(tmp_path, 1) == ["s2"]
    assert "s1 has directories that are no part of a checkpoint" in caplog.text and "'hf'" in caplog.text
    with pytest.raises(StoreError, match=r"s1 has directories .*'hf'\. Move them elsewhere, or name another tag"):
        save(tmp_path, 1)
    assert tag_to_load(tmp_path, "s1").complete and (export / "model.safetensors").read_text() == "weights"
    save(tmp_path, 4)
    assert tag_to_load(tmp_path).tag == "s4"


def test_a_hidden_directory_that_cannot_be_removed_stops_no_save_and_no_prune(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    left = tmp_path / ".tmp-old-0123456789ab"
    (left / "hf").mkdir(parents=True)
    (left / "hf" / "model.safetensors").write_text("weights")
    save(tmp_path, 2)
    assert tag_to_load(tmp_path).tag == "s2" and removed(tmp_path, 1) == ["s1"]
    assert caplog.text.count(f"{left} cannot be removed: ENOTEMPTY") == 2 and "removed .tmp-old" not in caplog.text


def test_what_is_put_into_a_tag_while_it_is_replaced_keeps_latest_from_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    with TagWriter.begin(tmp_path, "s1", engine=SyncEngine()) as writer:
        (tmp_path / "s1" / "hf").mkdir()
        (tmp_path / "s1" / "hf" / "model.safetensors").write_text("weights")
        writer.publish(fields(3), [write_share(writer, {"x": torch.tensor([3.0])})])
    assert tag_to_load(tmp_path).step == 3 and (tmp_path / LATEST_NAME).read_text() == "s1"
    assert caplog.text.count("cannot be removed: ENOTEMPTY") == 1
    assert [*tmp_path.glob(".tmp-s1-*/hf/model.safetensors")]
