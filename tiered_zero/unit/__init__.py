"""Page parameters: fetch a unit's flat (its parameters as one tensor) to the device before a module uses it, and evict
it afterwards.

Promise: code that computes with a parameter finds its bytes on the device, in any order of use; a wrong prefetch costs
time, never correctness. Reading an offloaded parameter raises an error that names the parameter.
Owner: the Pager owns the state of every unit; unit.py alone frees and refills device memory. "Driver thread" in a
docstring means the program's thread that is inside a call of the engine; there is one at a time (driver.py).
Never: handles gradients, optimizer state or files of the run.

[Note: Entry points]
A unit comes into use in one of three ways, and each of them calls `Pager._bring`:
1. A module's forward pre-hook runs (hooks.py). The unit is in use until that module's forward ends.
2. A function is called with an offloaded parameter (guard.py): functional use, tied weights, or a child that is called
   directly and not through its parent. The unit is in use until the innermost running module ends. Outside of forward
   and backward the call raises.
3. Backward unpacks a saved view of a flat (saved_views.py). Autograd keeps (unit, version, geometry) in place of the
   view. So the bytes may leave the device between forward and backward, and come back at another address.

No entry point depends on the recorded order of use. Only prefetching does (`Schedule`), and that order is only a hint.

[Note: Casts of weights]
torch.autocast keeps a 16-bit copy of every weight that it casts until its outermost block ends: 2 bytes a parameter,
which no plan counts. All uses of a weight share the autograd node of this one cast, which sums their gradients in 16
bits. Without the copy a second use would add a second cast and node, and autograd would sum the two gradients in fp32.
So the cache of copies stays on while autograd records, also in a non-reentrant checkpoint. Uses without grad mode
(evaluation, the forward of a reentrant checkpoint) have no gradient: there the cache is off while a module with
offloaded units runs."""
