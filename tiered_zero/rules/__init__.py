"""Compute the optimizer's updates: arithmetic on tensors.

Promise: an update gives the bits of the plain torch optimizer, wherever its arrays are cut; only state formats named
lossy change them. An UpdateRule updates runs (slices of master weights). A StateLayout gives each array of a sub-group
its place in the slot, the sub-group's bytes on a tier. A MasterFormat says how master weights are stored there. Owner:
the caller owns all tensors. Never: uses modules, tiers, files or collectives.
"""
