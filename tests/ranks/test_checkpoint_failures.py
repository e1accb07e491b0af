"""Saves and loads that fail on one rank: raised on all of them, with the last checkpoint in its place."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.pool import RankPool
from tests.ranks.saving import Place, build, train, weights_of
from tests.ranks.training import differences
from tests.support.inspection.insides import OffloadedParams, RecordWriter, list_tags
from tests.support.tags import data_file, load_tag
from tiered_zero.errors import EngineFailedError, ModelError, RankError, StoreError, TransferError

PLACE = Place(world=2, stage=1)


def fail_in_mid_save(swap_path: str, save_dir: str, how: str, failing: int = 1) -> dict[str, Any]:
    """A rank fails when it has written its data. What is raised, and what the run ends with that goes on."""
    engine = build(PLACE, swap_path)
    train(engine, 0, 1)
    engine.save_checkpoint(save_dir)
    train(engine, 1, 2)

    def fail(self: RecordWriter) -> Any:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise TransferError("the cable of this disk is loose")

    with pytest.MonkeyPatch.context() as patch:
        if engine.global_rank == failing:
            patch.setattr(RecordWriter, "finish", fail)
        with pytest.raises((TransferError, RankError)) as raised:
            engine.save_checkpoint(save_dir)
        text = f"{type(raised.value).__name__}: {raised.value}"
    names = sorted(os.listdir(save_dir))
    if how == "kill":
        with pytest.raises((RankError, EngineFailedError)):
            train(engine, 2, 3)
        weights = {}
    else:
        train(engine, 2, 3)
        engine.save_checkpoint(save_dir)
        weights = weights_of(engine)
    engine.close()
    return {"text": text, "names": names, "weights": weights}


def undisturbed(swap_path: str) -> dict[str, torch.Tensor]:
    engine = build(PLACE, swap_path)
    train(engine, 0, 3)
    weights = weights_of(engine)
    engine.close()
    return weights


def test_training_goes_on_after_one_rank_could_not_write(ranks: RankPool, tmp_path: Path, swap_path: Path) -> None:
    saved = tmp_path / "saved"
    first, second = ranks.run(fail_in_mid_save, 2, str(swap_path), str(saved), "raise")
    assert second["text"] == "TransferError: the cable of this disk is loose"
    assert first["text"] == "TransferError: Rank 1: the cable of this disk is loose"
    assert first["names"] == [".tiered_zero.lock", "global_step1", "latest"]
    assert [info.tag for info in list_tags(saved)] == ["global_step1", "global_step3"]
    expected = ranks.run(undisturbed, 2, str(swap_path))[0]
    assert differences(first["weights"], expected) == []


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_in_mid_save_leaves_no_tag(ranks: RankPool, tmp_path: Path, swap_path: Path, killed: int) -> None:
    saved = tmp_path / "saved"
    outcomes = ranks.outcomes(fail_in_mid_save, 2, str(swap_path), str(saved), "kill", killed)
    other = outcomes[1 - killed]
    assert outcomes[killed].error == "ProcessEnded"
    assert other.error == "" and other.value["text"].startswith("RankError"), other.traceback
    assert [info.tag for info in list_tags(saved) if info.complete] == ["global_step1"]
    assert load_tag(saved / "global_step1")
    ranks.run(fail_in_mid_save, 2, str(swap_path), str(saved), "raise")  # a new run saves there again
    assert {path.name for path in saved.iterdir()} == {".tiered_zero.lock", "global_step1", "global_step3", "latest"}


def fail_in_read(swap_path: str, save_dir: str, failing: int) -> str:
    """A rank cannot read its shard of the second unit that is exported: what is raised."""
    engine = build(Place(world=2, stage=3, device="nvme"), swap_path)
    train(engine, 0, 1)
    read, units = OffloadedParams._read_home, set()

    def read_once(self: OffloadedParams, unit: Any) -> torch.Tensor:
        units.add(unit.name)
        if len(units) == 2:
            raise TransferError("the cable of this disk is loose")
        return read(self, unit)

    with pytest.MonkeyPatch.context() as patch:
        if engine.global_rank == failing:
            patch.setattr(OffloadedParams, "_read_home", read_once)
        with pytest.raises((TransferError, RankError, StoreError)) as raised:
            engine.save_16bit_model(save_dir)
    with pytest.raises((RankError, EngineFailedError)):
        train(engine, 1, 2)
    engine.close()
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_read_that_fails_on_one_rank_ends_the_export_of_all(
    ranks: RankPool, tmp_path: Path, swap_path: Path, failing: int
) -> None:
    """The other waits in the gather of that unit, and is told the cause: not a timeout, nor that the order differs."""
    found = ranks.run(fail_in_read, 2, str(swap_path), str(tmp_path), failing)
    assert found[failing] == "TransferError: the cable of this disk is loose"
    cause = rf"RankError: Rank {failing} failed, .*: save_16bit_model: .*: TransferError: the cable of this disk"
    assert re.match(cause, found[1 - failing]), found
    assert not list(tmp_path.glob("*.safetensors"))


def disagree(swap_path: str, save_dir: str) -> dict[str, str]:
    """Calls that differ on the two ranks, each with what is raised; then one that is the same."""
    engine = build(PLACE, swap_path)
    model: Any = engine.module
    train(engine, 0, 1)
    rank = engine.global_rank
    acts: dict[str, Callable[[], Any]] = {
        "directory": lambda: engine.save_checkpoint(f"{save_dir}/{rank}"),
        "arguments": lambda: engine.save_checkpoint(save_dir, save_latest=rank == 0),
        "client_state": lambda: engine.save_checkpoint(save_dir, client_state={"f": print} if rank else {}),
        "calls": lambda: engine.save_checkpoint(save_dir) if rank else engine.load_checkpoint(save_dir),
        "missing": lambda: engine.load_checkpoint(save_dir, tag="never saved"),
    }
    texts = {}
    for name, act in acts.items():
        with pytest.raises((ModelError, StoreError, RankError)) as raised:
            act()
        texts[name] = f"{type(raised.value).__name__}: {raised.value}"
    before = weights_of(engine)
    engine.save_checkpoint(save_dir, tag=f"of rank {rank}")
    if rank == 1:
        os.truncate(data_file(Path(save_dir) / "of rank 0", rank=1), 4096)
    engine.optimizer.read_state(model.norm.weight)  # rank 0 waits for the cut
    with pytest.raises(StoreError) as cut_off:
        engine.load_checkpoint(save_dir)
    texts["cut off"] = str(cut_off.value)
    assert differences(weights_of(engine), before) == []
    train(engine, 1, 2)
    engine.close()
    return texts


def test_ranks_that_disagree_save_and_load_nothing(ranks: RankPool, tmp_path: Path, swap_path: Path) -> None:
    first, second = ranks.run(disagree, 2, str(swap_path), str(tmp_path))
    assert first["directory"].startswith("StoreError: Rank 1: ")
    assert "is not the directory in which rank 0 has begun" in second["directory"]
    for found in (first, second):
        assert "rank 1 is at step 1 with {'save_latest': False" in found["arguments"]
        assert "RankError: Every rank was expected to make the same call" in found["calls"]
        assert "never saved" in found["missing"]
    assert first["client_state"].startswith("ModelError: Rank 1: ")
    assert [info.tag for info in list_tags(tmp_path)] == ["of rank 0"]


def refuse_other_tags(swap_path: str, save_dir: str) -> str:
    engine = build(Place(world=2, config={"checkpoint": {"tag_validation": "Fail"}}), swap_path)
    with pytest.raises(ModelError) as refused:
        engine.save_checkpoint(save_dir, tag=f"of rank {engine.global_rank}")
    engine.close()
    return str(refused.value)


def test_tags_that_differ_are_refused_where_the_config_says_so(
    ranks: RankPool, tmp_path: Path, swap_path: Path
) -> None:
    for text in ranks.run(refuse_other_tags, 2, str(swap_path), str(tmp_path)):
        assert "found ['of rank 0', 'of rank 1'], and checkpoint.tag_validation is Fail" in text


def step_against_save(swap_path: str, save_dir: str) -> str:
    """Rank 0 takes a step that rank 1 does not: it saves."""
    engine = build(PLACE, swap_path)
    train(engine, 0, 1)
    with pytest.raises(RankError) as raised:
        if engine.global_rank == 0:
            train(engine, 1, 2)
        else:
            engine.save_checkpoint(save_dir)
    engine.close()
    return str(raised.value)


def test_a_save_on_one_rank_alone_is_found(ranks: RankPool, tmp_path: Path, swap_path: Path) -> None:
    first, second = ranks.run(step_against_save, 2, str(swap_path), str(tmp_path))
    assert "rank 1: save_checkpoint" in first
    assert "rank 1: save_checkpoint" in second or "Rank 0 failed" in second
    assert list_tags(tmp_path) == []
