"""Arithmetic of flats and shards: which parameters move together, where each lies, how the optimizer cuts them.

Promise: pure functions of a model's description and a few numbers; no allocation, no I/O, the same answer every time.
Owner: the run's specification and the planner call it once; everything above reads the results.
Never: torch, device memory, files, gradients. A `dtype` is any value with an `itemsize`: torch's own in a run, `DType`
where a plan is made without torch, so that no dtype is converted on the way. Tensors are only sliced and viewed.
"""
