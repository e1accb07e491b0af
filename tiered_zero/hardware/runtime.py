"""The three things that every mover of bytes works with."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_zero.hardware.accelerator import Accelerator
from tiered_zero.telemetry.ledger import Ledger
from tiered_zero.telemetry.spans import Recorder


@dataclass(frozen=True)
class Runtime:
    """One a run: the device, the account of bytes, the record of time."""

    accelerator: Accelerator
    ledger: Ledger
    recorder: Recorder
