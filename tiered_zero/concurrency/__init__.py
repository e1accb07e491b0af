"""Primitives that threads share: one future type, a worker, a failure latch, the order of teardown, Ctrl-C.

Promise: a transfer completes once and carries its own error; the first failure that surfaces raises the original error,
later calls raise EngineFailedError; a teardown carries out each act once; Ctrl-C waits behind what cannot be undone.
Owner: each object belongs to who made it. Never: torch, files, a wait without a name.
"""
