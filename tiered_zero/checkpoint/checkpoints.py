"""Save and load one run, for the engine's `save_checkpoint` and `load_checkpoint`.

A save runs on the driver thread (the one that calls the engine), between two updates:

    _agree_on_save    every rank captures what a script may change; all ranks must want the same tag of the same step
    _begin_tag        rank 0 begins the tag, the others join it
    write, publish    every rank writes its share, and rank 0 publishes all shares as one tag; a save in place commits
                      the swap files instead (`Commits.save`)

With checkpoint.async and one rank, this last step runs during training (`AsyncSave`). Such a save is durable when a
later save, load, flush or close has returned; the first of these calls raises the error of a failed save."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from tiered_zero.checkpoint.driver import EVERYTHING, DriverState, LoadParts
from tiered_zero.checkpoint.in_place import SAVE, Adoption, Commits
from tiered_zero.checkpoint.index import RunState, Share, TagManifest, WrittenBy
from tiered_zero.checkpoint.load import Matched, StateLoader, differences, match
from tiered_zero.checkpoint.save import AsyncSave, Capture
from tiered_zero.checkpoint.tag import FoundCheckpoint, find_checkpoint, nothing_to_load, open_reader
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.concurrency.interrupts import hold_interrupts
from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.config.schema import Config
from tiered_zero.errors import ConfigError, ModelError, StoreError
from tiered_zero.hardware.ranks.collectives import Collectives, agree
from tiered_zero.plan.planner import Plan
from tiered_zero.update.policy import UpdatePolicy

logger = logging.getLogger("tiered_zero")

_LOAD: Final = "load_checkpoint"


@final
class Checkpoints:
    """Saves and loads one run. Called on the driver thread (the one that calls the engine)."""

    def __init__(
        self,
        state: RunState,
        policy: UpdatePolicy,
        driver: DriverState,
        written_by: Mapping[str, Any],
        *,
        config: Config,
        commits: Commits | None = None,
    ) -> None:
        """`policy`: runs the updates. Loads wait for them, and so do saves that are not asynchronous. `driver`: saves
        everything but weights and optimizer state. `written_by`: the fields of `WrittenBy` except the time. `commits`:
        commits the swap files in place; None: each save writes new files."""
        settings = config.tiered_zero.checkpoint
        self._state = state
        self._policy = policy
        self._weights = state.weights
        self.driver = driver
        self._written_by = dict(written_by)
        self._convert = settings.convert
        self._ranks = state.runtime.collectives
        self._is_async = settings.async_save and self._ranks.world_size == 1 and commits is None
        self._tag_validation = config.checkpoint.tag_validation
        self._commits = commits
        self.async_save = AsyncSave()
        self.resumed: tuple[Path, dict[str, Any]] | None = None
        """Path and client_state of the checkpoint from which the run resumed."""

    # -- save ----------------------------------------------------------------------------------------------------------

    def save(
        self,
        save_dir: str | os.PathLike[str],
        begin: Callable[[], tuple[int, str]],
        client_state: Mapping[str, Any],
        *,
        save_latest: bool = True,
        exclude_frozen: bool = False,
    ) -> None:
        """Save the state after the last step as a tag. The tag is durable on return, unless the save is asynchronous.
        Every rank calls this; it returns on all ranks, or raises on all. `begin`: checks that a save is allowed now,
        and returns the step and the tag's name. `save_latest`: whether to write the name to the file `latest`. Raises
        the errors of this save, and those of an earlier asynchronous save."""
        fields: dict[str, Any] = {}
        captured: list[Capture] = []
        arguments = {"save_latest": save_latest, "exclude_frozen_parameters": exclude_frozen}

        def capture() -> _Wanted:
            step, tag = begin()
            self.wait()
            if not self._is_async:
                with self._policy.failures.surfacing():
                    self._policy.finish()
            fields.update(
                step=step,
                driver=self.driver.capture(client_state),
                written_by=WrittenBy(**self._written_by, created_s=time.time()),
                aliases=self._state.aliases,
            )
            if self._commits is None:
                own = Capture.take(self._state, fields, with_frozen=not exclude_frozen, save_latest=save_latest)
                captured.append(own)
            return _Wanted(tag=tag, step=step, arguments=arguments, nbytes=sum(own.needed_nbytes for own in captured))

        wanted = _agree_on_save(self._ranks, capture, self._tag_validation)
        if self._commits is not None and exclude_frozen:
            logger.warning("exclude_frozen_parameters has no effect on an in-place commit, which has all at rest")
        ready = self._state.runtime.accelerator.record_compute()
        tag = _begin_tag(self._ranks, save_dir, wanted)
        if self._is_async:
            self.async_save.start(self._state, self._policy, tag, captured[0], ready)
            return
        with tag:
            if self._commits is None:
                self._write(tag, captured[0], ready)
            else:
                self._commits.save(tag, fields, save_latest=save_latest)

    def _write(self, tag: TagWriter, capture: Capture, ready: Transfer) -> None:
        """Write this rank's share of the tag. Then, on rank 0, publish the shares of all ranks. `ready`: completes when
        the device has computed the values to save."""
        is_first = self._ranks.rank == 0

        def write() -> Share:
            self._state.pipeline.cancel_prefetch()  # to free staging buffers, which the save needs
            try:
                with tag.writing():  # here, so that all ranks raise the same error
                    share = capture.write(self._state, tag, ready, self._state.view.scalars)
                    if not is_first:
                        tag.writer.wait_durable()
                return share
            finally:
                self._state.pipeline.prefetch()

        decode = Share.model_validate_json
        shares = agree(self._ranks, f"{SAVE}: the files", write, encode=Share.model_dump_json, decode=decode)
        agree(self._ranks, f"{SAVE}: the manifest", lambda: capture.publish(tag, shares) if is_first else None)

    def wait(self) -> None:
        """Wait for the asynchronous save under way, if there is one. If it failed, raise its error, once."""
        if self.async_save.tag is not None:
            self.async_save.wait()

    # -- load ----------------------------------------------------------------------------------------------------------

    def find(
        self, load_dir: str | os.PathLike[str], tag: str | None, begin: Callable[[], None]
    ) -> FoundCheckpoint | None:
        """Wait for the running update and save, evict the units, and find the checkpoint to load. Without `tag`, find
        the tag that the file `latest` names or, if it cannot be loaded, the newest that can; return None if nothing is
        saved in `load_dir`. `begin`: checks that a load is allowed now. Raises StoreError."""

        def look() -> FoundCheckpoint | None:
            if tag is None and (why := nothing_to_load(load_dir)):
                logger.warning("no checkpoint in %s is loaded: %s. Pass a tag to expect one.", load_dir, why)
                return None
            found = find_checkpoint(load_dir, tag)
            for line in found.lines:
                logger.warning("%s", line)
            return found

        def prepare() -> None:
            begin()
            self.wait()
            with self._policy.failures.surfacing():
                self._policy.finish(before_write=True)
                self._weights.pager.invalidate_all()  # raises while units are in use

        return find_together(self._ranks, load_dir, look, prepare)

    def resume(self, found: FoundCheckpoint, adoption: Adoption | None, place: Callable[[], None]) -> None:
        """Load `found`, the checkpoint that tiered_zero.checkpoint.resume in the config names. `adoption`, `place`: see
        `load`."""
        self.resumed = found.path, self.load(found, EVERYTHING, adoption=adoption, place=place)

    def load(
        self,
        found: FoundCheckpoint,
        parts: LoadParts,
        *,
        strict: bool = True,
        adoption: Adoption | None = None,
        place: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint into the run and return its client_state. First every rank checks everything except the
        values of tensors and the learning rate scheduler's state. An error after these checks makes the engine
        unusable. `strict`: refuse missing and unexpected names; False: log them. `adoption`: given if `found` is an
        in-place commit whose swap files this run has taken over; None: copy the values. `place`: puts the model on its
        tiers after the checks; None: the model is there already. Raises ModelError, ConfigError, StoreError,
        CorruptionError, TransferError, and what the scheduler raises."""
        with ExitStack() as opened:
            checked: list[tuple[Callable[[], None], dict[str, Any]]] = []

            def check() -> TagManifest:
                if adoption is not None:
                    assert self._commits is not None, "a run that adopts commits in place"
                    matched, driver = self._check(adoption.manifest, parts, strict)
                    checked.append((partial(self._commits.restore, adoption, matched), driver))
                    return adoption.manifest
                own_runs = () if self._commits is None else self._commits.run_ids
                reader = opened.enter_context(open_reader(found, own_runs))
                matched, driver = self._check(reader.manifest, parts, strict)
                checked.append((StateLoader(self._state, reader, matched).load, driver))
                return reader.manifest

            _check_together(self._ranks, check)
            if place is not None:
                place()
                self._weights.pager.invalidate_all()
            load_tensors, driver = checked[0]
            self._overwrite(found.path, load_tensors, driver, parts)
            return dict(driver["client_state"])

    @hold_interrupts()
    def _overwrite(
        self, path: Path, load_tensors: Callable[[], None], driver: dict[str, Any], parts: LoadParts
    ) -> None:
        """Overwrite the run's state. If that raises, latch the engine. `path`: the checkpoint's path, for errors.
        `load_tensors`: overwrites weights and optimizer state. `driver`: the result of `DriverState.check`."""

        def overwrite() -> None:
            self.driver.restore_optimizer(driver, parts)
            load_tensors()
            self.driver.restore(driver, parts)

        try:
            agree(self._ranks, f"{_LOAD}: its values", overwrite)
            self._weights.end_update()
        except BaseException as error:
            # some values are new, some old and some 0
            self._policy.latch(f"Loading {path} ended in its middle, by {type(error).__name__}")
            raise

    def _check(self, manifest: TagManifest, parts: LoadParts, strict: bool) -> tuple[Matched, dict[str, Any]]:
        """Check that a checkpoint fits this run, without reading its tensors. Return the keys to load, and the state
        for `DriverState.restore`."""
        with_state = parts.optimizer_states and not parts.module_only and self.driver.optimizer is not None
        matched = match(self._state, manifest, strict=strict, with_state=with_state, convert=self._convert)
        driver = self.driver.check(manifest.driver, parts, self._ranks)
        for line in differences(vars(manifest.written_by), self._written_by) if with_state else ():
            logger.warning("%s", line)
        return matched, driver


