"""Compute the layout of parameters: which ones move together, where each lies, and how the optimizer cuts them.

Promise: pure functions, which allocate nothing and do no I/O. Owner: the run's specification and the planner call them
once. Never: imports torch, touches device memory, files or gradients. This folder reads only the `itemsize` of a torch
dtype, and only slices and views tensors.
"""
