"""In-place commits: state that rests on nvme becomes durable where it is, and the next steps write beside it.

[Note: In-place commits] A commit is a manifest of the store (store/__init__.py) whose metadata is the manifest of a
checkpoint, with the records of the run's stores. The truth is the newest manifest of the state's store; a tag in a save
directory is a pointer to it, written after it. A commit of step N, after one of an earlier step M:

    1  updates have written only slots that manifest M does not name; nor may they write now
    2  sync the data files, write and sync `manifest.next`; beside that write and sync the tag under a temporary name
    3  rename `manifest.next` to `manifest`, sync the swap directory
    4  updates may write the slots that manifest N does not name
    5  rename the tag and `latest`, sync the save directory, remove a tag that was replaced

A crash, with any part of what was not synced on the disk, in any order of its pages:

    in 1, 2     `manifest` is M's, and nothing of what it names was written: M is loaded. A `manifest.next`, whole or
                torn, is dropped by the next run, and temporary names by the next save
    in 3        `manifest` is M's, as above; or N's, whose bytes and data were synced before the rename: N is loaded. A
                tag of M is superseded, of the same step or not: it has the run's id, which leads to N
    in 4, 5     manifest N is durable, and nothing of what it names is written. Of tag and `latest` either may be lost:
                `latest` names M's tag, which leads to N; or N's, which is not there, and the newest pointer leads to N
    the first   there is no M: nothing is loaded until 3; N from then on, which the save directory leads to from 5 on

Where a commit is of several stores, because there are many ranks, or parameters that are half of their masters rest in
a store of their own, 2 ends with all names durable (`prepare`), 3 is done for the store of rank 0's state, which
decides, and then for the others: of those the manifest with the id of the commit that was decided is taken, be it
`manifest` or `manifest.next`, for two commits may be of one step. The metadata of rank 0's has what all ranks have
committed; that of the others says which store decides.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch

from tiered_zero.checkpoint.copies import DurableCopies
from tiered_zero.checkpoint.index import RankPart, Share, StoreLocation, TagManifest, join_shares
from tiered_zero.checkpoint.run_state import RunState, committed_places, list_tensors, pack
from tiered_zero.checkpoint.values import encode
from tiered_zero.errors import ModelError
from tiered_zero.hardware.ranks.agreement import agree
from tiered_zero.io.engine import IOEngine
from tiered_zero.store.store import SwapStore
from tiered_zero.tiers.nvme import NvmeTier

COMMIT_ID: Final = "commit_id"
"""In the metadata of all stores, and in the tag: drawn by rank 0. Two commits may be of one step."""

DECIDED_BY: Final = "decided_by"
"""In the metadata of the other stores: run id and paths of the one that decides."""


@final
class Commits:
    """Commits the state of this rank. `tiers`: of the state, then of the parameters where they have a store of their
    own that takes part. `layout`: of commit_layout.run_fingerprint."""

    def __init__(self, state: RunState, tiers: Sequence[NvmeTier], copies: DurableCopies, layout: str) -> None:
        self._state = state
        self._stores: list[SwapStore] = [tier.store for tier in tiers]
        self._copies = copies
        self._layout = layout
        self._places = committed_places(state, tiers, copies.homes, copies.buffers)
        ranks = state.runtime.collectives
        own = [store.run_id for store in self._stores]
        of_ranks = agree(ranks, "initialize: in-place commits", lambda: own)
        if not all(of_ranks):
            raise ModelError(
                "tiered_zero.checkpoint.in_place: expected optimizer state on every rank; found none on rank "
                f"{of_ranks.index([])}, for the model has too few parameters. Use fewer ranks, or leave it out."
            )
        self.run_ids = frozenset(run_id for each in of_ranks for run_id in each)
        """Of the stores of all ranks."""

    @property
    def step(self) -> int | None:
        """The step of the last commit; None before the first."""
        return self._stores[0].step

    def new_swap(self) -> dict[str, Any]:
        """Return how the tag of the next commit refers to its stores, on rank 0."""
        return {**vars(_location(self._stores[0])), COMMIT_ID: secrets.token_hex(16)}

    @property
    def engine(self) -> IOEngine:
        """The engine that moves the bytes of the state."""
        return self._stores[0].engine

    def revert(self) -> None:
        """Return to the last commit whatever was written since. Driver thread, while nothing is read or written."""
        for store in self._stores:
            store.revert()

    def write_copies(self) -> None:
        """Write frozen parameters and buffers that have changed to where they become durable with the next `commit`.
        Driver thread, while no commit runs: updates may. Raises StoreError, TransferError."""
        with torch.no_grad():
            self._copies.write(pack(self._state.named_buffers()))

    def share(self, driver: Mapping[str, Any], commit_id: str) -> Share:
        """Write the copies of what updates write, and list what this rank commits. Between two updates. `driver`: as
        `encode` gives it. `commit_id`: of `new_swap`; that of rank 0 is taken. Raises StoreError, TransferError."""
        state, scalars = self._state, self._state.view.scalars
        self._copies.write_updated()
        saves_buffers = state.runtime.collectives.rank == 0
        tensors, records = list_tensors(state, self._places, scalars, state.named_buffers() if saves_buffers else ())
        return Share(
            tensors=tensors,
            records=records,
            scalars={name: encode(own, f"scalars of {name}") for name, own in scalars.by_name().items()},
            driver=driver,
            rank=RankPart(
                stores=[_location(store) for store in self._stores],
                layout=self._layout,
                initialized=scalars.subgroups,
            ),
            commit_id=commit_id,
        )

    def commit(self, manifest: TagManifest, shares: Sequence[Share]) -> None:
        """Make the state durable, with one rank. Raises StoreError: the last commit stays, and the error says if to try
        again."""
        if len(self._stores) == 1:
            self._stores[0].commit(manifest.step, metadata_of(manifest, shares))
            return
        try:
            self.prepare(manifest, shares)
            self.decide()
            self.confirm()
        except BaseException:
            if self._stores[0].is_undecided:  # an interrupt came between the two
                self.cancel()
            raise

    def prepare(self, manifest: TagManifest, shares: Sequence[Share]) -> None:
        """Make the state durable beside the last commit, and block writes. Raises StoreError, with nothing changed."""
        first = _parts(shares)[0].stores[0]
        followed = {COMMIT_ID: shares[0].commit_id, DECIDED_BY: first.model_dump()}
        try:
            for store in reversed(self._stores):
                decides = store.run_id == first.run_id
                store.prepare(manifest.step, metadata_of(manifest, shares) if decides else followed)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Drop what is prepared, where it is known that it is not decided. Raises StoreError."""
        for store in self._stores:
            store.cancel_prepared()

    def decide(self) -> None:
        """Make what all ranks have prepared the commit, on rank 0. Raises StoreError: which of the two it is is not
        known."""
        self._stores[0].confirm()

    def confirm(self) -> None:
        """Follow what was decided: the places of the commit before may be written. Raises StoreError."""
        for store in self._stores[self._state.runtime.collectives.rank == 0 :]:
            store.confirm()


def _location(store: SwapStore) -> StoreLocation:
    return StoreLocation(run_id=store.run_id, paths=[*map(str, store.paths)])


def metadata_of(manifest: TagManifest, shares: Sequence[Share]) -> dict[str, Any]:
    """Return the metadata of a commit in the store that decides: the manifest of all ranks. Raises StoreError if a part
    lacks."""
    whole = manifest.model_copy(update=join_shares(shares))
    return {
        COMMIT_ID: shares[0].commit_id,
        "checkpoint": whole.body(),
        "ranks": [part.model_dump(mode="json") for part in _parts(shares)],
    }


def _parts(shares: Sequence[Share]) -> list[RankPart]:
    return [share.rank for share in shares if share.rank is not None]
