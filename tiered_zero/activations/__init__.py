"""Keep activations, tensors that autograd saves in forward, in host memory or on NVMe until backward needs them.

Promise: backward gets the bytes that forward saved, or torch's error if they were changed in place since. Forward waits
only if more bytes are in flight than planned. Storages that do not fit into the budget stay on the device.
Owner: `ActivationMover` owns the budget's extents and the record of each moved storage. A `Place` (host memory or NVMe)
owns the moved bytes.
Never: moves views of units (unit/saved_views.py saves them by name), moves what a checkpoint recomputes in backward, or
calls collectives.

[Note: Saved storages] Whole storages move. Saved views of one storage share one record if the storage is still alive,
and if the views share one version counter whose value is unchanged. Autograd keeps a `SavedActivation` for each view.
These stay on the device: storages below a minimum size, small views of large storages, parameters, subclasses,
torch.func's wrappers, expanded tensors, and tensors that a selective checkpoint keeps (no hook sees the latter). A
write to a saved tensor through `.data` or NumPy goes unnoticed, because it changes no counter. The same holds for
torch.autograd.graph.save_on_cpu."""
