"""Provide the engine that a user calls, and run the parts of a step in order.

Promise: `TrainStep` alone decides what happens in which order; the movers (parameters, gradients, updates) do not know
each other. If a call fails, it drops the step; if the update has begun, it latches the engine. Owner: the driver
thread, the one that calls the engine. Never: does arithmetic on tensors, names a concrete tier or device, has
DeepSpeed's names outside deepspeed_names.py.
"""
