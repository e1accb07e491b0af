"""Sizes before anything is allocated: what rests where, how large every buffer is, and whether it fits.

Promise: pure arithmetic; the run allocates exactly what the plan says, tier by tier and kind by kind, and the ledger
holds it to that. A run that does not fit is refused with the table of what it would need.
Owner: the run's specification makes one plan a run; the engine reports measured peaks next to it.
Never: torch, the machine (limits are arguments), files but those that describe a machine (machine.py).
"""
