"""Compute the layout of parameters: which ones move together, where each lies, and how the optimizer cuts them.

A unit is parameters that move together; its flat is these parameters as one 1-D tensor; a shard is the range of a flat
that one rank owns.

Promise: pure functions of a model's description and a few numbers: they allocate nothing, do no I/O, and return the
same result every time. Owner: the run's specification and the planner call them once; everything above reads the
results. Never: imports torch, touches device memory, files or gradients. A `dtype` is torch's, used for its `itemsize`
only; tensors are only sliced and viewed."""
