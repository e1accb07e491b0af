"""Page parameters: fetch a unit's flat to the device before a module uses it, and evict it after that.

Promise: code that computes with a parameter finds its bytes on the device, whatever the order of use; a wrong prefetch
costs time, never correctness. Reading an offloaded parameter raises an error that names the parameter.
Owner: the Pager owns the state of every unit; unit.py alone frees and refills device memory. "Driver thread" in a
docstring means the program's thread that is inside a call of the engine; one thread at a time is (driver.py).
Never: handles gradients, optimizer state or files of the run.

[Note: Entry points]
A unit comes into use in one of three ways, and each of them calls `Pager._bring`:
1. A module's forward pre-hook runs (hooks.py). The unit is in use until that module's forward ends.
2. A function is called with an offloaded parameter (guard.py), as with functional use, tied weights, and children that
   are called past their parent. The unit is in use until the innermost running module ends. Outside of forward and
   backward the call raises.
3. Backward unpacks a saved view of a flat (saved_views.py). Autograd keeps (unit, version, geometry) in place of the
   view, so the bytes may leave the device between forward and backward, and come back at another address.
No entry point depends on the recorded order of use. Prefetching does (`Schedule`), and that order is only a hint.

[Note: Casts of weights]
torch.autocast keeps a 16-bit copy of every weight that it casts until its outermost block ends: 2 bytes a parameter,
which no plan counts. All uses of a weight share the autograd node of that one cast, which sums their gradients in 16
bits; a second cast would add a second node, and autograd would sum the gradients of the two in fp32. So the cache stays
on, also in a non-reentrant checkpoint, of which autograd saves nothing. Uses without grad mode (evaluation, the forward
of a reentrant checkpoint) have no gradient: there the cache is off while a module with offloaded units runs."""
