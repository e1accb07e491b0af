"""Run optimizer steps on sub-groups. policy.py decides when an update runs; pipeline.py and subgroup_io.py run it;
state_view.py reads and writes state between updates; handle.py has the optimizer that the user holds.

Promise: each step updates every sub-group with a gradient once. Equal gradients and state give equal results on every
tier and with every policy (with `delayed`, one step later). Owner: the thread that updates a sub-group owns its staging
buffers; the driver thread owns everything else. Never: calls a collective or a module on the update lane."""
