"""Define a line of `tiered-zero doctor`."""

from __future__ import annotations

from dataclasses import dataclass

GOOD, POOR, BAD = "ok", "slow", "off"


@dataclass(frozen=True)
class Finding:
    """One line. `state`: "ok", "slow" (works, but not at full speed) or "off". `fix`: what to do; "" for nothing."""

    name: str
    state: str
    found: str
    fix: str = ""
