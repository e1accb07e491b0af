"""Results of the acceptance, each on the disk as soon as it is known; and what sections need of the device."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class Report:
    """Appends one JSON line for each result to `path`. `passed` None: a number to look at, which no check judges."""

    def __init__(self, path: Path, section: str) -> None:
        self.path, self.section = path, section

    def write(self, what: str, passed: bool | None, **found: Any) -> None:
        line = {"section": self.section, "what": what, "passed": passed, **found, "time": time.strftime("%H:%M:%S")}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        word = {True: "ok    ", False: "FAILED", None: "      "}[passed]
        values = "  ".join(f"{key} {_short(value)}" for key, value in found.items())
        print(f"{word} {self.section}: {what}  {values}"[:400], flush=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The results so far; a line that was cut off is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a section runs. `directory`: for swap files. `simulated`: the lagging device in CUDA's place, or None.
    `smoke`: everything once, on tiny models."""

    device: torch.device
    directory: Path
    out: Path
    simulated: Any
    smoke: bool

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

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

    def limit_memory(self, free_nbytes: int | None) -> None:
        """Let the process allocate so many bytes beyond what it holds; None: all that there are."""
        if self.device.type == "cpu":
            return
        reserved = torch.accelerator.memory_reserved(self.device)
        total = torch.accelerator.get_memory_info(self.device)[1]
        if self.simulated is not None:
            self.simulated.set(capacity_nbytes=8 << 30 if free_nbytes is None else reserved + free_nbytes)
        else:
            torch.cuda.set_per_process_memory_fraction(
                1.0 if free_nbytes is None else min(1.0, (reserved + free_nbytes) / total), self.device
            )
