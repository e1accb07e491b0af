"""Parameters on their way: 16-bit flats paged onto the device when a module needs them, and away when it does not.

Promise: whoever computes with a parameter finds its bytes there, whatever the order of use; a wrong guess costs time,
never correctness. Reading a parameter that is away raises an error that names it.
Owner: the pager owns the state of every unit; storage.py alone frees and refills device memory.
Never: gradients, optimizer state, files.

[Note: Three doors]
A unit is needed in one of three ways, and each leads to `Pager.acquire`:
1. A module's forward pre-hook (hooks.py): the unit is lent until that module's forward ends.
2. A function is called with a parameter that is away (storage.py, `OffloadedParameter`): functional use, tied weights,
children
   called past their parent. Lent until the innermost running module ends; outside of forward and backward it raises.
3. Backward unpacks a saved view of a flat (hooks.py, saved-tensor hooks): autograd keeps (unit, geometry), not the
view,
   so the bytes may leave between forward and backward, and come back at whatever address when a node asks for them.
No door depends on the recorded order of use; prefetching does, and it is only a hint.
"""
