"""Plan a run before anything is allocated: which tier holds what, the size of every buffer, and whether the run fits.

Promise: a plan is pure arithmetic. The run allocates what the plan says. Its ledger (telemetry/spans.py) stops a run
that exceeds a limit. A plan that exceeds a limit is refused, with the table of what it needs. Owner: the run's
specification, or an OffloadedOptimizer, keeps the plan. Never: imports torch, looks at the machine (limits are
arguments), or opens files, except files that describe a machine (machine.py).
"""
