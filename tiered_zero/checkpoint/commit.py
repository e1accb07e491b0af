"""In-place commits: state that rests on nvme becomes durable where it is, and the next steps write beside it.

[Note: In-place commits] A commit is a manifest of the store (store/__init__.py) whose metadata is a checkpoint's
manifest, with places instead of parts. The truth is the newest manifest of the state's store; a tag in a save directory
is a pointer to it, written after it. A commit of step N, after one of an earlier step M:

    1  updates have written only slots that manifest M does not name; nor may they write now
    2  sync the data files, write and sync `manifest.next`; beside that write and sync the tag under a temporary name
    3  rename `manifest.next` to `manifest`, sync the swap directory
    4  updates may write the slots that manifest N does not name
    5  rename the tag and `latest`, sync the save directory, remove a tag that was replaced

A crash, with any part of what was not synced on the disk, in any order of its pages:

    in 1, 2     `manifest` is M's, and nothing of what it names was written: M is loaded. A `manifest.next`, whole or
                torn, is dropped by the next run, and temporary names by the next save
    in 3        `manifest` is M's, as above; or N's, whose bytes and data were synced before the rename: N is loaded. A
                tag of M is superseded: it has the run's id, which leads to N
    in 4, 5     manifest N is durable, and nothing of what it names is written. Of tag and `latest` either may be lost:
                `latest` names M's tag, which leads to N; or N's, which is not there, and the newest pointer leads to N
    the first   there is no M: nothing is loaded until 3; N from then on, which the save directory leads to from 5 on

Where parameters that are half of their masters rest in a store of their own, 2 ends with both names durable
(`prepare`), 3 is done for the state's store, which decides, and then for the other: of that one the manifest of the
step that was decided is taken, be it `manifest` or `manifest.next`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import torch

from tiered_zero.checkpoint.copies import DurableCopies
from tiered_zero.checkpoint.encode import encode
from tiered_zero.checkpoint.manifest import TagManifest, TensorEntry, WrittenBy
from tiered_zero.checkpoint.places import PlaceTable, pack
from tiered_zero.checkpoint.portable import RunState
from tiered_zero.io.engine import IOEngine
from tiered_zero.store.swap_store import SwapStore
from tiered_zero.tiers.nvme import NvmeTier

METADATA_KEYS: Final = ("checkpoint", "records", "places", "initialized", "layout", "stores")
"""Of the metadata of a commit in the state's store; the other store's has "stores" alone."""


@final
class Commits:
    """Commits the state of a run. `tiers`: of the state, then of the parameters where they have a store of their own
    that takes part. `layout`: of commit_layout.run_fingerprint."""

    def __init__(self, state: RunState, tiers: Sequence[NvmeTier], copies: DurableCopies, layout: str) -> None:
        self._state = state
        self._stores: list[SwapStore] = [tier.store for tier in tiers]
        self._copies = copies
        self._layout = layout
        self._table = PlaceTable(state, tiers, copies.homes, copies.buffers)

    @property
    def swap(self) -> dict[str, Any]:
        """What a tag that points to the commits says of where they are."""
        return {"run_id": self._stores[0].run_id, "paths": list(self._stores[0].paths)}

    @property
    def step(self) -> int | None:
        """The step of the last commit; None before the first."""
        return self._stores[0].step

    @property
    def engine(self) -> IOEngine:
        """What moves the bytes of the state."""
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

    def commit(self, tag: str, step: int, written_by: WrittenBy, driver: dict[str, Any]) -> None:
        """Make the state of `step` durable, between two updates.

        `driver`: as `encode` gives it. Raises StoreError: the last commit is as it was, and may be tried again
        where the error says so.
        """
        state = self._state
        self._copies.write_updated()
        found, specs = self._table.list(pack(state.named_buffers()))
        tensors = {
            key: TensorEntry(dtype=spec.dtype_name, shape=spec.shape, order=spec.order) for key, spec in specs.items()
        }
        scalars = {name: encode(dict(own), f"scalars of {name}") for name, own in state.scalars().items()}
        manifest = TagManifest(
            kind="in_place",
            tag=tag,
            step=step,
            written_by=written_by,
            tensors=tensors,
            scalars=scalars,
            driver=driver,
            swap=self.swap,
        )
        stores = [{"run_id": store.run_id, "paths": list(store.paths)} for store in self._stores]
        metadata = {
            "checkpoint": manifest.body(),
            **found.body(),
            "initialized": [layout.subgroup.index for layout in state.layouts if state.stepper.has_state(layout)],
            "layout": self._layout,
            "stores": stores,
        }
        self._make_durable(step, metadata)

    def _make_durable(self, step: int, metadata: dict[str, Any]) -> None:
        first, others = self._stores[0], self._stores[1:]
        if not others:
            first.commit(step, metadata)
            return
        try:
            for store in others:
                store.prepare(step, {"stores": metadata["stores"]})
            first.prepare(step, metadata)
        except BaseException:
            for store in others:
                store.cancel_prepared()
            raise
        for store in self._stores:
            store.confirm()
