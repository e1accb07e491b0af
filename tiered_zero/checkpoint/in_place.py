"""Commit a run's state without a copy, in the swap files that hold it; adopt such a commit in the next run.

[Note: In-place commits] A store is a set of swap files and a manifest, which is the durable table of the store's
records. A commit writes a new manifest, with the checkpoint's manifest (`TagManifest`) in its metadata. A load takes
the newest manifest of the store with the optimizer state. A tag in a save directory only points to this store, and is
published after the commit. If the last commit is of step M, a commit of step N does this:

    1  updates stop; they have written only slots that manifest M does not name
    2  sync the data files, write and sync `manifest.next`; at the same time, write and sync the tag's next manifest
    3  rename `manifest.next` to `manifest`, sync the swap directory
    4  updates may write the slots that manifest N does not name
    5  rename the tag's manifest, then `latest`, and sync both directories

What a load finds after a crash, which may lose pages that were not synced:

    in 1, 2     M is loaded: nothing that it names was overwritten. The next run removes `manifest.next`, and the next
                save the tag's next manifest
    in 3        M is loaded, as above; or N, if the rename is on the disk. A tag of M leads to N then:
                it finds the store by the run's id
    in 4, 5     N is loaded. If the new tag or the new `latest` is lost, the old one leads to N by the run's id
    without M   (N is the first commit) nothing can be loaded before 3, N afterwards; the save directory leads to N from
                5 on

A commit has several stores if there are several ranks, or if its parameters (state_format bf16_remainder) have their
own store. Step 2 makes all next manifests durable. Step 3 first renames the manifest with rank 0's state, which decides
the commit, and then the others. From each other store, a load takes the manifest (`manifest` or `manifest.next`) with
the id of the decided commit, because two commits may have the same step.

A run that adopts a commit takes over the last run's swap directory and copies nothing. A run with another layout loads
the commit into its own homes, and the old files stay unchanged."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
import xxhash

from tiered_zero.checkpoint.driver import join_states, own_state, to_json
from tiered_zero.checkpoint.index import (
    RankPart,
    RunState,
    Share,
    StoreLocation,
    TagManifest,
    committed_places,
    join_shares,
    list_tensors,
    pack,
)
from tiered_zero.checkpoint.load import Matched
from tiered_zero.checkpoint.tag import COMMIT_ID, DECIDED_BY, Commit, FoundCheckpoint, open_stores
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.concurrency.interrupts import hold_interrupts
from tiered_zero.concurrency.transfer import COMPLETED, Transfer, wait_all, wait_quietly
from tiered_zero.config.schema import Config
from tiered_zero.errors import ModelError, StoreError
from tiered_zero.hardware.ranks.collectives import Collectives, agree
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.placement import BUFFERS
from tiered_zero.plan.planner import Plan
from tiered_zero.record.store import SwapStore
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up, format_nbytes
from tiered_zero.system import map_memory
from tiered_zero.tiers.nvme import NvmeTier
from tiered_zero.tiers.rack import AdoptedStore, nvme_needs
from tiered_zero.tiers.tier import Home, as_bytes, read_slot

logger = logging.getLogger("tiered_zero")

SAVE: Final = "save_checkpoint"
"""The name of a save in calls of `agree`. If a save fails on one rank, the other ranks' errors have this name."""

_CHUNK_NBYTES = MIB
"""The size of the chunks in which a copy is compared and written: one checksum chunk of the store."""


