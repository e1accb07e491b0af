"""Each rank's part of a save, on its way to the manifest that rank 0 publishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from tiered_zero.checkpoint.committed import RankPart
from tiered_zero.checkpoint.tag_manifest import Part, RecordName, Source, TensorEntry
from tiered_zero.errors import InternalError, StoreError
from tiered_zero.store.manifest import Contents


@final
@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part. `tensors`: with the parts that it has; `records`: their numbers count. `scalars`: of its
    parameters, as in the manifest. `driver`: the rank's own part of what `DriverState.capture` gives.

    `stores`: of a full save, what it has written. `rank`, `commit_id`: of an in-place commit; the id is rank 0's.
    """

    tensors: Mapping[str, TensorEntry]
    records: Sequence[RecordName]
    scalars: Mapping[str, Any]
    driver: Mapping[str, Any]
    stores: Sequence[Contents] = ()
    rank: RankPart | None = None
    commit_id: str = ""

    @property
    def num_stores(self) -> int:
        return len(self.stores) if self.rank is None else len(self.rank.stores)

    def encode(self) -> dict[str, Any]:
        """As JSON."""
        return {
            **vars(self),
            "tensors": {key: entry.body() for key, entry in self.tensors.items()},
            "stores": [store.body() for store in self.stores],
            "rank": None if self.rank is None else self.rank.model_dump(),
        }

    @classmethod
    def decode(cls, value: Mapping[str, Any]) -> Share:
        """Decode what `encode` gave on another rank."""
        own = {
            "tensors": {key: TensorEntry.from_body(body) for key, body in value["tensors"].items()},
            "records": [RecordName(*item) for item in value["records"]],
            "stores": [Contents.from_body(body) for body in value["stores"]],
            "rank": None if value["rank"] is None else RankPart.model_validate(value["rank"]),
        }
        return cls(**{**value, **own})


def join_shares(shares: Sequence[Share]) -> dict[str, Any]:
    """Those of all ranks as fields of TagManifest: tensors, records, scalars. Raises StoreError if the ranks do not
    agree about a tensor, or do not have each of its elements once."""
    entries: dict[str, TensorEntry] = {}
    parts: dict[str, list[Part]] = {}
    records: list[RecordName] = []
    first_store = 0
    for share in shares:
        first = len(records)
        records += [RecordName(first_store + record.store, record.name) for record in share.records]
        first_store += share.num_stores
        for key, entry in share.tensors.items():
            bare = replace(entry, parts=())
            if entries.setdefault(key, bare) != bare:
                raise StoreError(f"{key} is saved as two different tensors: {entries[key]} and {bare}.")
            parts.setdefault(key, []).extend(_moved(entry.parts, first) if first else entry.parts)
    tensors = {key: replace(entry, parts=_whole(key, entry, parts[key])) for key, entry in entries.items()}
    return {"tensors": tensors, "records": tuple(records), "scalars": _join_scalars(shares)}


def _moved(parts: Sequence[Part], first: int) -> list[Part]:
    """The parts in records that are counted from `first` on."""
    return [part._replace(sources=tuple(Source(first + at.record, at.offset) for at in part.sources)) for part in parts]


def _whole(key: str, entry: TensorEntry, parts: list[Part]) -> tuple[Part, ...]:
    """The parts in order. Raises StoreError unless they cover the tensor once."""
    parts.sort()
    numel = entry.numel
    stop = 0
    for start, end, _ in [*parts, Part(numel, numel, ())]:
        if start != stop:
            raise StoreError(f"{key}: elements {min(stop, start)} to {max(stop, start)} are missing or doubled.")
        stop = end
    return tuple(parts)


def _join_scalars(shares: Sequence[Share]) -> dict[str, Any]:
    """Those of all parameters. Raises InternalError if two ranks have made different steps of one."""
    found: dict[str, Any] = {}
    for rank, share in enumerate(shares):
        for name, own in share.scalars.items():
            if found.setdefault(name, own) != own:
                raise InternalError(
                    f"Every rank was expected to have made the same steps of parameter {name}; rank {rank} has {own}, "
                    f"another {found[name]}. This state cannot be saved; go on from an earlier checkpoint."
                )
    return found
