"""Move gradients from autograd's hooks to the flats (one tensor per unit) that the update reads.

Promise: a gradient crosses the link between device and host once, in 16 bits. Sums over micro-batches are fp32, added
in the order of arrival. Plain PyTorch adds them in this order too, and so does DistributedDataParallel if each rank
keeps whole gradients. The gradient check (finiteness, norm, clip factor) uses the arithmetic of `clip_grad_norm_`.

Owner: GradientStore owns every gradient between its hook and the end of the step. Until then `param.grad` is a view of
the gradient's home, or a copy if the home is NVMe: autograd's own attribute can hold neither a gradient on another
device nor an fp32 sum. If users have got a gradient as `param.grad`, its norm is always computed again: a write to
`param.grad.data` changes the gradient without moving its version counter, so the engine cannot know.
Never: uses parameters' bytes, optimizer state or disk files.
"""
