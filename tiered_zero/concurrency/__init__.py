"""Primitives that threads share: one future type, a worker, a failure latch, the order of teardown, late interrupts.

Promise: a transfer completes once and carries its own error; the first failure that surfaces raises the original error,
later calls raise EngineFailedError; a teardown carries out each act once; Ctrl-C is raised at a safe point alone.
Owner: each object belongs to who made it. Never: torch, files, a wait without a name.
"""
