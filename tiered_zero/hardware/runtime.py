"""Group the parts of the machine that all movers of bytes use."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.ranks.collectives import Collectives, SingleRank
from tiered_zero.telemetry.spans import Ledger, Recorder


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The device, the ledger (the count of all bytes), the recorder of spans of time, and the other ranks; one per
    run."""

    accelerator: Accelerator
    ledger: Ledger
    recorder: Recorder
    collectives: Collectives = field(default_factory=SingleRank)
