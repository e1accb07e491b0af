"""Moves aligned bytes between files and caller-owned memory, asynchronously; knows no torch.

Promise: one request of any size is one transfer. Splitting, continuing short ones and bounded retries happen inside;
whatever else goes wrong is raised by the transfer, with path, offset, bytes wanted and got, errno and free space, and
latches the engine. A request without progress for `io_timeout_s` is raised with the table of what is in flight.
Owner: the engine owns a request's memory from submission until the transfer is done, and holds a reference to it; a
file's descriptor is closed only when nothing is on its way through it.
Never: no callback runs on a worker, no worker touches torch, two requests are ordered only by a sync between them
(which waits for the writes before it), and a failed sync is not tried again.

    engine.py     the interface, IOSettings; what is in flight, as text and by signal
    disk.py       what the engines share: open files, admission, transfers, the watchdog, closing, the text of failures
    native.py     the pool of threads in C
    pieces.py     what the two Python engines share: pieces of a request, short transfers, syncs after writes
    threads.py    preadv and pwritev on Python threads;  aiofile.py: the same calls through aiofiles
    select.py     the choice, by trying
    preflight.py  what is wrong with a directory
    measure.py    the rate of an engine on a disk

The native engine's pool is threads in system calls: with 2 MiB x 8 in huge pages they take 7..9 ms of CPU time a GB.
io_uring took 4..5 ms, for 0.88..1.04 of their rate on an idle machine and 0.6..0.95 where the processors are busy, and
is not used. tools/bench/io.py holds the engines against fio.
"""
