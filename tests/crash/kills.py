"""Kill real training processes at random moments, go on from what they left, compare with a run that was not killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.crash import run_commits, run_rank_commits
from tests.support.forked import ForkedProgram, run_forked
from tests.support.inspection.insides import list_runs, load_manifests
from tests.support.tags import unfinished

ROOT = Path(__file__).parents[2]
CASES = [
    ("overlapped", "fp32", "nvme"),
    ("barrier", "fp32", "nvme"),
    ("overlapped", "bf16_remainder", "nvme"),
    ("overlapped", "bf16_remainder", "cpu"),
]
"""Update policy, state format, and where parameters rest."""


@dataclass(frozen=True)
class RankCase:
    """Ranks that are killed. `num_hosts`: each with a disk of its own."""

    world_size: int
    stage: int
    state_format: str
    num_hosts: int = 1

    def __str__(self) -> str:
        hosts = f" on {self.num_hosts} hosts" if self.num_hosts > 1 else ""
        return f"{self.world_size} ranks{hosts}, stage {self.stage}, {self.state_format}"


RANK_CASES = [
    RankCase(2, 1, "fp32"),
    RankCase(2, 3, "bf16_remainder", 2),
    RankCase(4, 3, "fp32", 2),
]


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What became of a run that was killed `num_kills` times. `num_in_save`: of these kills how many left names of a
    save that was under way. `num_steps`: of the run; `num_repeated`: steps that were made more than once,
    None where they are not counted."""

    num_kills: int
    num_in_save: int
    num_steps: int
    num_repeated: int | None


def kill_script(directory: Path, swap_path: Path, case: tuple[str, str, str], num_kills: int, seed: int) -> Killed:
    """Kill a script that commits in place after each step. Raises AssertionError on a lost step and on other bits."""
    save_dir = directory / "saved"
    save_dir.mkdir(mode=0o700)
    done = run_forked("-m", run_commits.__name__, swap_path, save_dir, num_kills, seed, *case)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected, durable = found["expected"], 0
    num_steps, num_repeated = len(expected) - 1, 0
    killed = [process for process in found["processes"] if not process["ended"]]
    for process in found["processes"]:
        for line in process["lines"]:
            if "digest" in line:
                assert line["step"] >= durable, f"a durable step was lost ({seed=}): {line}, {durable=}"
                assert line["digest"] == expected[line["step"]], f"other bits at step {line['step']} ({seed=})"
            durable = max(durable, line.get("durable", 0))
    for before, after in zip(found["processes"], found["processes"][1:], strict=False):
        made = max((line.get("durable", line.get("step", 0)) for line in before["lines"]), default=0)
        begun = next((line["step"] for line in after["lines"] if "digest" in line), made)
        num_repeated += max(0, made + 1 - begun) if before["lines"] else 0
    assert all(process["status"] == signal.SIGKILL for process in killed)
    assert found["processes"][-1]["lines"], f"the last process did not go on ({seed=}): {done.stderr[-6000:]}"
    last = found["processes"][-1]["lines"][-1]
    assert last == {"step": num_steps, "digest": expected[-1], "ended": True}, done.stderr[-4000:]
    runs = [run for run in list_runs(swap_path) if run.resumable]  # a kill before the first tag leaves an older one
    assert max((run.step or 0, run.state) for run in runs) == (num_steps, "dead")
    return Killed(
        num_kills=len(killed),
        num_in_save=sum(process["in_save"] for process in killed),
        num_steps=num_steps,
        num_repeated=num_repeated,
    )


