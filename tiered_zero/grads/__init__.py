"""Gradients, from autograd's hooks to the flats from which the update reads them, once, in 16 bit.

Promise: a gradient crosses the link once; sums over micro-batches are fp32, in the order of arrival, which is the order
in which plain PyTorch adds them (DistributedDataParallel too, where each rank keeps whole gradients); the gradient
check (finite? norm, clip) uses the arithmetic of `clip_grad_norm_`.
Owner: the store owns every gradient between its hook and the end of the step. Until then `param.grad` is a view of the
gradient's home, or a copy where that is NVMe: autograd's own attribute could hold neither another device nor a sum in
fp32. Gradients that users may have changed are measured again, whatever tensor versions say, since `.data` has versions
of its own.
Never: parameters' bytes, optimizer state, disk.
"""
