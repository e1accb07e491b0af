"""Move gradients from autograd's hooks to the flats (one tensor per unit) that the update reads.

Promise: on one rank, a gradient without hooks of the user is copied from device to host once, in its own dtype. Sums
over micro-batches are fp32. They are added in the order of arrival, as in plain PyTorch. The gradient check uses the
arithmetic of `clip_grad_norm_`. Owner: GradientStore owns every gradient from its hook until the end of the step.
Between backward and step(), `param.grad` is a view of the gradient's home; on NVMe, or with a loss scale, it is a copy.
Never: uses parameters' bytes, optimizer state or disk files."""
