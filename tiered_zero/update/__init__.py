"""Update of sub-groups: the policy, the stepper that streams them through an update rule, the handle.

Promise: every sub-group with a gradient is updated once a step, in the order in which the next forward needs its units,
whatever the tiers and the policy; numbers depend on the rule alone. Owner: the update worker, for the leases of the
sub-group in hand; the driver for everything else. Never: a collective, or a module, on the update worker.
"""