def check_async(config: Config, plan: Plan) -> None:
    """Check that saves during training (checkpoint.async) are safe with this placement. Raises ConfigError."""
    settings = config.tiered_zero
    if not settings.checkpoint.async_save or settings.checkpoint.in_place:
        return
    needs_params = settings.state_format == "bf16_remainder" and plan.nbytes("nvme", "param")
    if "nvme" in plan.tiers.state or needs_params:
        # the next update would overwrite bytes that the save has not read yet
        what = "parameters, which are half of the masters," if needs_params else "optimizer state"
        raise ConfigError(
            f"tiered_zero.checkpoint.async: expected {what} in memory, where an update waits for the bytes of its own "
            "sub-group alone; found them on nvme, where the next update rewrites them. Set "
            "tiered_zero.checkpoint.in_place, which commits them where they are, or leave async out."
        )


# -- what all ranks decide together ------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """One rank's request to save. `arguments`: the call's arguments that must be equal on all ranks. `nbytes`: the most
    bytes that this rank will write."""

    tag: str
    step: int
    arguments: Mapping[str, Any]
    nbytes: int


def _agree_on_save(ranks: Collectives, ask: Callable[[], _Wanted], tag_validation: str) -> list[_Wanted]:
    """Exchange the save requests of all ranks, and return them. The save uses rank 0's tag. `ask`: returns this rank's
    request. `tag_validation`: what to do if tags differ (Warn, Fail, Ignore). Raises ModelError if steps or arguments
    differ, or if tags differ and `tag_validation` is Fail."""
    wanted = agree(ranks, SAVE, ask, encode=vars, decode=lambda value: _Wanted(**value))
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
    return wanted


def _begin_tag(ranks: Collectives, save_dir: str | os.PathLike[str], wanted: Sequence[_Wanted]) -> TagWriter:
    """Begin the tag on rank 0, then join it on the other ranks. Return this rank's writer. `wanted`: one request to
    save from each rank."""
    tag, rank = wanted[0].tag, ranks.rank
    sizes = [own.nbytes for own in wanted]
    begun: list[TagWriter] = []

    def begin() -> str:
        if rank == 0:
            needed, own = sum(sizes), sizes[0]
            begun.append(TagWriter.begin(save_dir, tag, needed_nbytes=needed, own_nbytes=own))
        return begun[0].save_id if begun else ""

    def join(save_id: str) -> None:
        if rank > 0:
            begun.append(TagWriter.join(save_dir, tag, save_id, rank=rank, needed_nbytes=sizes[rank]))

    try:
        save_id = agree(ranks, f"{SAVE}: its directory", begin)[0]
        agree(ranks, f"{SAVE}: its directory on every rank", partial(join, save_id))
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
    """Call `prepare` on every rank and `find` on rank 0. Return rank 0's result on every rank. A path in the result
    below rank 0's `directory` becomes a path below this rank's `directory`. If a call raises on one rank, every rank
    raises."""

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

    return agree(ranks, _LOAD, act, encode=encode, decode=decode)[0]


def _below(path: Path, base: Path) -> str:
    return os.path.relpath(path, base) if path.is_relative_to(base) else str(path)


def _check_together(ranks: Collectives, check: Callable[[], TagManifest]) -> None:
    """Call `check` on every rank. Raises the error of any rank, and StoreError if ranks read different checkpoints."""

    def facts(manifest: TagManifest) -> Any:
        return [manifest.tag, manifest.step, manifest.written_by.created_s]

    found = agree(ranks, f"{_LOAD}: its contents", lambda: facts(check()))
    for rank, own in enumerate(found):
        if own != found[0]:
            raise StoreError(
                f"Every rank was expected to find the same checkpoint; rank {rank} has {own}, rank 0 {found[0]} (tag, "
                "step, time). Name a directory that all hosts share."
            )
