"""Provide the engine that a user calls, and run the parts of a step in order.

Promise: `TrainStep` alone orders the parts of a step; the movers (parameters, gradients, updates) do not know each
other. If backward or step() fails, the step is dropped; if the update had begun, later calls raise EngineFailedError.
Owner: the driver thread, which calls the engine. Never: does arithmetic on tensors, names a concrete tier or device,
has DeepSpeed's names outside deepspeed_names.py.
"""
