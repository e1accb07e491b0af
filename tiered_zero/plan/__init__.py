"""Plan a run before anything is allocated: what rests on which tier, how large every buffer is, and whether it fits.

Promise: pure arithmetic; the run allocates exactly what the plan says, tier by tier and kind by kind, and the ledger
checks that it does. A run that does not fit is refused, with the table of what it would need.
Owner: the run's specification makes one plan for each run; the engine reports measured peaks next to it.
Never: torch; the machine (limits are arguments); files, except those that describe a machine (machine.py).
"""