def kill_ranks(directory: Path, swap_path: Path, case: RankCase, num_kills: int, seed: int) -> Killed:
    """Kill one rank, or all, of a run that commits in place after each step. Raises AssertionError where a step is
    lost, on other bits, and where ranks hold different steps."""
    save_dir = directory / "saved"
    save_dir.mkdir(mode=0o700)
    program = ["-m", run_rank_commits.__name__, swap_path, save_dir, num_kills, seed]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_forked(*program, case.world_size, case.stage, case.state_format, case.num_hosts, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected, starts, world_size = found["expected"], found["starts"], case.world_size
    durable = 0
    for number, start in enumerate(starts):
        begun = {line["step"] for line in start["lines"] if "digest" in line and "ended" not in line}
        assert len(begun) <= 1 and min(begun, default=durable) >= durable, f"{start['lines']}, {durable=}, {seed=}"
        for line in start["lines"]:
            if "digest" in line:
                assert line["digest"] == expected[line["step"]], f"other bits at step {line['step']} ({seed=})"
            durable = max(durable, line.get("durable", 0))
        if number < num_kills:
            assert signal.SIGKILL in start["statuses"], f"{start} ({number=}, {seed=})\n{done.stderr[-4000:]}"
    assert starts[-1]["statuses"] == [0] * world_size, f"{starts[-1]} ({seed=})\n{done.stderr[-4000:]}"
    assert sum("ended" in line for line in starts[-1]["lines"]) == world_size, f"{starts[-1]} ({seed=})"
    runs = [run.path for host in range(case.num_hosts) for run in list_runs(swap_path / f"disk{host}")]
    steps = [manifest.step for path in runs if (manifest := load_manifests(path)[0]) is not None]
    last = [step for step in steps if step == durable]
    assert last == [len(expected) - 1] * world_size, f"other commits at the end: {steps} ({seed=})"
    return Killed(
        num_kills=len(starts) - 1,
        num_in_save=sum(start["in_save"] for start in starts),
        num_steps=len(expected) - 1,
        num_repeated=None,
    )


def kill_command(directory: Path, swap_path: Path, num_kills: int, seed: int) -> Killed:
    """Kill `tiered-zero train ... --save --save-every 1 --resume` with in_place, and compare the last loss. Raises
    AssertionError."""
    config = json.loads((ROOT / "configs/gpt_nvme.json").read_text())
    config["zero_optimization"]["offload_param"]["nvme_path"] = str(swap_path)
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(swap_path)
    config["tiered_zero"]["checkpoint"] = {"in_place": True}
    (directory / "config.json").write_text(json.dumps(config))
    command = ["-m", "tiered_zero", "train", str(directory / "config.json"), "--json"]
    command += ["--model", "gpt:layers=1,hidden=32,context=16"]
    saved = directory / "saved"
    saving = [*command, "--save", str(saved), "--save-every", "1", "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    chance = random.Random(seed)
    num_in_save, durable = 0, 0
    for kill in range(1, num_kills + 1):
        first = 20 * kill - chance.randrange(10)
        process = ForkedProgram(*saving, "--steps", 1_000_000, env=environment)
        while process.poll() is None and latest_step(saved) < first:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        killed = process.end()
        assert killed.returncode == -signal.SIGKILL, f"it ended by itself, or failed: {killed.stderr[-4000:]}"
        assert latest_step(saved) >= durable, "a durable step was lost"
        durable = latest_step(saved)
        num_in_save += is_in_save(saved, swap_path)
    num_steps = durable + 20
    last = run_forked(*saving, "--steps", num_steps, env=environment)
    assert last.returncode == 0, last.stderr[-4000:]
    undisturbed = run_forked(*command, "--steps", num_steps, env=environment)
    assert undisturbed.returncode == 0, undisturbed.stderr[-4000:]
    values, expected = json.loads(last.stdout), json.loads(undisturbed.stdout)
    assert values["resumed_step"] >= durable and values["steps"] == num_steps - values["resumed_step"]
    assert values["last_loss"] == expected["last_loss"], f"{values['last_loss']}, not {expected['last_loss']} ({seed=})"
    return Killed(num_kills=num_kills, num_in_save=num_in_save, num_steps=num_steps, num_repeated=None)


def latest_step(save_dir: Path) -> int:
    """The step that `latest` names; 0: none."""
    try:
        return int((save_dir / "latest").read_text().removeprefix("global_step"))
    except FileNotFoundError:
        return 0


def is_in_save(save_dir: Path, swap_path: Path) -> bool:
    """Whether a process that was killed has left names of a save that was under way."""
    return bool(unfinished(save_dir) or [*swap_path.glob("*/manifest.next")])
