"""Carry gradients from autograd's hooks to the flats that the update reads: once, in 16 bits.

Promise: a gradient crosses the link once. Sums over micro-batches are fp32, in the order of arrival, in which plain
PyTorch (and DistributedDataParallel, if each rank keeps whole gradients) adds them too. The gradient check (finite?
norm, clip) uses the arithmetic of `clip_grad_norm_`.

Owner: the store owns every gradient between its hook and the end of the step. Until then `param.grad` is a view of the
gradient's home, or a copy if that is NVMe: autograd's own attribute can hold neither another device nor an fp32 sum.
Gradients that users may have changed are measured again whatever their tensor versions, because `.data` has versions of
its own. Never: parameters' bytes, optimizer state, disk.
"""
