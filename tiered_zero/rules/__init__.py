"""Compute the optimizer's updates: arithmetic on tensors.

Promise: an update gives the bits of the plain torch optimizer, wherever its arrays are cut; only state formats named
lossy change them. An UpdateRule updates runs (slices of master weights). A StateLayout places the arrays of a sub-group
in its slot. A MasterFormat stores the master weights there. Owner: the caller owns all tensors. Never: uses modules,
tiers, files or collectives.
"""
