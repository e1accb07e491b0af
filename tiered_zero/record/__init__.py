"""Store named records (regions of bytes) in a few large preallocated files, in swap directories.

Promise. A read returns the bytes last written, or raises an error that names record, path and offset. Disk space is
reserved when a run starts, so a full disk is an error at the start. `SwapStore.commit` is all or nothing under kill -9
and power loss: bytes of the last commit are not overwritten until the next one is durable.

Owner. One process owns a `SwapDir`: it holds a flock on `owner.json` in each directory. One thread drives a
`SwapStore`; any thread may wait for transfers.

Never. This code never imports torch, pickles data, writes outside the run's own sub-directories, or retries a failed
write or fsync.

A *scratch* record (the default) has one slot, which is rewritten in place. Checksums of a scratch record are in memory
only. A *committed* record has two slots: a write goes to the slot that the last commit does not use for these bytes.
With `write_once`, the second slot is made at the first write that would change bytes of the last commit. The manifest
is the durable file that lists the records of a commit.

A write is cut into pieces at multiples of 1 MiB in the record. Each piece has an xxh3-64 checksum (26 GB/s on one core;
zlib.crc32: 2.2 GB/s). A read verifies each piece that it covers completely. If a piece is rewritten in part, its other
bytes have no checksum. `SwapStore.nbytes("unverified")` counts the bytes that were read without verification."""

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
