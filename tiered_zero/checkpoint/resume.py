"""Find the checkpoint that a path names, for a load and for `tiered_zero.checkpoint.resume`; adopt an in-place commit.

A run that adopts a commit takes over the swap directory of the run before, and copies nothing. Every other checkpoint
is loaded into the homes of the new run, as by `load_checkpoint`, and its files stay as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch

from tiered_zero.checkpoint.commit import COMMIT_ID
from tiered_zero.checkpoint.commit_layout import committing_paths, run_fingerprint
from tiered_zero.checkpoint.committed import Commit, held_commit, is_committed, read_metadata
from tiered_zero.checkpoint.copies import DurableCopies
from tiered_zero.checkpoint.directory import find_tag, list_tags, read_declared, read_latest, tag_path
from tiered_zero.checkpoint.open import open_commit, open_stores, open_tag
from tiered_zero.checkpoint.places import pack
from tiered_zero.checkpoint.portable import RunState
from tiered_zero.checkpoint.reader import TensorReader
from tiered_zero.checkpoint.tag_manifest import MANIFEST_NAME, TagManifest
from tiered_zero.config.schema import Config
from tiered_zero.errors import StoreError
from tiered_zero.hardware.ranks.agreement import agree
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.planner import Plan
from tiered_zero.plan.slots import PlannedSlot
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.sizes import format_nbytes
from tiered_zero.store.directory import OWNER_NAME
from tiered_zero.tiers.rack import AdoptedStore
from tiered_zero.tiers.slots import read_slot
from tiered_zero.tiers.tier import as_bytes

logger = logging.getLogger("tiered_zero")


@final
@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint. `path`: of the tag, or the swap directory. `swap`: the first directory of an in-place commit's
    store. `lines`: for the log. `manifest`: of a tag that was just read."""

    path: Path
    swap: Path | None = None
    lines: tuple[str, ...] = ()
    manifest: TagManifest | None = field(default=None, repr=False)


def find_checkpoint(directory: str | os.PathLike[str], tag: str | None = None) -> FoundCheckpoint:
    """Find what `directory` names: a run's swap directory, one tag, or tags, of which `tag` or the newest is taken.

    An in-place commit holds one step. A pointer that was not renewed after the last commit, because the run was killed
    between the two, leads to that commit, and says so; a tag that is asked for by name does not. Raises StoreError.
    """
    path = Path(os.path.abspath(directory))
    if tag is None and (path / OWNER_NAME).exists():
        return FoundCheckpoint(path=path, swap=path)
    if tag is None and (path / MANIFEST_NAME).exists():
        return _follow(path)
    if tag is None and (latest := _latest_pointer(path)) is not None:
        return latest
    try:
        info, skipped = find_tag(path, tag)
    except StoreError:
        if tag is None and (other := _any_pointer(path)) is not None:
            return other
        raise
    if info.kind == "full":
        return FoundCheckpoint(path=info.path, lines=tuple(skipped), manifest=info.manifest)
    found = _follow(info.path)
    return FoundCheckpoint(path=found.path, swap=found.swap, lines=(*skipped, *found.lines))


def open_reader(found: FoundCheckpoint, own_runs: Container[str] = ()) -> TensorReader:
    """Open a tag, or the swap directories that it points to. `own_runs`: see `open_commit`. Raises StoreError."""
    if found.swap is not None:
        return open_commit(found.swap, own_runs)
    return open_tag(found.path, manifest=found.manifest)


def _latest_pointer(path: Path) -> FoundCheckpoint | None:
    """Return the in-place commit that `latest` names, where it is still there, at any step."""
    with suppress(StoreError):  # the search for a complete tag says what is wrong
        if (named := read_latest(path)) is not None and (found := _follow(tag_path(path, named))).swap is not None:
            return found
    return None


def _any_pointer(path: Path) -> FoundCheckpoint | None:
    """What the newest tag points to of which the state is still there, at any step: `latest` names one that is not."""
    for info in reversed(list_tags(path)):
        if info.kind == "in_place":
            with suppress(StoreError):
                return _follow(info.path)
    return None


