"""Move gradients from autograd's hooks to the flats (one tensor per unit) that the update reads.

Promise: a gradient crosses the link between device and host once, in its own dtype. Sums over micro-batches are fp32,
added in the order of arrival, which is plain PyTorch's. The gradient check uses the arithmetic of `clip_grad_norm_`.
Owner: GradientStore owns every gradient between its hook and the end of the step. Until then `param.grad` is a view of
the gradient's home; on NVMe, or with a loss scale, it is a copy.
Never: uses parameters' bytes, optimizer state or disk files."""
