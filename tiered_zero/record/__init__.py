"""Store named records (regions of bytes) in a few large preallocated files, in swap directories.

Promise. A read returns the bytes last written, or raises an error that names record, path and offset. Disk space is
reserved when a run starts, so a full disk is an error there. `SwapStore.commit` is all or nothing under kill -9 and
power loss: bytes of the last commit are not overwritten until the next one is durable.

Owner. One process owns a `SwapDir` (flock on the file `owner.json` in it). One thread drives a `SwapStore`; any thread
may wait for transfers.

Never. No code here imports torch, pickles, writes a file outside the run's own sub-directories, or retries a failed
write or fsync.

A *scratch* record (the default) has one slot, which is rewritten in place; its checksums are in memory only. A
*committed* record has two slots: a write goes to the slot that the last commit does not use for these bytes. With
`write_once` it gets its second slot at the first write that would change bytes of the last commit. The manifest is the
durable file that lists the records of a commit.

A write is cut at multiples of 1 MiB in the record; each piece has an xxh3-64 checksum (26 GB/s on one core here;
zlib.crc32: 2.2 GB/s). A read verifies the pieces that it covers whole; the rest of a piece that was rewritten in part
has no checksum. `SwapStore.nbytes("unverified")` is the number of bytes that were read and not verified."""

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
