"""The facts of a run that its checkpoints name, and what differs from those of the run that loads one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tiered_zero.config.schema import Config
from tiered_zero.optim.rule import UpdateRule
from tiered_zero.version import __version__

_FACTS = {
    "tiered_zero": "tiered_zero",
    "torch": "torch",
    "kernel": "the update kernel's level",
    "rule": "the update rule",
    "world_size": "a number of ranks of",
}


def written_by(rule: UpdateRule, config: Config, world_size: int) -> dict[str, Any]:
    """List what WrittenBy says of a run, but for the time."""
    return {
        "tiered_zero": __version__,
        "torch": str(torch.__version__),
        "kernel": rule.kernel.level if rule.kernel is not None else "torch",
        "rule": rule.name,
        "state_format": config.tiered_zero.state_format,
        "world_size": world_size,
    }


def differences(written_by: Mapping[str, Any], now: Mapping[str, Any]) -> Sequence[str]:
    """Compare the facts of the run that wrote a checkpoint with those of this run. Returns a line for each difference
    from which bits may differ; `state_format` is the loader's matter."""
    lines = []
    for name, what in _FACTS.items():
        then, here = written_by.get(name), now.get(name)
        if then != here:
            lines.append(f"the checkpoint was written with {what} {then}; this run has {here}: later steps may differ")
    return lines
