"""What threads of a run share: one future type, the memory of a failure, the order of an ending, deferred interrupts.

Promise: a transfer completes once and carries its own error; the first failure that surfaces raises the original error,
later calls raise EngineFailedError; a teardown carries out each act once; Ctrl-C is raised at a safe point alone.
Owner: each object belongs to who made it. Never: torch, files, a wait without a name.
"""
