"""Gradients on their way: from autograd to the place where the update wants them, once, in 16 bit.

Promise: a gradient crosses the link once; sums over micro-batches are fp32, in the order of arrival, which is the order
in which plain PyTorch adds them; a step's verdict (finite? norm, clip) uses the arithmetic of `clip_grad_norm_`.
Owner: the store owns every gradient between the hook that took it and the end of the step.
Never: parameters' bytes, optimizer state, disk.
"""
