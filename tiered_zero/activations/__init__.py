"""Activations: what autograd saves in forward rests on host memory or NVMe until backward needs it.

Promise: backward gets the bytes that forward saved, or torch's error where they were changed in place since. Bytes move
on a lane of their own; forward waits only where more is on its way than planned, and what finds no room in the budget
stays on the device. So what is resident does not grow with the depth of the model.
Owner: `ActivationMover` the record of each storage that was moved, from the hook that saves it to the end of the step;
`Extents` the budget; a `Place` the bytes there.
Never: views of units (params/saved_views.py names these), what a checkpoint computes again in backward, collectives
(`PartitionedInputs` gathers, around checkpoints that no engine sees).

[Note: Saved storages]
Whole storages move: nodes that save views of one share one record, found by live storage, version and version counter.
What autograd keeps is a `SavedActivation`: the record, and the view's geometry and counter. The hook sees all that is
saved; a floor in bytes is the filter. Parameters, subclasses, torch.func's wrappers, expanded tensors and small views
of large storages stay. So does what a selective checkpoint keeps, which it holds past all hooks. A write to memory past
autograd's counters (`.data`, NumPy) after a tensor was saved is not seen, as with torch.autograd.graph.save_on_cpu.
"""
