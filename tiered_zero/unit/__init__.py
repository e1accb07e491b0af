"""Page parameters: fetch a unit's flat (its parameters as one tensor) to the device before a module uses it, and evict
it afterwards.

Promise: code that computes with a parameter finds its bytes on the device, in any order of use; a wrong prefetch costs
time, never correctness. Outside of forward and backward, a read of an offloaded parameter raises an error that names
it.
Owner: the Pager owns the state of every unit; unit.py alone frees and refills device memory. "Driver thread" in a
docstring means the program's thread that is inside a call of the engine; there is one at a time (driver.py).
Never: stores gradients or optimizer state, or writes files of the run.

[Note: Entry points]
Forward and backward bring a unit into use in three ways. Each of them calls `Pager._bring`:
1. A module's forward begins (hooks.py). The unit is in use until this forward ends.
2. A function is called with an offloaded parameter (guard.py), as with tied weights or a child that is called directly.
   The unit is in use until the innermost running module ends, or until the unit's memory is needed.
3. Backward unpacks a saved view of a flat (saved_views.py). Autograd keeps (unit, version, geometry) instead of the
   view, so the bytes may leave the device between forward and backward.

No entry point depends on the recorded order of use (`Schedule`). Prefetching and eviction use it as a hint.

[Note: Casts of weights] torch.autocast caches a 16-bit copy of each weight that it casts (2 bytes per parameter), until
the outermost autocast block ends. The plan does not count these copies. While autograd records, the cache must stay on.
All uses of a weight then share one cast, and the autograd node of this cast sums their gradients in 16 bits, as in
plain PyTorch. Without grad mode (evaluation, the forward of a reentrant checkpoint) the cache is off while a module
with paged units runs."""
