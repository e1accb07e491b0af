"""Compute updates: arithmetic on tensors, without knowledge of tiers or time.

Promise: the bits of the plain torch optimizer, however its state is cut. An UpdateRule updates runs (slices) of
masters; a StateLayout places masters and state in a sub-group's slot; a MasterFormat stores masters there. Owner: the
caller owns all tensors. Never: uses modules, tiers, files or collectives.
"""
