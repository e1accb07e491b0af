"""Decide together with all ranks whether and where a tag is saved, and which one is loaded.

Each decision is one exchange, on the driver thread. A problem on one rank is raised on all, and nothing is changed.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from tiered_zero.checkpoint.index import TagManifest
from tiered_zero.checkpoint.tag import FoundCheckpoint
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.checkpoint.weights import WeightTensor
from tiered_zero.errors import ModelError, RankError, StoreError
from tiered_zero.hardware.ranks.agreement import agree
from tiered_zero.hardware.ranks.collectives import Collectives

logger = logging.getLogger("tiered_zero")

SAVE, LOAD, _EXPORT = "save_checkpoint", "load_checkpoint", "save_16bit_model"


@final
@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One rank's request to save. `arguments`: must be the same on all ranks. `nbytes`: bytes of data that it
    writes."""

    tag: str
    step: int
    arguments: Mapping[str, Any]
    nbytes: int


def agree_on_save(ranks: Collectives, ask: Callable[[], Wanted], tag_validation: str) -> list[Wanted]:
    """Ask every rank for its request; all get rank 0's tag. `tag_validation`: DeepSpeed's Warn, Fail or Ignore, for
    tags that differ. Raises ModelError if the ranks want to save different things, and what `ask` raises."""
    wanted = agree(ranks, SAVE, ask, encode=vars, decode=lambda value: Wanted(**value))
    first = wanted[0]
    for rank, own in enumerate(wanted):
        if (own.step, own.arguments) != (first.step, first.arguments):
            raise ModelError(
                "save_checkpoint() was expected after the same step and with the same arguments on every rank; rank "
                f"{rank} is at step {own.step} with {dict(own.arguments)}, rank 0 at step {first.step} with "
                f"{dict(first.arguments)}."
            )
    tags = [own.tag for own in wanted]
    if len(set(tags)) > 1 and tag_validation != "Ignore":
        text = f"save_checkpoint(tag=...) was expected to be the same on every rank; found {tags}"
        if tag_validation == "Fail":
            raise ModelError(f"{text}, and checkpoint.tag_validation is Fail. Give the same tag on all of them.")
        if ranks.rank == 0:
            logger.warning("%s: rank 0's is taken", text)
    return [Wanted(**{**vars(own), "tag": first.tag}) for own in wanted]


def begin_tag(ranks: Collectives, save_dir: str | os.PathLike[str], wanted: Sequence[Wanted]) -> TagWriter:
    """Begin the tag on rank 0, which checks the space for all ranks, and join it on the others."""
    tag, rank = wanted[0].tag, ranks.rank
    sizes = [own.nbytes for own in wanted]
    begun: list[TagWriter] = []

    def begin() -> str:
        if rank == 0:
            needed, own = sum(sizes), sizes[0]
            begun.append(TagWriter.begin(save_dir, tag, needed_nbytes=needed, own_nbytes=own))
        return begun[0].name if begun else ""

    def join(name: str) -> None:
        if rank > 0:
            begun.append(TagWriter.join(save_dir, tag, name, rank=rank, needed_nbytes=sizes[rank]))

    try:
        name = agree(ranks, f"{SAVE}: its directory", begin)[0]
        agree(ranks, f"{SAVE}: its directory on every rank", partial(join, name))
    except BaseException:
        for writer in begun:
            writer.discard()
        raise
    return begun[0]


def find_together(
    ranks: Collectives,
    directory: str | os.PathLike[str],
    find: Callable[[], FoundCheckpoint | None],
    prepare: Callable[[], None] = lambda: None,
) -> FoundCheckpoint | None:
    """Find a checkpoint below `directory` on rank 0; every rank then uses the one in its own directory of that name.
    Return None if there is none. `prepare`: runs on every rank first."""

    def act() -> FoundCheckpoint | None:
        prepare()
        return find() if ranks.rank == 0 else None

    def encode(found: FoundCheckpoint | None) -> list[str | None] | None:
        if found is None:
            return None
        base = Path(os.path.abspath(directory))
        swap = None if found.swap is None else _below(found.swap, base)
        return [_below(found.path, base), swap, *found.lines]

    def decode(value: list[str | None] | None) -> FoundCheckpoint | None:
        if value is None:
            return None
        base = Path(os.path.abspath(directory))
        path, swap = (None if part is None else Path(os.path.normpath(base / part)) for part in value[:2])
        return FoundCheckpoint(path=path or base, swap=swap, lines=tuple(map(str, value[2:])))

    return agree(ranks, LOAD, act, encode=encode, decode=decode)[0]


def _below(path: Path, base: Path) -> str:
    return os.path.relpath(path, base) if path.is_relative_to(base) else str(path)


def check_together(ranks: Collectives, check: Callable[[], TagManifest]) -> None:
    """Check on every rank that the checkpoint can be loaded and that all have read the same. Raises what `check`
    raises."""

    def facts(manifest: TagManifest) -> Any:
        return [manifest.tag, manifest.step, manifest.written_by.created_s]

    found = agree(ranks, f"{LOAD}: its contents", lambda: facts(check()))
    for rank, own in enumerate(found):
        if own != found[0]:
            raise StoreError(
                f"Every rank was expected to find the same checkpoint; rank {rank} has {own}, rank 0 {found[0]} (tag, "
                "step, time). Name a directory that all hosts share."
            )


def write_together(
    ranks: Collectives, tensors: Sequence[WeightTensor], write: Callable[[Sequence[WeightTensor]], None]
) -> None:
    """Call `write` on rank 0 with tensors that are split over ranks; all ranks read each of them, in this order. An
    error of `write` is raised on all ranks once every tensor is read, and the run goes on. A failed read ends the run:
    it is raised on that rank, and as RankError on the others, which wait in that tensor's gather."""
    begun: list[WeightTensor] = []
    failed: list[Exception] = []

    def noting(tensor: WeightTensor) -> WeightTensor:
        def read() -> Iterator[torch.Tensor]:
            begun.append(tensor)
            try:
                yield from tensor.read()
            except Exception as error:
                failed.append(error)
                ranks.fail(f"{_EXPORT}: {tensor.name}: {type(error).__name__}: {error}")
                raise

        return replace(tensor, read=read)

    def act() -> None:
        noted = [noting(tensor) for tensor in tensors]
        try:
            if ranks.rank == 0:
                write(noted)
        except Exception:
            if not failed:
                _read_all(noted[len(begun) :])
            raise
        _read_all(noted[len(begun) :])

    try:
        agree(ranks, _EXPORT, act)
    except RankError:
        if failed:
            raise failed[0] from None  # it has closed the groups
        raise


def _read_all(tensors: Sequence[WeightTensor]) -> None:
    for tensor in tensors:
        deque(tensor.read(), maxlen=0)
