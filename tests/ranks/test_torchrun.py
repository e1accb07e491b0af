"""What a user starts with torchrun: the loop of the README, `tiered-zero train`, and every way in which a rank ends."""

from __future__ import annotations

import json
from pathlib import Path

from tests.ranks.torchrun import SCRIPTS, run

CONFIGS = SCRIPTS.parents[1] / "configs"
LOOP = str(SCRIPTS / "run_loop.py")
TRAIN = ["-m", "tiered_zero", "train"]
SMALL = ["--model", "gpt:layers=1,hidden=32,context=16", "--steps", "6"]


def test_the_loop_of_the_readme(swap_path: Path, tmp_path: Path) -> None:
    run([LOOP, str(tmp_path), str(swap_path)], tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert (first["comm"], second["comm"]) == ([0, 2, 0], [1, 2, 1])
    for stage in "012":
        one, other = first[stage], second[stage]
        assert one["weights"] == other["weights"] == first["0"]["weights"], "on all ranks, at all stages"
        assert (one["rank"], other["rank"], one["world"], one["batch"]) == (0, 1, 2, 4)
        assert len(one["losses"]) == len(other["losses"]) == 2 * 5, "23 samples are 5 batches of 2 on each of 2 ranks"
        assert one["losses"][-1] < one["losses"][0] and one["losses"] != other["losses"]
        passes = [set(one["seen"][start : start + 10] + other["seen"][start : start + 10]) for start in (0, 10)]
        assert [len(samples) for samples in passes] == [20, 20], "each sample on one rank"
        assert one["gathered_numel"] > 0 < one["reduced_numel"] and one["waited_s"] > 0
    assert not any(swap_path.iterdir())


def test_train_says_everything_once(swap_path: Path) -> None:
    launch = run([*TRAIN, str(CONFIGS / "gpt_device.json"), *SMALL, "--report", "run.jsonl"], swap_path)
    out, err = launch.stdout.read_text(), launch.stderr.read_text()
    for once in ("Bytes by tier", "spent in", "6 steps in ", "2 ranks; a step without waits for the others"):
        assert out.count(once) == 1, once
    for once in ("parameters, gpt:layers=1", "update policy"):
        assert err.count(once) == 1, once
    assert err.count("warning:") == len({line for line in err.splitlines() if "warning:" in line})
    assert len([line for line in (swap_path / "run.jsonl").read_text().splitlines() if '"step"' in line]) >= 6