@final
class Commits:
    """Commits this rank's state in place. Called on the driver thread. `tiers`: first the nvme tier of the optimizer
    state; then the nvme tier of the parameters, if it is another one and takes part in commits. `homes`: see
    `DurableCopies`. `layout`: the hash of `run_fingerprint`."""

    def __init__(self, state: RunState, tiers: Sequence[NvmeTier], homes: Mapping[int, Home], layout: str) -> None:
        self._state = state
        self._stores: list[SwapStore] = [tier.store for tier in tiers]
        self.copies = DurableCopies(state, homes)
        self._layout = layout
        self._places = committed_places(state, tiers, homes)
        self._ranks = state.runtime.collectives
        own = [store.run_id for store in self._stores]
        of_ranks = agree(self._ranks, "initialize: in-place commits", lambda: own)
        if not all(of_ranks):
            raise ModelError(
                "tiered_zero.checkpoint.in_place: expected optimizer state on every rank; found none on rank "
                f"{of_ranks.index([])}, for the model has too few parameters. Use fewer ranks, or leave it out."
            )
        self.run_ids = frozenset(run_id for each in of_ranks for run_id in each)
        """The ids of all ranks' stores (sets of swap files)."""

    def restore(self, adoption: Adoption, matched: Matched) -> None:
        """Restore the state of the commit `adoption`: drop all later writes to the swap files, then set the scalars and
        buffers. `matched`: has the commit's scalars. No transfer may use the swap files during the call."""
        for store in self._stores:
            store.revert()
        view = self._state.view
        for layout in view.layouts:
            if layout.subgroup.index in adoption.initialized:
                view.scalars.replace(layout, matched.scalars(layout))
        self.copies.restore_buffers()

    def save(self, tag: TagWriter, fields: Mapping[str, Any], *, save_latest: bool) -> None:
        """Commit the state on every rank, and publish a tag that points to the commit. Every rank calls this between
        two updates. `fields`: fields of TagManifest, with this rank's captured driver state. If this raises, such as
        StoreError, the caller discards the tag."""
        fields = {**fields, "swap": _location(self._stores[0])}
        driver: dict[str, Any] = fields["driver"]
        pointer: Transfer = COMPLETED
        try:
            if self._ranks.rank == 0:  # write the tag during the commit: both wait for disks
                prepare = partial(tag.prepare, {**fields, "driver": {}}, save_latest=save_latest)
                pointer = self._state.runtime.accelerator.lane("save").submit(prepare)
            share, decode = partial(self.share, own_state(driver)), Share.model_validate_json
            shares = agree(self._ranks, f"{SAVE}: what it commits", share, encode=Share.model_dump_json, decode=decode)
            driver = join_states(driver, [share.driver for share in shares])
            self._commit(
                TagManifest(**{**fields, "driver": driver}, tag=tag.tag, save_id=tag.save_id), shares, tag, pointer
            )
        finally:
            wait_quietly(pointer)

    def share(self, driver: Mapping[str, Any]) -> Share:
        """Write the copies of buffers and parameters (`DurableCopies`), and return this rank's part of the commit.
        `driver`: the driver state that differs between ranks (`own_state`). Raises StoreError, TransferError."""
        state, scalars = self._state, self._state.view.scalars
        with torch.no_grad():
            self.copies.write()
        buffers = state.buffers() if self._ranks.rank == 0 else {}
        tensors = list_tensors(state, self._places, scalars, buffers)
        return Share(
            tensors=tensors,
            scalars={name: to_json(own, f"scalars of {name}") for name, own in scalars.by_name().items()},
            driver=driver,
            rank=RankPart(
                stores=[_location(store) for store in self._stores],
                layout=self._layout,
                initialized=scalars.subgroups,
            ),
        )

    @hold_interrupts()
    def _commit(self, manifest: TagManifest, shares: Sequence[Share], tag: TagWriter, pointer: Transfer) -> None:
        """Make the state durable on every rank, let rank 0 decide, then publish the tag. `pointer`: completes when the
        tag is prepared. Raises StoreError, whose text says what is wrong: the commit failed, the commit may not be
        durable, or the commit is durable but its tag is not."""
        is_first = self._ranks.rank == 0
        if len(self.run_ids) == 1:  # no other store depends on it: it may drop a prepared state
            self._stores[0].commit(manifest.step, _metadata(manifest, shares))
        else:
            self._prepare_together(manifest, shares)
            agree(self._ranks, f"{SAVE}: its decision", lambda: self.decide() if is_first else None)

        def follow() -> None:
            self.confirm()
            if is_first:
                self._publish(tag, pointer, manifest.step)

        agree(self._ranks, f"{SAVE}: its tag", follow)

    def _prepare_together(self, manifest: TagManifest, shares: Sequence[Share]) -> None:
        """Prepare the commit on every rank. If one rank fails, drop the prepared state and raise on every rank."""
        failed: list[Exception] = []

        def attempt() -> str | None:
            try:
                self.prepare(manifest, shares)
            except Exception as error:
                failed.append(error)
                return str(error)
            return None

        texts = agree(self._ranks, f"{SAVE}: the commit", attempt)  # if this fails, rank 0 may have committed: keep it
        wrong = [f"Rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if wrong:
            self.cancel()
            raise failed[0] if failed else StoreError(wrong[0])

    def prepare(self, manifest: TagManifest, shares: Sequence[Share]) -> None:
        """Prepare the commit in this rank's stores: make the state durable next to the last commit, and refuse writes
        until `confirm` or `cancel`. If this raises StoreError, the caller must call `cancel`."""
        first = _parts(shares)[0].stores[0]
        followed = {COMMIT_ID: manifest.save_id, DECIDED_BY: first.model_dump()}
        for store in reversed(self._stores):
            decides = store.run_id == first.run_id
            store.prepare(manifest.step, _metadata(manifest, shares) if decides else followed)

    def cancel(self) -> None:
        """Drop the prepared state. Must not be called after rank 0 has called `decide`. Raises StoreError."""
        for store in self._stores:
            store.cancel_prepared()

    def decide(self) -> None:
        """Commit the prepared state in the store with rank 0's optimizer state, which decides the commit for all ranks.
        Called on rank 0 only. After a StoreError, the commit may or may not be durable."""
        self._stores[0].confirm()

    def confirm(self) -> None:
        """Commit the prepared state in this rank's stores that `decide` has not committed. Raises StoreError."""
        for store in self._stores[self._ranks.rank == 0 :]:
            store.confirm()

    def _publish(self, tag: TagWriter, pointer: Transfer, step: int) -> None:
        """Wait for `pointer`, the transfer that prepares the tag, and publish the tag. Raises StoreError."""
        try:
            pointer.wait()
            tag.publish_prepared()
        except Exception as error:
            swap = self._stores[0].paths[0]
            raise StoreError(
                f"Step {step} is committed in {swap}, but its tag {tag.path} was not made durable: {error} "
                "Earlier tags of this run lead to the commit, and so does tiered_zero.checkpoint.resume = "
                f"{swap!r}. Free space there, or save elsewhere: the next save writes a tag."
            ) from error


def _location(store: SwapStore) -> StoreLocation:
    return StoreLocation(run_id=store.run_id, paths=list(store.paths))


def _metadata(manifest: TagManifest, shares: Sequence[Share]) -> dict[str, Any]:
    """Return a commit's metadata: a `Commit`, as JSON. Raises StoreError if a part of a tensor is missing."""
    whole = manifest.model_copy(update=join_shares(shares))
    commit = Commit(commit_id=manifest.save_id, checkpoint=whole, ranks=_parts(shares))
    return commit.model_dump(mode="json")


def _parts(shares: Sequence[Share]) -> list[RankPart]:
    return [share.rank for share in shares if share.rank is not None]


# -- copies ------------------------------------------------------------------------------------------------------------


@final
class DurableCopies:
    """Copies to nvme the values that a commit needs in addition to optimizer state: buffers, frozen parameters and,
    with state_format bf16_remainder, the parameters of updated units. Reads them back from an adopted commit. Called on
    the driver thread. `homes`: unit index, or BUFFERS for the buffers -> home (slot) of the copy."""

    def __init__(self, state: RunState, homes: Mapping[int, Home]) -> None:
        self.homes = homes
        self._state = state
        self._units = [unit for unit in state.units if unit.index in homes]
        self._digests: dict[tuple[str, int], int] = {}
        """(slot name, first byte of a chunk) -> checksum of the bytes that were last written there."""

    def write(self) -> None:
        """Write the copies that may have changed. The next commit makes them durable. Called between two updates.
        Raises StoreError, TransferError."""
        writes: list[Transfer] = []
        window = torch.frombuffer(map_memory(_CHUNK_NBYTES), dtype=torch.uint8)
        try:
            for unit in self._units:
                home, raw = self.homes[unit.index], as_bytes(self._present(unit))
                if unit.index in self._state.updated_units:  # half of their masters: 2 of the 10 bytes of state
                    writes.append(home.tier.write(home.slot, raw))
                else:
                    self._write_changed(home, raw, window)
            if (home_of_buffers := self.homes.get(BUFFERS)) is not None:
                packed = _packed(self._state.buffers(), home_of_buffers.slot.nbytes)
                self._write_changed(home_of_buffers, packed, window)
        finally:
            wait_all(writes)

    def committed(self, unit: Unit) -> torch.Tensor:
        """Return a unit's parameters from an adopted commit, [P] on the CPU. Other ranks' elements are zero."""
        view = self._state.view
        if unit.index in self._state.updated_units and not view.need_params:
            return view.read_masters(unit).to(unit.dtype)
        home = self.homes.get(unit.index) or view.inventory.home(unit, "param")
        flat, own = torch.zeros(unit.numel, dtype=unit.dtype), home.elements(unit)
        part = flat[own]
        part.copy_(read_slot(home, 0, as_bytes(part).numel(), view.staging).view(unit.dtype))
        return flat

    def restore_buffers(self) -> None:
        """Copy the buffers of an adopted commit into the model's buffers."""
        if (home := self.homes.get(BUFFERS)) is None:
            return
        raw = read_slot(home, 0, home.slot.nbytes, self._state.view.staging)
        with torch.no_grad():
            for _, buffer, offset in pack(self._state.buffers()):
                nbytes = buffer.numel() * buffer.dtype.itemsize
                buffer.copy_(raw[offset : offset + nbytes].clone().view(buffer.dtype).view(buffer.shape))

    def _present(self, unit: Unit) -> torch.Tensor:
        """Return the memory that holds a unit's parameters, on the device or the host."""
        home = self._state.view.inventory.find(unit, "param")
        view = self._state.device_flat(unit) if home is None else home.slot.tensor
        assert view is not None, "copied units rest in memory"
        return view

    def _write_changed(self, home: Home, raw: torch.Tensor, window: torch.Tensor) -> None:
        """Write the chunks of a slot that have changed. `raw`: the slot's new bytes, on any device. `window`: a buffer
        for one chunk."""
        for start in range(0, raw.numel(), _CHUNK_NBYTES):
            part = raw[start : start + _CHUNK_NBYTES]
            chunk = window[: align_up(part.numel(), PAGE_NBYTES)]
            chunk.zero_()
            chunk[: part.numel()].copy_(part)
            digest = xxhash.xxh3_64_intdigest(chunk.numpy().data)
            if self._digests.get((home.slot.name, start)) != digest:
                home.tier.write(home.slot, chunk, start).wait()
                self._digests[home.slot.name, start] = digest


def _packed(buffers: Mapping[str, torch.Tensor], nbytes: int) -> torch.Tensor:
    """Pack the model's buffers into one tensor of `nbytes`. Raises StoreError if the buffers need more."""
    raw = torch.zeros(nbytes, dtype=torch.uint8)
    for name, buffer, offset in pack(buffers):
        data = as_bytes(buffer.detach().contiguous()).cpu()
        if offset + data.numel() > nbytes:
            raise StoreError(
                f"Buffer {name} has grown: commits were planned for {format_nbytes(nbytes)} of buffers. Start again "
                "with buffers of their final shapes, or set tiered_zero.checkpoint.in_place to false."
            )
        raw[offset : offset + data.numel()] = data
    return raw


# -- adoption ----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class Adoption:
    """An in-place commit that this run adopts: the run takes over the commit's swap files. `directories`: maps the swap
    paths of each store, as the config names them, to the store's committed state. `paths`: the swap directories of all
    ranks. `initialized`: indices of this rank's sub-groups that have state."""

    directories: Mapping[tuple[str, ...], AdoptedStore]
    paths: frozenset[Path]
    manifest: TagManifest
    initialized: frozenset[int]


def adopt(
    found: FoundCheckpoint,
    ranks: Collectives,
    config: Config,
    plan: Plan,
    layouts: list[StateLayout],
) -> Adoption | None:
    """Return the `Adoption` of `found`; None if it is no in-place commit, or if this run cannot adopt it (the reason is
    logged). To adopt it, this run must commit in place, and every rank must lay out its bytes as at the commit. Every
    rank calls this. Raises StoreError if the commit is damaged or its run is alive."""
    if found.swap is None:
        return None
    swap = found.swap

    def read() -> str:
        return Commit.read(swap).model_dump_json() if ranks.rank == 0 else ""

    commit = Commit.model_validate_json(agree(ranks, "resume: the commit", read)[0])

    def look() -> str:
        """Check this rank's part of the commit. Return why the commit cannot be adopted; "" if it can."""
        if not plan.request.config.tiered_zero.checkpoint.in_place:
            return "tiered_zero.checkpoint.in_place is off"
        if len(commit.ranks) != ranks.world_size:
            return f"{len(commit.ranks)} ranks have committed it, and this run has {ranks.world_size}"
        own = commit.ranks[ranks.rank]
        with ExitStack() as opened:
            open_stores(own.stores, commit, opened)
        parts = (part for entry in commit.checkpoint.tensors.values() for part in entry.parts)
        if any(source.record.startswith("param_back/") for part in parts for source in part.sources):
            return "the delayed update had left parameters in their second home"
        if own.layout != run_fingerprint(config, plan, layouts):
            return "this run lays its state out in another way (placement, sub_group_size, state_format or nvme_path)"
        return ""

    reason = next(filter(None, agree(ranks, "resume: each rank's part", look)), "")
    if reason:
        logger.warning(
            "%s is loaded, not adopted: %s. Its files stay as they are, and this run takes %s more on nvme; "
            "`tiered-zero swap gc --committed` removes them.",
            swap,
            reason,
            format_nbytes(plan.nbytes("nvme")),
        )
        return None
    own, paths = commit.ranks[ranks.rank], committing_paths(config, plan)
    return Adoption(
        directories={
            each: AdoptedStore(
                directory=store.first,
                step=commit.checkpoint.step,
                metadata={COMMIT_ID: commit.commit_id},
            )
            for each, store in zip(paths, own.stores, strict=True)
        },
        paths=frozenset(Path(path).resolve() for store in commit.stores for path in store.paths),
        manifest=commit.checkpoint,
        initialized=frozenset(own.initialized),
    )


def run_fingerprint(config: Config, plan: Plan, layouts: Sequence[StateLayout]) -> str:
    """Return a hash of everything that decides where bytes lie in this rank's records. A run can adopt an in-place
    commit only if the hashes are equal."""
    subgroups = [
        {
            "masters": [str(dtype) for dtype in layout.masters.dtypes],
            "segments": [
                [segment.unit.index, segment.unit_start, segment.start, segment.numel, str(segment.unit.dtype)]
                for segment in layout.subgroup.segments
            ],
            "pieces": [
                [param.name, param.shape, param.stride, piece.start, piece.param_start, piece.numel]
                + [field.name for field in layout.fields(piece)]
                for piece in layout.subgroup.pieces
                for param in [piece.param]
            ],
            "arrays": [
                [array.field.name, list(array.field.shape), str(array.field.dtype), array.piece, array.offset]
                for array in layout.arrays
            ],
        }
        for layout in layouts
    ]
    places = [[slot.name, slot.nbytes, slot.num_durable] for slot in plan.slots if slot.num_durable]
    needs = nvme_needs(config, plan)
    own = committing_paths(config, plan)
    stores = sorted([[os.path.abspath(path) for path in paths], needs.get(paths, 0)] for paths in own)
    text = json.dumps([subgroups, places, stores], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def committing_paths(config: Config, plan: Plan) -> list[tuple[str, ...]]:
    """Return the swap paths of each store that takes part in commits; the store of the optimizer state is first."""
    zero = config.zero_optimization
    paths = [zero.offload_optimizer.nvme_paths]
    if plan.nbytes("nvme", "commit_param"):
        paths.append(zero.offload_param.nvme_paths)
    return list(dict.fromkeys(paths))
