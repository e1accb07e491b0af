"""Compute updates: arithmetic on tensors, without knowledge of tiers or time.

Promise: the bits of the plain torch optimizer, however its state is cut. An UpdateRule advances runs of masters; a
StateLayout places masters and state in a sub-group's slot; a MasterFormat stores masters there. Owner: nothing; the
caller owns the tensors. Never: modules, tiers, files, collectives.
"""
