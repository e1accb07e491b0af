"""Two ranks, where there are two devices: collectives in opposite orders, and a run beside that of one rank."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.acceptance import correctness
from tools.acceptance.model import Course
from tools.acceptance.report import Record, Section, Site, free_port, left_out

NUM_RANKS, NUM_ROUNDS, LIMIT_S = 2, 50, 120.0
COURSE = Course(placement="cpu/cpu")
OUTCOME = "rank-{}.pt"


def sections() -> list[Section]:
    found = []
    for title in CHECKS:
        name = f"two ranks: {title}"
        found.append(Section(name=name, group=name, run=partial(start_ranks, title=title), most_s=LIMIT_S + 60))
    return found


def start_ranks(site: Site, title: str) -> Record:
    """Run `title` in two processes, each with a device of its own."""
    num_devices = torch.accelerator.device_count() if site.device.type != "cpu" else NUM_RANKS
    if num_devices < NUM_RANKS:
        return left_out(f"needs {NUM_RANKS} devices; found {num_devices}")
    tool = Path(__file__).resolve().parents[1] / "gpu_acceptance.py"
    with tempfile.TemporaryDirectory(dir=site.directory) as folder:
        command = [sys.executable, str(tool), "--section", f"rank {title}", "--out", folder, "--dir", folder]
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
    return {"seconds": time.monotonic() - start_s, **CHECKS[title](site, outcomes)}


def exchange(site: Site) -> dict[str, torch.Tensor]:
    """Gather in one group and reduce in another, at once; the other rank begins with what this one ends with."""
    import torch.distributed as dist

    rank, numel = int(os.environ["RANK"]), 1024 if site.smoke else 1 << 24
    dist.init_process_group(dist.get_default_backend_for_device(site.device))
    groups = [dist.new_group(list(range(NUM_RANKS))) for _ in range(2)]
    part = torch.full((numel,), float(rank + 1), device=site.device)
    whole = torch.zeros(NUM_RANKS * numel, device=site.device)
    for _ in range(NUM_ROUNDS):
        total = torch.full((numel,), float(rank + 1), device=site.device)
        gather = partial(dist.all_gather_into_tensor, whole, part, group=groups[0], async_op=True)
        reduce = partial(dist.all_reduce, total, group=groups[1], async_op=True)
        works: list[Any] = [call() for call in ((gather, reduce) if rank == 0 else (reduce, gather))]
        for work in works:
            work.wait()
    site.synchronize()
    dist.destroy_process_group()
    return {"whole": whole[:: numel // 4].cpu(), "total": total[:4].cpu()}


def check_exchange(site: Site, outcomes: list[dict[str, torch.Tensor]]) -> Record:
    whole, total = torch.tensor([1.0] * 4 + [2.0] * 4), torch.full((4,), 3.0)
    right = [torch.equal(each["whole"], whole) and torch.equal(each["total"], total) for each in outcomes]
    return {"passed": all(right), "rounds": NUM_ROUNDS}


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


CHECKS = {"opposite orders": check_exchange, "training": check_training}
BODIES = {"rank opposite orders": exchange, "rank training": train_rank}


def run_rank(name: str, site: Site) -> None:
    """Run a rank's part in this process, whose device is that of its rank; leave its outcome in `site.out`."""
    torch.save(BODIES[name](site), site.out / OUTCOME.format(os.environ["RANK"]))
