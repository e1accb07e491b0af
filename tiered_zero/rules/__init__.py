"""Compute the optimizer's updates: arithmetic on tensors.

Promise: an update computes the same bits as the plain torch optimizer, wherever the arrays are cut. Only the state
formats that are named lossy compute other values. An UpdateRule updates runs (slices of master weights). A StateLayout
places the arrays of a sub-group in its slot. A MasterFormat stores the master weights there. Owner: the caller owns all
tensors. Never: uses modules, tiers, files or collectives.
"""
