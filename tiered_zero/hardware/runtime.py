"""The runtime: the parts of the machine that every mover of bytes works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.ranks.collectives import Collectives, SingleRank
from tiered_zero.telemetry.ledger import Ledger
from tiered_zero.telemetry.spans import Recorder


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One a run: the device, the account of bytes, the record of time, and the other ranks."""

    accelerator: Accelerator
    ledger: Ledger
    recorder: Recorder
    collectives: Collectives = field(default_factory=SingleRank)
