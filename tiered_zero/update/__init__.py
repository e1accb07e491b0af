"""Run the optimizer over sub-groups: when an update runs (policy), how state streams through it (pipeline,
subgroup_io), how state is read and written between updates (state_view), what the user holds (handle).

Promise: every sub-group with a gradient is updated once a step, in the order in which the next forward needs its units,
whatever the tiers and the policy; the numbers depend on the rule alone. Owner: the update worker owns the leases of its
sub-group; the driver owns everything else. Never: a collective or a module on the update worker.
"""
