"""Checkpoints that many ranks write together, on any placement for any other."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks.pool import RankPool
from tests.ranks.saving import Place, build, load, save, train, warnings_noted, weights_of
from tests.ranks.training import differences
from tests.support.inspection.insides import RecordWriter, list_tags, weights
from tests.support.tags import data_file, equal_bits, load_tag
from tiered_zero.errors import StoreError

SAVED = [
    Place(world=1, stage=1, device="cpu"),
    Place(world=2, stage=0, device="nvme"),
    Place(world=2, stage=1, device="none"),
    Place(world=2, stage=2, device="cpu"),
    Place(world=4, stage=1, device="nvme"),
    Place(world=4, stage=0, device="cpu"),
    Place(world=2, stage=3, device="none"),
    Place(world=2, stage=3, device="nvme"),
    Place(world=4, stage=3, device="cpu"),
]


def name_of(place: Place) -> str:
    return f"{place.world}-ranks-stage-{place.stage}-{place.device}"


@pytest.mark.parametrize("place", [SAVED[2], SAVED[3], SAVED[4], SAVED[7]], ids=name_of)
def test_the_same_ranks_go_on_with_equal_bits(ranks: RankPool, tmp_path: Path, swap_path: Path, place: Place) -> None:
    undisturbed = ranks.run(save, place.world, place, str(swap_path), str(tmp_path))
    resume = place.stage == 2  # as initialize does it
    resumed = ranks.run(load, place.world, place, str(swap_path), str(tmp_path), resume=resume)
    for before, after in zip(undisturbed, resumed, strict=True):
        assert after["client_state"] == {"of rank": 0} and after["first"] == 2
        assert differences(after["loaded"], before["saved"]) == []
        assert after["losses"] == before["losses"]
        assert differences(after["weights"], before["weights"]) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SAVED[4], SAVED[0]),
        (SAVED[0], SAVED[5]),
        (SAVED[8], SAVED[1]),
        (SAVED[3], SAVED[6]),
    ],
    ids=name_of,
)
def test_other_ranks_hold_the_same_values(
    ranks: RankPool, tmp_path: Path, swap_path: Path, first: Place, second: Place
) -> None:
    """Saved again by the run that has loaded it, a checkpoint has the same tensors, bit for bit."""
    one, other = tmp_path / "one", tmp_path / "other"
    saved = ranks.run(save, first.world, first, str(swap_path), str(one), more=0)
    loaded = ranks.run(load, second.world, second, str(swap_path), str(one), more=1, save_dir=str(other))
    for each in loaded:
        assert differences(each["loaded"], saved[0]["saved"]) == []
        assert differences(each["weights"], loaded[0]["weights"]) == []
    assert equal_bits(load_tag(one / "global_step2"), load_tag(other / "global_step2"))


def resume_noting(place: Place, swap_path: str, load_dir: str) -> tuple[str, list[str]]:
    """Begin a run at a checkpoint: which it is, and the warnings of this rank."""
    with warnings_noted() as lines:
        engine = build(place, swap_path, checkpoint={"resume": load_dir})
    assert engine.resumed is not None
    path = engine.resumed[0]
    engine.close()
    return path.name, lines


def test_what_resume_skips_is_said(ranks: RankPool, tmp_path: Path, swap_path: Path) -> None:
    place = SAVED[1]
    ranks.run(save, place.world, place, str(swap_path), str(tmp_path), steps=1, more=0)
    ranks.run(save, place.world, place, str(swap_path), str(tmp_path), steps=2, more=0)
    data = data_file(tmp_path / "global_step2", rank=1)
    os.truncate(data, data.stat().st_size - 4096)
    for rank, (name, lines) in enumerate(ranks.run(resume_noting, 2, place, str(swap_path), str(tmp_path))):
        said = [line for line in lines if "global_step2" in line and "bytes; expected" in line]
        assert name == "global_step1" and len(said) == (rank == 0), lines


def save_weights(place: Place, swap_path: str, save_dir: str) -> dict[str, Any]:
    """Weight files of three tensors each; on a full disk rank 0 cannot write them."""
    engine = build(place, swap_path)
    train(engine, 0, 1)
    engine.save_16bit_model(save_dir, max_shard_size=20_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "write_new_file", full_disk)
        with pytest.raises(StoreError) as full:
            engine.save_16bit_model(save_dir)
    found = {"weights": weights_of(engine), "text": str(full.value)}
    engine.close()
    return found


def save_on_full_disk(place: Place, swap_path: str, save_dir: str) -> str:
    """Return the error of a save in which the disk of rank 1 is full. The next save succeeds."""
    engine = build(place, swap_path)
    train(engine, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(RecordWriter, "append", full_disk)
        with pytest.raises(StoreError) as full:
            engine.save_checkpoint(save_dir, tag="bad")
    engine.save_checkpoint(save_dir, tag="good")
    engine.close()
    return str(full.value)


def test_a_full_disk_of_one_rank_is_named_on_all(ranks: RankPool, tmp_path: Path, swap_path: Path) -> None:
    first, second = ranks.run(save_on_full_disk, 2, SAVED[7], str(swap_path), str(tmp_path))
    assert second.startswith("The disk is full: checkpoint bad could not be written") and first == f"Rank 1: {second}"
    assert [info.tag for info in list_tags(tmp_path)] == ["good"]


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_sharded_weights_are_written_by_rank_0(ranks: RankPool, tmp_path: Path, swap_path: Path) -> None:
    first, second = ranks.run(save_weights, 2, SAVED[7], str(swap_path), str(tmp_path))
    assert "cannot be written" in first["text"] and second["text"] == f"Rank 0: {first['text']}"
    names = {path.name for path in tmp_path.glob("*.safetensors")}
    assert len(names) > 1
    found: dict[str, Any] = {}
    for name in names:
        found |= load_file(tmp_path / name)
    assert found and all(torch.equal(value, first["weights"][name]) for name, value in found.items())
    assert len(found) > 10
