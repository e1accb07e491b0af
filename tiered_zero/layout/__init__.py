"""Arithmetic of flats: which parameters move together, where each lies, how the optimizer cuts them.

Promise: pure functions of a module tree and a few numbers; no allocation, no I/O, the same answer every time.
Owner: the planner and the assembly call it once; everybody reads the results.
Never: device memory, files, gradients.
"""
