"""Compute the layout of flats and shards: which parameters move together, where each lies, how the optimizer cuts them.

Promise: pure functions of a model's description and a few numbers; no allocation, no I/O, the same result every time.
Owner: the run's specification and the planner call it once; everything above reads the results. Never: torch, device
memory, files, gradients. A `dtype` is torch's, used for its `itemsize` only; tensors are only sliced and viewed.
"""
