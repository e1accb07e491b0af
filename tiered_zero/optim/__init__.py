"""How weights are advanced: update rules, the stepper that streams sub-groups through them, and when it runs.

Promise: the bits of the plain torch optimizer, wherever master weights and state rest and however they are cut.
A sub-group's slot is cut by its StateLayout; a MasterFormat says how masters rest in it, the rule how moments do.
Owner: the stepper owns a sub-group from the read of its state to the write of its parameters.
Never: modules, collectives, gradients before they are complete.
"""
