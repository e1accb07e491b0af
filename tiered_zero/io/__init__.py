"""Move aligned bytes between files and caller-owned memory, asynchronously. Nothing here imports torch.

Promise: one request of any size is one transfer. Splitting, continuing short transfers and bounded retries happen
inside; any other failure is raised by the transfer, with path, offset, bytes wanted and got, errno and free space, and
latches the engine: later requests raise too. A request without progress for `io_timeout_s` raises with a table of what
is in flight.

Owner: the engine owns a request's memory from submission until the transfer is done, and holds a reference to it; a
file's descriptor is closed only when none of its requests is in flight.

Never: a callback on a worker; a worker that touches torch; an order of two requests, except by a sync between them
(which waits for the writes before it); a second try of a failed sync.

    engine.py   what the engines share: open files, checks of requests, transfers, the watchdog, closing, the text of
                failures, and a table of the requests in flight
    native.py   the pool of threads in C
    aiofile.py  the same calls through the package aiofiles, where there is no native library
    select.py   checks of a directory, the choice of an engine for it by trial, and the engine's rate there

The native engine's threads make plain system calls: with 2 MiB x 8 in huge pages they take 7..9 ms of CPU time a GB.
io_uring took 4..5 ms, but reached 0.88..1.04 of their rate on an idle machine and 0.6..0.95 with busy processors, and
is not used. tools/bench/io.py compares the engines with fio."""
