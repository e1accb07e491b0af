"""Move aligned bytes between files and caller-owned memory, asynchronously. Nothing here imports torch.

Promise: one request of any size is one transfer. The engine splits it, continues short transfers and retries a few
times. Any other failure is raised by the transfer, with path, offset, bytes, errno and free space, and latches the
engine: later requests raise too. A request without progress for `io_timeout_s` raises with a table of what is in
flight.

Owner: the engine owns a request's memory from submission until the transfer is done, and keeps it alive.

Never: a callback on a worker; a worker that touches torch; an order of two requests, except by a sync between them; a
second try of a failed sync.

    engine.py   what the engines share: open files, checks of requests, transfers, the texts of failures
    native.py   the pool of threads in C
    aiofile.py  the same calls through the package aiofiles, where there is no native library
    select.py   checks of a directory, the choice of an engine for it by trial, and the engine's rate there

The native engine's threads make plain system calls. io_uring took about half of their CPU time, but reached only
0.6..0.95 of their rate on busy processors, and is not used. tools/bench/io.py compares the engines with fio."""
