"""Keep what autograd saves in forward on host memory or NVMe until backward needs it.

Promise: backward gets the bytes that forward saved, or torch's error if they were changed in place since. Bytes move on
their own lane; forward waits only if more is in flight than planned, and what does not fit into the budget stays on the
device. So resident bytes do not grow with the model's depth.

Owner: `ActivationMover` owns the budget's extents and the record of each moved storage, from the hook that saves it to
the end of the step; a `Place` owns the bytes there. Never: views of units (unit/saved_views.py saves these by name),
what a checkpoint recomputes in backward, collectives.

[Note: Saved storages] Whole storages move. Nodes that save views of one storage share one record, found by live
storage, version and version counter. Autograd keeps a `SavedActivation`: the record, and the view's geometry and
counter. The hook sees all saved tensors; a floor in bytes filters them. Parameters, subclasses, torch.func's wrappers,
expanded tensors and small views of large storages stay, and so does what a selective checkpoint keeps, which bypasses
all hooks. A write that autograd's counters miss (`.data`, NumPy), after a tensor was saved, goes unnoticed, as with
torch.autograd.graph.save_on_cpu.
"""
