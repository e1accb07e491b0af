"""Train a model for a few steps, with plain PyTorch or on three tiers, in a process that `tiered-zero demo` starts.

    python -m tiered_zero.demo.forms '{"directory": null, ...}'

Each line of the output is one JSON object: the seconds that building the model took, a step's loss, an error, or the
peak memory.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tiered_zero
from tiered_zero.demo.corpus import read_corpus
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.plan.gpt_shape import GPTConfig

LEARNING_RATE, SEED = 1e-6, 4
WATCH_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Form:
    """The settings of one training. `directory`: for swap files; None: train with plain PyTorch. `limit_nbytes`: bytes
    by which the process's memory may grow; None: no limit. `device_nbytes`, `host_nbytes`: limits of the engine's
    plan."""

    layers: int
    hidden: int
    context: int
    steps: int
    limit_nbytes: int | None
    device_nbytes: int
    host_nbytes: int
    directory: str | None = None

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(layers=self.layers, hidden=self.hidden, context=self.context)

    @property
    def config(self) -> dict[str, Any]:
        """Return the engine's config, with parameters and state on disk."""
        nvme = {"device": "nvme", "nvme_path": self.directory}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
            "zero_optimization": {"stage": 3, "offload_param": {**nvme, "max_in_cpu": 0}, "offload_optimizer": nvme},
            "tiered_zero": {
                "device": "cpu",
                "device_memory_limit": self.device_nbytes,
                "host_memory_limit": self.host_nbytes,
            },
        }


def run(form: Form) -> None:
    """Train as `form` says, and print the JSON lines. End this process if its memory grows by more than the limit."""
    text = read_corpus()
    memory = _MemoryWatch(form.limit_nbytes)
    began_s = time.perf_counter()
    torch.manual_seed(0)
    if form.directory is None:
        model = build_gpt(form.model, "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        engine = None
    else:
        engine = tiered_zero.initialize(model=build_gpt(form.model), config=form.config)[0]
    _say(built_s=time.perf_counter() - began_s, disk_nbytes=engine.plan.nbytes("nvme") if engine else 0)
    try:
        for step in range(form.steps):
            began_s = time.perf_counter()
            batch = text.batch(step, 1, form.context, SEED)
            loss = engine(*batch) if engine else model(*batch)
            if engine:
                engine.backward(loss)
                engine.step()
            elif step < form.steps - 1:  # the last step needs only the loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            _say(step=step + 1, loss=loss.item(), seconds=time.perf_counter() - began_s)
        _say(peak_nbytes=memory.peak_nbytes)
    finally:
        if engine:
            engine.close()


class _MemoryWatch:
    """Ends this process when its memory grows by more than `limit_nbytes`. A thread checks every WATCH_S seconds."""

    def __init__(self, limit_nbytes: int | None) -> None:
        self._limit_nbytes, self.peak_nbytes = limit_nbytes, 0
        self._start_nbytes = self._anonymous_nbytes()  # RLIMIT_DATA would count the stacks of threads too
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.peak_nbytes = max(self.peak_nbytes, self._anonymous_nbytes() - self._start_nbytes)
            if self._limit_nbytes is not None and self.peak_nbytes > self._limit_nbytes:
                _say(error="out of memory: this process was ended")
                os._exit(1)
            time.sleep(WATCH_S)

    @staticmethod
    def _anonymous_nbytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    try:
        run(Form(**json.loads(sys.argv[1])))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _say(error=f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
