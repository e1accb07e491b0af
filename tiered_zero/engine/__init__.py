"""Give a user the engine, and order the events of a step.

Promise: `TrainStep` alone decides what happens in which order; the movers (params, grads, update) know no peer. A call
that does not finish drops the step through one path, or latches the engine if the update has begun.
Owner: the driver thread. Never: tensor arithmetic, a concrete tier or device, DeepSpeed's names outside their file.
"""
