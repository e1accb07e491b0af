"""Gradients on their way: from autograd to the place where the update wants them, once, in 16 bit.

Promise: a gradient crosses the link once; sums over micro-batches are fp32, in the order of arrival, which is the order
in which plain PyTorch adds them; a step's verdict (finite? norm, clip) uses the arithmetic of `clip_grad_norm_`.
Owner: the store owns every gradient between the hook that took it and the end of the step. Meanwhile `param.grad` is a
view of the gradient's home: autograd's own attribute could hold neither another device nor a sum in fp32, and a copy
would cost memory and a pass in every run for what few loops do. What users may have changed is measured again, whatever
tensor versions say, since `.data` has versions of its own.
Never: parameters' bytes, optimizer state, disk.
"""
