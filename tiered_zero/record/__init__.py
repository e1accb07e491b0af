"""Swap directories and the swap store: named records in few large preallocated files.

Promise.  Bytes read are the bytes last written, or an error that names record, path and offset. Disk space is taken
    at start: a full disk is an error there, never in mid-run. `SwapStore.commit` is all or nothing under kill -9 and
    power loss: an extent that the durable manifest names is not written until the next manifest is durable.

Owner.  One process owns a `SwapDir` (flock on its owner file). One thread drives a `SwapStore`; transfers may be
    waited on anywhere; two small threads of the store compute checksums and finish what nobody waits for.

Never.  No torch, no pickle, no file outside the run's own sub-directories, no retry of a failed write or fsync.

Two kinds of record. *Scratch* (the default): one slot, rewritten in place, its checksums live in memory only.
*Committed* (`reserve(..., committed=True)`): two slots; each page is written to the slot that the durable manifest
does not name, so the last commit stays whole while the next one is being written. `write_once=True` leaves the second
slot out until bytes that a commit holds are changed: then it is taken, and the files grow where there is no room.

What checksums cover. A write is cut at chunk borders (1 MiB from the record's start) into ranges, each with its own
xxh3-64 (26 GB/s a core here, zlib.crc32 2.2). A read verifies every range that lies whole inside it. Not verified:
a range read only in part, and the rest of a range of which a part was rewritten. `SwapStore.nbytes("unverified")`
counts these bytes; read in the borders in which you wrote and it stays 0.
A range that was never written cannot be read at all.
"""

from tiered_zero.record.directory import SwapDir
from tiered_zero.record.manifest import Record
from tiered_zero.record.runs import RunInfo, collect_garbage, list_runs
from tiered_zero.record.store import SwapStore

__all__ = [
    "Record",
    "RunInfo",
    "SwapDir",
    "SwapStore",
    "collect_garbage",
    "list_runs",
]
