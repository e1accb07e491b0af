"""What each rank of a run writes of one tag, or commits in place, on its way to the manifest that rank 0 publishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from tiered_zero.checkpoint.file_writer import WrittenFiles
from tiered_zero.checkpoint.places import Places
from tiered_zero.checkpoint.tag_manifest import DataFile, Part, TensorEntry
from tiered_zero.errors import InternalError


@final
@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part. `scalars`: of the parameters that it has parts of, as in the manifest. `driver`: what every rank
    has its own of, as `DriverState.capture` gives it."""

    written: WrittenFiles
    scalars: Mapping[str, Any]
    driver: Mapping[str, Any]

    def encode(self) -> list[Any]:
        """As JSON."""
        files = [[file.name, file.nbytes, file.digests] for file in self.written.files]
        return [files, _encode(self.written.tensors), self.scalars, self.driver]

    @classmethod
    def decode(cls, value: Sequence[Any]) -> Share:
        """What `encode` gave on another rank."""
        given, tensors, scalars, driver = value
        files = tuple(DataFile(name=name, nbytes=nbytes, digests=tuple(digests)) for name, nbytes, digests in given)
        return cls(written=WrittenFiles(files=files, tensors=_decode(tensors)), scalars=scalars, driver=driver)


@final
@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What a commit says of one rank. `stores`: run id and paths of each, that of the state first. `layout`: of
    commit_layout; `initialized`: its sub-groups that have state."""

    stores: list[dict[str, Any]]
    layout: str
    initialized: list[int]


@final
@dataclass(frozen=True, kw_only=True)
class CommitShare:
    """One rank's part of an in-place commit. `tensors`: without parts, which `places` has; `scalars`, `driver`: as of
    Share. `commit_id`: of the whole, on rank 0."""

    tensors: Mapping[str, TensorEntry]
    places: Places
    scalars: Mapping[str, Any]
    driver: Mapping[str, Any]
    commit_id: str
    rank: RankPart

    def encode(self) -> dict[str, Any]:
        """As JSON."""
        places = self.places.body()
        return {**vars(self), "tensors": _encode(self.tensors), "places": places, "rank": vars(self.rank)}

    @classmethod
    def decode(cls, value: Mapping[str, Any]) -> CommitShare:
        """What `encode` gave on another rank."""
        places = Places.from_body(value["places"], covers=False)
        own = {"tensors": _decode(value["tensors"]), "places": places, "rank": RankPart(**value["rank"])}
        return cls(**{**value, **own})


def _encode(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    return {key: [entry.dtype, entry.shape, entry.order, entry.parts] for key, entry in tensors.items()}


def _decode(tensors: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {
        key: TensorEntry(
            dtype=dtype,
            shape=tuple(shape),
            order=None if order is None else tuple(order),
            parts=tuple(Part(*part) for part in parts),
        )
        for key, (dtype, shape, order, parts) in tensors.items()
    }


def join_scalars(shares: Sequence[Share | CommitShare]) -> dict[str, Any]:
    """Those of all parameters. Raises InternalError where two ranks have made different steps of one."""
    found: dict[str, Any] = {}
    for rank, share in enumerate(shares):
        for name, own in share.scalars.items():
            if found.setdefault(name, own) != own:
                raise InternalError(
                    f"Every rank was expected to have made the same steps of parameter {name}; rank {rank} has {own}, "
                    f"another {found[name]}. This state cannot be saved; go on from an earlier checkpoint."
                )
    return found
