"""Plan a run before anything is allocated: what rests on which tier, how large every buffer is, and whether the run
fits.

Promise: a plan is pure arithmetic. The run allocates exactly what the plan says, and its ledger (telemetry/spans.py)
checks this. A run that does not fit is refused, with the table of what it needs. Owner: the run's specification makes
one plan for each run. Never: imports torch, looks at the machine (limits are arguments), or opens files, except those
that describe a machine (machine.py).
"""
