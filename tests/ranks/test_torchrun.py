"""What a user starts with torchrun: the loop of the README, `tiered-zero train`, and every way in which a rank ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.torchrun import SCRIPTS, forked, interrupt, launched, ranks_of, run, still_running
from tests.support.inspection.insides import collect_garbage

CONFIGS = SCRIPTS.parents[1] / "configs"
LOOP = str(SCRIPTS / "run_loop.py")
TRAIN = ["-m", "tiered_zero", "train"]
SMALL = ["--model", "gpt:layers=1,hidden=32,context=16", "--steps", "6"]


def test_the_loop_of_the_readme(swap_path: Path, tmp_path: Path) -> None:
    run([LOOP, str(tmp_path), str(swap_path)], tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert (first["comm"], second["comm"]) == ([0, 2, 0], [1, 2, 1])
    for stage in "0123":
        one, other = first[stage], second[stage]
        assert one["weights"] == other["weights"] == first["0"]["weights"], "on all ranks, at all stages"
        assert (one["rank"], other["rank"], one["world"], one["batch"]) == (0, 1, 2, 4)
        assert len(one["losses"]) == len(other["losses"]) == 2 * 5, "23 samples are 5 batches of 2 on each of 2 ranks"
        assert one["losses"][-1] < one["losses"][0] and one["losses"] != other["losses"]
        passes = [set(one["seen"][start : start + 10] + other["seen"][start : start + 10]) for start in (0, 10)]
        assert [len(samples) for samples in passes] == [20, 20], "each sample on one rank"
        assert one["gathered_nbytes"] > 0 < one["reduced_nbytes"] and one["waited_s"] > 0
    assert not any(swap_path.iterdir())


def test_train_says_everything_once(swap_path: Path) -> None:
    with forked([*TRAIN, str(CONFIGS / "gpt_nvme.json"), *SMALL, "--report", "run.jsonl"], swap_path) as launch:
        assert launch.wait() == 0, launch.output[-8000:]
    out, err = launch.stdout.read_text(), launch.stderr.read_text()
    for once in (
        "Bytes by tier",
        "spent in",
        "6 steps in ",
    ):
        assert out.count(once) == 1, once
    for once in ("parameters, gpt:layers=1", "update policy"):
        assert err.count(once) == 1, once
    assert err.count("warning:") == len({line for line in err.splitlines() if "warning:" in line})
    assert "wait_ranks" in out
    assert not any((swap_path / "swap").iterdir())
    assert len([line for line in (swap_path / "run.jsonl").read_text().splitlines() if '"step"' in line]) >= 6


def start_and_fail(how: str, scratch: Path, swap_path: Path) -> tuple[str, int]:
    """The output and the exit code of a run whose rank 1 ends; nothing of it runs any more."""
    with forked([LOOP, str(scratch), str(swap_path), how], scratch) as launch:
        launch.wait_for(lambda: len(ranks_of(launch)) == 2, "two ranks")
        ranks = ranks_of(launch)
        code = launch.wait()
        assert still_running(ranks) == []
    return launch.output, code


def test_an_error_of_one_rank_is_heard_by_the_other(swap_path: Path, tmp_path: Path) -> None:
    output, code = start_and_fail("raise", tmp_path, swap_path)
    assert code == 1
    assert "ValueError: the data of this rank ends here" in output
    heard = "Rank 1 failed, which ends the run on all 2 ranks: ValueError: the data of this rank ends here"
    assert heard in output
    assert not any(swap_path.iterdir())


@pytest.mark.slow
def test_a_rank_that_leaves_is_named(swap_path: Path, tmp_path: Path) -> None:
    output, code = start_and_fail("exit", tmp_path, swap_path)
    assert code == 1 and "Rank 1 has closed its engine, or ended" in output
    assert not any(swap_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rank_that_is_killed_or_stopped_ends_the_run(swap_path: Path, tmp_path: Path, how: str) -> None:
    """What it has left in the swap directory is known to be dead, and removed as after any kill."""
    output, code = start_and_fail(how, tmp_path, swap_path)
    assert code == 1
    if how == "stop":
        assert "no answer of another rank within 10 s (tiered_zero.comm_timeout_s)" in output
    else:
        assert "SIGKILL" in output
    left = list(swap_path.iterdir())
    assert len(left) == 1, "that of the rank which could not remove it"
    assert [each.removed for each in collect_garbage(swap_path)] == [True]
    assert not any(swap_path.iterdir())


@pytest.mark.slow
def test_ctrl_c_ends_every_rank(swap_path: Path, tmp_path: Path) -> None:
    with launched([LOOP, str(tmp_path), str(swap_path), "wait"], tmp_path) as launch:
        launch.wait_for(lambda: (tmp_path / "begun0").exists() and (tmp_path / "begun1").exists(), "third step")
        ranks = ranks_of(launch)
        interrupt(launch)
        assert launch.wait() != 0
        assert still_running(ranks) == []
    assert "KeyboardInterrupt" in launch.output
    assert not any(swap_path.iterdir())


@pytest.mark.slow
def test_ctrl_c_ends_train_after_the_same_step(swap_path: Path) -> None:
    config = json.loads((CONFIGS / "gpt_device.json").read_text())
    config["zero_optimization"] = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "swap"}}
    (swap_path / "config.json").write_text(json.dumps({**config, "steps_per_print": 1}))
    arguments = [*TRAIN, "config.json", *SMALL[:2], "--steps", "1000000", "--json"]
    with forked(arguments, swap_path) as launch:
        launch.wait_for(lambda: "step 5:" in launch.stderr.read_text(), "fifth step")
        ranks = ranks_of(launch)
        interrupt(launch)
        launch.wait()
        assert still_running(ranks) == []
    err = launch.stderr.read_text()
    assert err.count("Finishing this step; a second signal ends at once.") == 1
    assert err.count("Stopped after ") == 1
    found: dict[str, Any] = json.loads(launch.stdout.read_text())
    assert found["interrupted"] and found["world_size"] == 2
    assert not any((swap_path / "swap").iterdir())
