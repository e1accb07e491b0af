"""Define what threads share: one future type, a worker, a failure latch, ordered teardown, deferred Ctrl-C.

Promise: a transfer completes once and carries its own error; the first failure that surfaces raises the original error,
later calls raise EngineFailedError; a teardown runs each act once; Ctrl-C is raised after work that cannot be undone.
Owner: each object belongs to its maker. Never: torch, files, a wait without a name.
"""
