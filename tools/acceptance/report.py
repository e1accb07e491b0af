"""Records of the acceptance, each on the disk as soon as it is known; and what sections need of the device."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]
"""What a section has found. `passed`: None where no check judges it. `left_out`: why it did not run."""

ABSOLUTE_PATH = re.compile(r"(?<![\w./])(?:/[\w.+@-]+)+/")


def left_out(why: str) -> Record:
    return {"passed": None, "left_out": why}


def without_names(value: Any) -> Any:
    """Take folders and the machine's name out of text, at any depth: a record may be given away."""
    if isinstance(value, str):
        host, text = platform.node(), ABSOLUTE_PATH.sub("", value)
        return text.replace(host, "HOST") if len(host) > 2 else text
    if isinstance(value, dict):
        return {name: without_names(each) for name, each in value.items()}
    return [without_names(each) for each in value] if isinstance(value, (list, tuple)) else value


def free_port() -> str:
    """A port of this host that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def write_record(path: Path, section: str, record: Record) -> None:
    """Append a section's record to `path` as a JSON line, and print it."""
    line = {"section": section, **without_names(record), "time": time.strftime("%H:%M:%S")}
    cut = path.exists() and not path.read_bytes().endswith(b"\n")  # by a process that was stopped
    with open(path, "a", encoding="utf-8") as file:
        file.write("\n" * cut + json.dumps(line, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())
    word = "left out" if record.get("left_out") else {True: "ok", False: "FAILED", None: ""}[record["passed"]]
    values = "  ".join(f"{name} {_short(value)}" for name, value in line.items() if name not in HEAD)
    print(f"{word:<9}{section}  {values}"[:300], flush=True)


HEAD = ("section", "passed", "time")


def read_records(path: Path) -> dict[str, Record]:
    """Section -> its last record; a line that was cut off is left out."""
    found = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found[line["section"]] = line
    return found


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"[{_short(value[0])} ... {_short(value[-1])}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a section runs. `directory`: for swap files. `simulated`: the lagging device in CUDA's place, or None.
    `smoke`: everything once, on tiny models. `until_s`: time.monotonic() of the call's end."""

    device: torch.device
    directory: Path
    out: Path
    simulated: Any = None
    smoke: bool = False
    until_s: float = math.inf

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a CUDA device that is not simulated."""
        return self.device.type == "cuda" and self.simulated is None

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def records(self) -> dict[str, Record]:
        return read_records(self.out / "results.jsonl")

    def runtime(self, **settings: Any) -> dict[str, Any]:
        """The config's section `tiered_zero` with what this device needs."""
        limit = {"device_memory_limit": "1GiB"} if self.device.type == "cpu" else {}  # else tiers there are left out
        return {"device": str(self.device), **limit, **settings}

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def reset_peaks(self) -> None:
        if self.device.type != "cpu":
            gc.collect()  # models of earlier sections
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(self.device)

    def memory(self) -> dict[str, int]:
        """Bytes: the most that tensors took, that the allocator could not give out again, and that it held."""
        if self.device.type == "cpu":
            return {}
        stats = torch.accelerator.memory_stats(self.device)
        names = {
            "allocated": "allocated_bytes.all.peak",
            "active": "active_bytes.all.peak",
            "reserved": "reserved_bytes.all.peak",
        }
        return {name: int(stats.get(key, 0)) for name, key in names.items()}

    def limit_memory(self, nbytes: int | None) -> None:
        """Let the process hold `nbytes` of the device's memory at most; None: all of it."""
        if self.simulated is not None:
            self.simulated.set(capacity_nbytes=8 << 30 if nbytes is None else nbytes)
        elif self.device.type == "cuda":
            total = torch.accelerator.get_memory_info(self.device)[1]
            torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / total), self.device)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A check or a measurement. Sections of one `group` that follow each other share a process. `least_s`: it is not
    begun with less time than this. `most_s`: after this it is stopped."""

    name: str
    group: str
    run: Callable[[Site], Record]
    least_s: float = 20.0
    most_s: float = 200.0
