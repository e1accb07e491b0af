"""Define what threads share: a future type, a worker thread, a failure latch, an ordered teardown, deferred Ctrl-C.

Promise: a transfer completes once and carries its own error. Ctrl-C during work that cannot be undone is raised after
that work.
Owner: the object that makes one of these closes it.
Never: imports torch or opens files."""
