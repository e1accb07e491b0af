"""Define what threads share: one future type, a worker, a failure latch, ordered teardown, deferred Ctrl-C.

Promise: a transfer completes once and carries its own error. The first failure that surfaces raises the original error,
and later calls raise EngineFailedError. A teardown calls each closing function once. Ctrl-C during work that cannot
be undone is raised after that work.
Owner: the object that makes one of these closes it.
Never: imports torch, opens files, or waits without saying what for."""
