"""Keep activations, tensors that autograd saves in forward, in host memory or on NVMe until backward needs them.

Promise: backward gets the bytes that forward saved, or torch's error if they were changed in place since. Bytes move on
a lane of their own; forward waits only if more bytes are in flight than planned, and what does not fit into the budget
stays on the device. So the bytes on the device do not grow with the model's depth.

Owner: `ActivationMover` owns the extents of the budget and the record of each moved storage, from the hook that saves
the storage to the end of the step; a `Place` (host memory or NVMe) owns the moved bytes.
Never: moves views of units (unit/saved_views.py saves these by name) or what a checkpoint recomputes in backward, or
calls collectives.

[Note: Saved storages] Whole storages move. Nodes that save views of one storage share one record, which is found by the
live storage, its version and its version counter. Autograd keeps a `SavedActivation`: the record, and the view's
geometry and counter. The hook sees all saved tensors, and moves only storages of a minimum size. Parameters,
subclasses, torch.func's wrappers, expanded tensors and small views of large storages stay on the device. Tensors that a
selective checkpoint keeps stay there, too: they bypass all hooks. Writes to a saved tensor by `.data` or NumPy change
no counter of autograd, and go unnoticed, as with torch.autograd.graph.save_on_cpu."""
