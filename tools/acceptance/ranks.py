"""Two ranks, where there are two devices: a run beside that of one rank."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tools.acceptance import correctness
from tools.acceptance.model import Course
from tools.acceptance.report import Record, Section, Site, free_port, left_out

NUM_RANKS, LIMIT_S = 2, 120.0
COURSE = Course(placement="cpu/cpu")
OUTCOME = "rank-{}.pt"
BODY = "rank training"
"""What the tool runs in a rank's process."""


def sections() -> list[Section]:
    name = "two ranks: training"
    return [Section(name=name, group=name, run=start_ranks, most_s=LIMIT_S + 60)]


def start_ranks(site: Site) -> Record:
    """Train in two processes, each with a device of its own."""
    num_devices = torch.accelerator.device_count() if site.device.type != "cpu" else NUM_RANKS
    if num_devices < NUM_RANKS:
        return left_out(f"needs {NUM_RANKS} devices; found {num_devices}")
    tool = Path(__file__).resolve().parents[1] / "gpu_acceptance.py"
    with tempfile.TemporaryDirectory(dir=site.directory) as folder:
        command = [sys.executable, str(tool), "--section", BODY, "--out", folder, "--dir", folder]
        command += ["--smoke"] * site.smoke
        launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        ranks, start_s = [], time.monotonic()
        for rank in map(str, range(NUM_RANKS)):
            env = {**os.environ, **launched, "RANK": rank, "LOCAL_RANK": rank}
            with open(Path(folder) / f"log-{rank}", "w") as log:
                ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        codes: list[int | None] = []
        for process in ranks:
            try:
                codes.append(process.wait(max(1.0, LIMIT_S - (time.monotonic() - start_s))))
            except subprocess.TimeoutExpired:
                codes.append(None)
        for process in ranks:
            process.kill()
        logs = [(Path(folder) / f"log-{rank}").read_text()[-500:] for rank in range(NUM_RANKS)]
        if codes != [0, 0]:
            return {"passed": False, "codes": codes, "ended": None not in codes, "logs": logs}
        outcomes = [torch.load(Path(folder) / OUTCOME.format(rank), weights_only=True) for rank in range(NUM_RANKS)]
    return {"seconds": time.monotonic() - start_s, **check_training(site, outcomes)}


def train_rank(site: Site) -> dict[str, torch.Tensor]:
    with (
        correctness.deterministic(),
        tempfile.TemporaryDirectory(dir=site.directory) as folder,
        correctness.start(site, COURSE, Path(folder)) as engine,
    ):
        rank = int(os.environ["RANK"])
        for number in range(correctness.NUM_STEPS):
            engine.backward(engine(correctness.batch_of(site, NUM_RANKS * number + rank)))
            engine.step()
        return correctness.weights_of(engine)


def check_training(site: Site, outcomes: list[dict[str, Any]]) -> Record:
    """Both ranks have the same bits, and within 1e-6 the weights of one that adds up both ranks' batches."""
    with correctness.deterministic():
        alone = correctness.train(site, replace(COURSE, accumulation=NUM_RANKS))
    differ = correctness.different(outcomes[1], outcomes[0])
    close = all(torch.allclose(outcomes[0][name], value, rtol=1e-5, atol=1e-6) for name, value in alone.items())
    other = correctness.different(outcomes[0], alone)
    return {"passed": not differ and close, "differ_between_ranks": differ, "other_than_one_rank": other}


def run_rank(site: Site) -> None:
    """Run a rank's part in this process, whose device is that of its rank; leave its outcome in `site.out`."""
    torch.save(train_rank(site), site.out / OUTCOME.format(os.environ["RANK"]))
