"""Adopt the in-place commit that `tiered_zero.checkpoint.resume` names.

A run that adopts a commit takes over the swap directory of the run before, and copies nothing. Every other checkpoint
is loaded into the homes of the new run, as by `load_checkpoint`, and its files stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from tiered_zero.checkpoint.commit import COMMIT_ID
from tiered_zero.checkpoint.commit_layout import committing_paths, run_fingerprint
from tiered_zero.checkpoint.committed import Commit, read_metadata
from tiered_zero.checkpoint.copies import DurableCopies
from tiered_zero.checkpoint.index import TagManifest
from tiered_zero.checkpoint.run_state import RunState, pack
from tiered_zero.checkpoint.tag import FoundCheckpoint, open_stores
from tiered_zero.config.schema import Config
from tiered_zero.hardware.ranks.agreement import agree
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.planner import Plan
from tiered_zero.plan.slots import PlannedSlot
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.sizes import format_nbytes
from tiered_zero.tiers.rack import AdoptedStore
from tiered_zero.tiers.slots import read_slot
from tiered_zero.tiers.tier import as_bytes

logger = logging.getLogger("tiered_zero")


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
                directory=store.first,
                step=commit.manifest.step,
                metadata={COMMIT_ID: commit.commit_id},
            )
            for each, store in zip(paths, own.stores, strict=True)
        },
        paths=frozenset(Path(path).resolve() for store in commit.stores for path in store.paths),
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
