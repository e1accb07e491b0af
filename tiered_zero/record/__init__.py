"""Store named records (regions of bytes) in a few large preallocated files, in swap directories.

Promise.  A read returns the bytes last written, or raises an error that names record, path and offset. Disk space is
    reserved when a run starts: a full disk is an error there, not in mid-run. `SwapStore.commit` is all or nothing
    under kill -9 and power loss: bytes that the last commit uses are not overwritten until the next one is durable.
Owner.  One process owns a `SwapDir` (flock on the file `owner.json` in it). One thread drives a `SwapStore`; any thread
    may wait for transfers; two threads of the store compute checksums and finish requests for which no caller waits.
Never.  No code here imports torch, pickles, writes a file outside the run's own sub-directories, or retries a failed
    write or fsync.

Two kinds of record. *Scratch* (the default): one slot, rewritten in place; its checksums are in memory only.
*Committed* (`reserve(..., committed=True)`): two slots; a write goes to the slot that the last commit does not use for
these bytes. With `write_once=True` a committed record starts with one slot. It gets the second one at the first write
that would change bytes of the last commit; the files grow if they lack room. The manifest is the durable file that
lists the records of a commit.

Checksums. A write is cut at chunk borders (1 MiB from the record's start) into ranges, each with its own xxh3-64 (26
GB/s on one core here; zlib.crc32: 2.2 GB/s). A read verifies each range that it covers whole. It does not verify a
range that it covers in part, nor the rest of a range that was rewritten in part. `SwapStore.nbytes("unverified")`
counts these bytes; it stays 0 if reads have the same borders as writes. A range that was never written cannot be
read."""

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