def _follow(path: Path) -> FoundCheckpoint:
    """A tag, or the swap directory that it points to. Raises StoreError."""
    manifest = read_declared(path)
    if manifest.swap is None:
        return FoundCheckpoint(path=path)
    first = Path(manifest.swap["paths"][0])
    committed = held_commit(manifest)
    if committed is None:
        raise StoreError(f"{path} cannot be loaded: its state rested in {first}, which is gone, or on another host.")
    lines: tuple[str, ...] = ()
    if not is_committed(manifest, committed):
        again = " again" if committed.step == manifest.step else ""
        lines = (
            f"{path} was written at step {manifest.step}; its run has committed step {committed.step}{again} in place "
            f"since: that is loaded, from {first}",
        )
    return FoundCheckpoint(path=path, swap=first, lines=lines)


@final
@dataclass(frozen=True, kw_only=True)
class Adoption:
    """A commit from which a run resumes. `directories`: swap paths of the config -> this rank's store there. `paths`:
    swap directories of all ranks.
    `initialized`: this rank's sub-groups that have state."""

    found: FoundCheckpoint
    directories: Mapping[tuple[str, ...], AdoptedStore]
    paths: frozenset[Path]
    manifest: TagManifest
    initialized: frozenset[int]


def adopt(
    found: FoundCheckpoint,
    ranks: Collectives,
    config: Config,
    plan: Plan,
    slots: Sequence[PlannedSlot],
    layouts: list[StateLayout],
) -> Adoption | None:
    """Adopt an in-place commit if every rank lays everything out as the rank that committed its part; None, with the
    reason in the log, if it has to be loaded. Collective. Raises StoreError: damaged, or its owner lives."""
    if found.swap is None:
        return None
    swap = found.swap

    def read() -> tuple[str, Any] | None:
        if ranks.rank > 0:
            return None
        path, metadata = read_metadata(swap)
        return str(path), metadata

    path, metadata = agree(ranks, "resume: the commit", read)[0] or ("", None)
    commit = Commit.decode(Path(path), metadata)

    def look() -> str:
        """Open this rank's part, and say why it cannot be adopted."""
        if plan.request.commits is None:
            return "tiered_zero.checkpoint.in_place is off"
        if len(commit.ranks) != ranks.world_size:
            return f"{len(commit.ranks)} ranks have committed it, and this run has {ranks.world_size}"
        own = commit.ranks[ranks.rank]
        with ExitStack() as opened:
            open_stores(own.stores, commit, opened)
        if any(record.name.startswith("param_back/") for record in commit.manifest.records):
            return "the delayed update had left parameters in their second home"
        if own.layout != run_fingerprint(config, plan, slots, layouts):
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
        found=found,
        directories={
            each: AdoptedStore(
                directory=Path(store["paths"][0]),
                step=commit.manifest.step,
                metadata={COMMIT_ID: commit.commit_id},
            )
            for each, store in zip(paths, own.stores, strict=True)
        },
        paths=frozenset(Path(path).resolve() for store in commit.stores for path in store["paths"]),
        manifest=commit.manifest,
        initialized=frozenset(own.initialized),
    )


@final
@dataclass(frozen=True, kw_only=True)
class AdoptedValues:
    """First values of parameters and buffers of a run that was adopted. Driver thread, before the first step."""

    state: RunState
    copies: DurableCopies

    def flat(self, unit: Unit) -> torch.Tensor:
        """[P] of the unit's dtype, on the CPU: its masters rounded, or its durable copy; zeros where another rank has
        them."""
        if unit.index in self.state.updated_units and not self.state.view.need_params:
            return self.state.view.read_masters(unit).to(unit.dtype)
        home = self.copies.homes.get(unit.index) or self.state.inventory.home(unit, "param")
        flat, own = torch.zeros(unit.numel, dtype=unit.dtype), home.elements(unit)
        part = flat[own]
        part.copy_(read_slot(home, 0, as_bytes(part).numel(), self.state.view.staging).view(unit.dtype))
        return flat

    def restore_buffers(self) -> None:
        """Copy the buffers' values into the model."""
        home = self.copies.buffers
        if home is None:
            return
        raw = read_slot(home, 0, home.slot.nbytes, self.state.view.staging)
        with torch.no_grad():
            for _, buffer, offset in pack(self.state.named_buffers()):
                nbytes = buffer.numel() * buffer.dtype.itemsize
                buffer.copy_(raw[offset : offset + nbytes].clone().view(buffer.dtype).view(buffer.shape))
