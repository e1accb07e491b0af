"""Move aligned bytes between files and caller-owned memory, asynchronously. Nothing here imports torch.

Promise: one request of any size is one transfer. The engine splits a request into system calls, continues short ones,
and retries a few times. Any other failure is raised by the transfer, with path, offset, bytes, errno and
free space. It latches the engine: later requests raise it too. A request without progress for `io_timeout_s` raises,
with a table of the requests in flight.

Owner: the engine owns a request's memory from submission until the transfer is done, and keeps it alive.

Never: runs callbacks or torch code on a worker; orders two requests, except by a sync; retries a failed sync.

    engine.py   the base class of the engines: open files, checks of requests, transfers, error texts
    native.py   the pool of threads in C
    aiofile.py  the same calls through the package aiofiles, where there is no native library
    select.py   check a directory, choose an engine for it by trial, measure the engine's rate there

The native engine's threads make plain system calls. io_uring took about half of their CPU time, but reached only
0.6..0.95 of their rate on busy processors, and is not used. tools/bench/io.py compares the engines with fio."""
