"""Compute the optimizer's updates: arithmetic on tensors.

Promise: wherever the arrays are cut, an update computes the same bits. With fp32 gradients these are the bits of the
plain torch optimizer, except in the state formats that are named lossy. An UpdateRule updates slices of master
weights. A StateLayout places the arrays of a sub-group in its slot. A MasterFormat stores the master weights there.
Owner: the caller owns masters, gradients and state. Never: moves bytes between tiers, writes files, or calls
collectives.
"""
