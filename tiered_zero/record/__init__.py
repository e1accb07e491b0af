"""Store named records (regions of bytes) in a few large preallocated files, in swap directories.

Promise.  A read returns the bytes last written, or raises an error that names record, path and offset. Disk space is
    reserved when a run starts: a full disk is an error there, not in mid-run. `SwapStore.commit` is all or nothing
    under kill -9 and power loss: an extent (a range of the files) that the durable manifest names is not written until
    the next manifest is durable.
Owner.  One process owns a `SwapDir` (flock on the file `owner.json` in it). One thread drives a `SwapStore`; any thread
    may wait for transfers; two threads of the store compute checksums and finish requests for which no caller waits.
Never.  No code here imports torch, pickles, writes a file outside the run's own sub-directories, or retries a failed
    write or fsync.

Two kinds of record. *Scratch* (the default): one slot, rewritten in place; its checksums are in memory only.
*Committed* (`reserve(..., committed=True)`): two slots; each page is written to the slot that the durable manifest does
not name, so the last commit stays whole while the next one is written. `write_once=True` reserves the second slot only
when bytes of a commit change; the files grow if they lack room.

Checksums. A write is cut at chunk borders (1 MiB from the record's start) into ranges, each with its own xxh3-64 (26
GB/s a core here, zlib.crc32 2.2). A read verifies every range that it covers whole. Not verified: a range read in part,
and what a partial rewrite leaves of a range. `SwapStore.nbytes("unverified")` counts these bytes; it stays 0 if reads
have the same borders as writes. A range that was never written cannot be read."""

from tiered_zero.record.directory import RunInfo, SwapDir, collect_garbage, list_runs
from tiered_zero.record.manifest import Record
from tiered_zero.record.store import SwapStore

__all__ = [
    "Record",
    "RunInfo",
    "SwapDir",
    "SwapStore",
    "collect_garbage",
    "list_runs",
]
