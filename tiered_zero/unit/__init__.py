"""16-bit parameters: flats that are fetched to the device before a module uses them, and evicted after it.

Promise: code that computes with a parameter finds its bytes on the device, whatever the order of use; a wrong prefetch
costs time, never correctness. Reading an offloaded parameter raises an error that names it.
Owner: the pager owns the state of every unit (unit.py, which alone frees and refills device memory).
Never: gradients, optimizer state, files.

[Note: Entry points]
A unit is needed in one of three ways, and each leads to `Pager.acquire` or what it calls:
1. A module's forward pre-hook (hooks.py): the unit is in use until that module's forward ends.
2. A function is called with an offloaded parameter (guard.py): functional use, tied weights, children
   called past their parent. In use until the innermost running module ends; outside of forward and backward it raises.
3. Backward unpacks a saved view of a flat (saved_views.py): autograd keeps (unit, version, geometry), not the view, so
   the bytes may leave between forward and backward, and be fetched to another address when a node asks for them.
No entry point depends on the recorded order of use; prefetching does (`Schedule`), and it is only a hint.

[Note: Casts of weights]
torch.autocast caches a 16-bit copy of every weight that it casts until its outermost block ends: 2 bytes a parameter,
in no plan. All uses of a weight share the node of that cast, which sums their gradients in 16 bits; a second cast would
add a second node, and the sum of the two in fp32. So the cache stays as it is, also in a non-reentrant checkpoint, of
which autograd saves nothing. Uses without grad mode (evaluation, the forward of a reentrant checkpoint) have no
gradient: there the cache is off while a module with offloaded units runs.
"""
