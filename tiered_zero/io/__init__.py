"""Move aligned bytes between files and caller-owned memory, asynchronously. Nothing here imports torch.

Promise: one request of any size is one transfer. The engine splits a request into system calls, continues short ones,
and retries a few times. The transfer raises any other failure, with path, offset, bytes, errno and free space. The
failure latches the engine: later requests raise it too. A request without progress for `io_timeout_s` raises, with a
table of the requests in flight.

Owner: from submission until the transfer is done, the engine owns the request's memory and keeps it alive.

Never: an engine never runs callbacks or torch code on a worker, never retries a failed sync, and keeps no order of
requests.

    engine.py   the base class of the engines: open files, checks of requests, transfers, error texts
    native.py   the pool of threads in C
    aiofile.py  the same calls through the package aiofiles, where there is no native library
    select.py   check a directory, choose an engine for it by trial, measure the engine's rate there

The native engine's threads make plain system calls. io_uring is not used: it took about half of the CPU time, but on
busy processors it reached only 0.6 to 0.95 of the rate. tools/bench/io.py compares the engines with fio."""
