"""Appends one JSON line for one benchmark run: where, with what, every sample, and the bound it is held against."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Samples = Sequence[float] | Mapping[str, Sequence[float]]
"""One series of measurements, or several by name; the record keeps them all and each series' median."""

PACKAGES = ("torch", "numpy", "transformers", "aiofiles", "tiered-zero")


def append_record(
    path: str | Path,
    name: str,
    arguments: Mapping[str, Any],
    samples: Samples,
    bound: Mapping[str, Any] | float | None,
    **extra: Any,
) -> dict[str, Any]:
    """Append a record of benchmark `name` to the JSON-lines file `path` and return it.

    `bound`: what the hardware allows, measured in the same run; a number in the samples' unit, or several by name.
    `extra`: whatever else the benchmark found (units, ratios, a device's name); must be JSON.
    """
    record = {
        "name": name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "machine": machine_facts(),
        "versions": package_versions(),
        "arguments": dict(arguments),
        "samples": _by_series(samples, list),
        "median": _by_series(samples, statistics.median),
        "bound": bound,
        **extra,
    }
    line = json.dumps(record, sort_keys=False, default=str)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as out:
        out.write(line + "\n")
    return record


def commit() -> str:
    """The short commit of this tree, with "+changes" where it differs from it; "unknown" outside a checkout."""
    try:
        revision = _git("rev-parse", "--short=12", "HEAD")
        return revision + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine_facts() -> dict[str, Any]:
    """What of this machine bears on a timing; neither its name nor its owner."""
    return {
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _first_value("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def package_versions() -> dict[str, str]:
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _by_series(samples: Samples, reduce: Any) -> Any:
    if isinstance(samples, Mapping):
        return {series: reduce(values) for series, values in samples.items()}
    return reduce(samples)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _first_value(path: str, key: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)
    except OSError:
        return None
