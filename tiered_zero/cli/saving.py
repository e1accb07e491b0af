"""Saves and resumption of `tiered-zero train`: when, and a line for each."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from tiered_zero.checkpoint.driver import read_client_state
from tiered_zero.checkpoint.tag import find_checkpoint, list_tags, nothing_to_load, open_reader
from tiered_zero.engine.engine import Engine
from tiered_zero.errors import BudgetError, ConfigError, ModelError, StoreError, TransferError, UntaggedCommitError
from tiered_zero.sizes import format_nbytes

logger = logging.getLogger("tiered_zero")

_STATE_KEY, _LOSS = "tiered_zero.train", "loss"

MODEL = "--model"
"""The option without which a checkpoint does not fit."""


@final
class Saver:
    """Saves one run to `directory` every `every` steps (None: when it is asked to). Main thread.

    A save that fails, on a full disk for example, is logged, and training goes on: earlier checkpoints stay.
    """

    def __init__(self, engine: Engine, directory: Path, every: int | None, options: Mapping[str, Any]) -> None:
        """`options`: of the command line, that the numbers depend on; kept with the state."""
        self._engine, self._directory, self._every = engine, directory, every
        self._options = dict(options)
        self._begun: tuple[Path, float] | None = None
        """The save whose end is not in the log yet: where it is to be, and when it began."""
        self._tried_step = engine.global_steps
        """The last that was to be saved."""
        self._saved_step: int | None = engine.global_steps

    def after_step(self, loss: float) -> None:
        """Save, if it is time to. `loss`: of the step."""
        self._options[_LOSS] = loss
        if self._every is not None and self._engine.global_steps % self._every == 0:
            self._save()

    def finish(self) -> bool:
        """Save the last step, unless that was tried, and wait until it is durable. Return whether it is saved."""
        if self._engine.global_steps != self._tried_step:
            self._save("at the end of training")
        self._end_save()
        return self._saved_step == self._engine.global_steps

    def _save(self, then: str = "and training goes on") -> None:
        self._end_save()
        step = self._tried_step = self._engine.global_steps
        begun = self._directory / f"global_step{step}", time.time()
        try:
            self._engine.save_checkpoint(self._directory, client_state={_STATE_KEY: self._options})
        except (StoreError, TransferError, BudgetError) as error:
            if self._is_found(error):
                logger.error("%s", error)
                self._saved_step = step
            else:
                logger.error("step %d was not saved, %s: %s", step, then, error)
                self._saved_step = None
            return
        self._begun, self._saved_step = begun, step
        if not self._engine.config.tiered_zero.checkpoint.async_save:
            self._end_save()

    def _is_found(self, error: Exception) -> bool:
        """Whether the save that failed has committed its step in place, and an older tag leads --resume to it."""
        try:
            return isinstance(error, UntaggedCommitError) and find_checkpoint(self._directory).swap is not None
        except StoreError:
            return False

    def _end_save(self) -> None:
        """Wait for a save beside training. Log that it is durable; the log has its error."""
        if self._begun is None:
            return
        (path, began_s), self._begun = self._begun, None
        try:
            self._engine.flush()
        except (StoreError, TransferError, BudgetError):
            self._saved_step = None
            return
        if self._engine.global_rank > 0:  # a file system over a network may show it later there
            return
        files = [entry.stat() for entry in os.scandir(path) if entry.is_file(follow_symlinks=False)]
        nbytes = format_nbytes(sum(file.st_size for file in files))
        in_place = (
            " besides the state, which is committed in place," * self._engine.config.tiered_zero.checkpoint.in_place
        )
        seconds = max(0.0, path.stat().st_ctime - began_s)
        logger.info("saved %s: %s%s in %.2f s", path, nbytes, in_place, seconds)


@final
class Resumption:
    """Goes on from the newest complete checkpoint in a directory, if there is one; None: never. Main thread."""

    def __init__(self, directory: Path | None, options: Mapping[str, Any], *, in_place: bool) -> None:
        """`options`: as of `Saver`. `in_place`: whether the run commits in place, and is adopted when it starts."""
        self._directory, self._options = directory, options
        self._adopts = in_place
        self.path: str | None = None
        """Where the state came from."""
        self.loss: float | None = None
        """Of the last step that is not made again."""
        if directory is not None and not _has_checkpoint(directory):
            self._directory = None

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The config that an engine is to be made of. Raises StoreError, and ConfigError for another model."""
        if self._directory is not None:
            self._compare(self._directory)
        result = dict(settings)
        if self._directory is not None and self._adopts:
            own = dict(result.get("tiered_zero") or {})
            checkpoint = {**(own.get("checkpoint") or {}), "resume": str(self._directory)}
            result["tiered_zero"] = {**own, "checkpoint": checkpoint}
        return result

    def load(self, engine: Engine) -> None:
        """Load into an engine that was made of `settings`, and say from where. Raises StoreError, ModelError."""
        if self._directory is None:
            return
        try:
            path, client_state = engine.resumed or engine.load_checkpoint(self._directory)
        except ModelError as error:  # which names arguments of load_checkpoint
            raise ModelError(
                f"--resume: {error} `tiered-zero train` has no such arguments: take the config of the run in "
                f"{self._directory}, or give another directory to --save."
            ) from error
        self.path = str(path)
        saved = client_state.get(_STATE_KEY)
        self.loss = saved.get(_LOSS) if isinstance(saved, dict) else None
        logger.info("resumed from %s: %d steps, and their batches, are not made again", self.path, engine.global_steps)

    def _compare(self, directory: Path) -> None:
        """Compare the options of the command line with those of the run that has saved."""
        with open_reader(find_checkpoint(directory)) as reader:
            saved = read_client_state(reader.manifest.driver).get(_STATE_KEY)
        if not isinstance(saved, dict):
            return
        for name, value in self._options.items():
            if name not in saved or saved[name] == value:
                continue
            if name == MODEL:
                raise ConfigError(
                    f"--resume: the run in {directory} trains --model {saved[name]}; found {value}. Give that, or "
                    "another directory to --save."
                )
            logger.warning("%s was %s where the checkpoint was saved, and is %s now", name, saved[name], value)


def warn_of_others(directory: Path) -> None:
    """Say that a run which begins anew saves beside, and over, the checkpoints of another. Raises StoreError."""
    tags = list_tags(directory) if directory.exists() else []
    if tags:
        logger.warning(
            "%s has checkpoints of another run, up to %s, and this one begins at step 0: it replaces those of the "
            "steps that it saves. To go on from them, stop it now and add --resume",
            directory,
            tags[-1].tag,
        )


def _has_checkpoint(directory: Path) -> bool:
    """Whether `directory` holds something to load or to refuse; log why not. Raises StoreError."""
    if why := nothing_to_load(directory):
        logger.info("no checkpoint in %s yet (%s): starting at step 0", directory, why)
    return not why
