"""The object that a user drives, and the order of events in a step.

Promise: `TrainStep` alone decides what happens in which order; the movers (params, grads, update) know no peer. A call
that does not finish drops the step through one path, or latches the engine where the update has begun.
Owner: the driver thread. Never: tensor arithmetic, a concrete tier or device, DeepSpeed's names outside their file.
"""
