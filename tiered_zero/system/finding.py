"""Define a line of `tiered-zero doctor`."""

from __future__ import annotations

from dataclasses import dataclass

GOOD, POOR, BAD = "ok", "slow", "off"


@dataclass(frozen=True)
class Finding:
    """One line of `tiered-zero doctor`. `name`: what was looked at. `state`: "ok", "slow" (works, but not at full
    speed) or "off". `found`: what was found. `fix`: what the user can do; "" for nothing."""

    name: str
    state: str
    found: str
    fix: str = ""
