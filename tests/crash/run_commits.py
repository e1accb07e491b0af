"""Run as a program: a training run with in-place commits that is killed at random moments, and resumed each time.

    python run_commits.py SWAP_PATH SAVE_DIR NUM_KILLS SEED UPDATE STATE_FORMAT PARAMS

Each process of the run is forked after the imports, goes on from SAVE_DIR if there is a checkpoint, and commits after
each step. Prints one line of JSON: digests of weights and optimizer state by step of a run that was never killed, at
what step each process went on and with which digest, the last step that was known to be durable before, and the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import tiered_zero
from tests.support.configs import SMALL_DEVICE
from tests.support.imports import freeze_imports
from tests.support.models import LENGTH, VOCAB, ParityGPT
from tests.support.tags import unfinished

STEPS_PER_KILL = 4
"""Most that a process takes before it is killed."""


def config(
    swap_path: Path, update: str, state_format: str, checkpoint: dict[str, Any], params: str = "nvme"
) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(swap_path)}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**nvme, "device": params, "max_in_cpu": 0},
            "offload_optimizer": nvme,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 5000,
        },
        "tiered_zero": {
            **SMALL_DEVICE,
            "device": "cpu",
            "update": update,
            "state_format": state_format,
            "activations": {**nvme, "limit": "1MiB", "min_nbytes": 1024},
            "gradients": "nvme",
            "checkpoint": checkpoint,
        },
    }


def digest(engine: tiered_zero.Engine) -> str:
    whole = hashlib.sha256()
    for name, value in engine.module.state_dict().items():
        whole.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    for index, state in engine.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            whole.update(f"{index}{name}".encode() + torch.as_tensor(value).contiguous().numpy().tobytes())
    return whole.hexdigest()


def take_step(engine: tiered_zero.Engine, step: int) -> None:
    tokens = torch.randint(VOCAB, (2, LENGTH))  # the state of the generator is part of the checkpoint
    engine.backward(engine(tokens, tokens, detour=step % 3 == 0))
    engine.step()


def reference(swap_path: Path, num_steps: int, settings: list[str]) -> list[str]:
    torch.manual_seed(0)
    model = ParityGPT()
    with tiered_zero.initialize(model=model, config=config_of(swap_path, {}, settings))[0] as engine:
        found = [digest(engine)]
        for step in range(num_steps):
            take_step(engine, step)
            found.append(digest(engine))
    return found


def config_of(swap_path: Path, checkpoint: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """`settings`: update policy, state format, where parameters rest."""
    update, state_format, params = settings
    return config(swap_path, update, state_format, checkpoint, params)


def run_process(pipe: int, swap_path: Path, save_dir: Path, num_steps: int, settings: list[str], limit: int) -> None:
    """`limit`: after so many steps it waits to be killed."""

    def say(**fields: object) -> None:
        os.write(pipe, (json.dumps(fields) + "\n").encode())

    resumes = (save_dir / "latest").exists()
    checkpoint = {"in_place": True, **({"resume": str(save_dir)} if resumes else {})}
    torch.manual_seed(0 if not resumes else 99)
    engine = tiered_zero.initialize(model=ParityGPT(), config=config_of(swap_path, checkpoint, settings))[0]
    say(step=engine.global_steps, digest=digest(engine))
    durable = engine.global_steps
    for step in range(durable, num_steps):
        while step - durable == limit:
            time.sleep(1)
        take_step(engine, step)
        engine.save_checkpoint(save_dir)  # returns once the one before is durable
        say(durable=step)
    engine.flush()
    say(step=engine.global_steps, digest=digest(engine), ended=True)
    engine.close()


def fork(arguments: tuple[Any, ...]) -> tuple[int, int]:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            run_process(write, *arguments)
            status = 0
        except BaseException:
            traceback.print_exc()  # os._exit prints none
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(write)
    return child, read


def read_until(pipe: int, deadline_s: float, text: bytearray) -> bool:
    """Whether the pipe has ended."""
    while (left := deadline_s - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            data = os.read(pipe, 1 << 16)
            if not data:
                return True
            text += data
    return False


def main() -> None:
    swap_path, save_dir = Path(sys.argv[1]), Path(sys.argv[2])
    num_kills, seed = map(int, sys.argv[3:5])
    settings = sys.argv[5:8]
    num_steps = 3 + STEPS_PER_KILL * num_kills
    random.seed(seed)
    torch.set_num_threads(1)
    freeze_imports()
    child, pipe = os.fork(), None
    if not child:  # the parent runs no torch, so that each child can be forked from it
        (save_dir / "reference.json").write_text(json.dumps(reference(swap_path, num_steps, settings)))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the reference failed"
    expected = json.loads((save_dir / "reference.json").read_text())
    processes: list[dict[str, Any]] = []
    while True:
        limit = STEPS_PER_KILL if len(processes) < num_kills else num_steps
        child, pipe = fork((swap_path, save_dir, num_steps, settings, limit))
        text = bytearray()
        in_start = random.random() < 0.25
        ended = False
        if len(processes) >= num_kills:
            ended = read_until(pipe, time.monotonic() + 300, text)
        else:
            while not in_start and not ended and b"\n" not in text:  # it went on: kill it in one of its next steps
                ended = read_until(pipe, time.monotonic() + 0.01, text)
            ended = ended or read_until(pipe, time.monotonic() + random.uniform(0, 0.5 if in_start else 0.25), text)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        while data := os.read(pipe, 1 << 16):
            text += data
        os.close(pipe)
        lines = [json.loads(line) for line in text.decode().splitlines(keepends=True) if line.endswith("\n")]
        in_save = bool([*unfinished(save_dir), *swap_path.glob("*/manifest.next")])
        processes.append({"lines": lines, "ended": ended, "status": status, "in_save": in_save})
        if ended:
            break
    print(json.dumps({"expected": expected, "processes": processes}))


if __name__ == "__main__":
    main()
