"""Update rules: arithmetic on tensors, which knows no tiers and no time.

Promise: the bits of the plain torch optimizer, however its state is cut. An UpdateRule advances runs of masters; a
StateLayout says where masters and state lie in a sub-group's slot, a MasterFormat how masters rest there.
Owner: nothing; the caller owns the tensors. Never: modules, tiers, files, collectives.
"""
