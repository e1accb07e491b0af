"""A save in place: the commit, and the tag that points to it. See [Note: In-place commits].

With one rank it is done at its place between two updates, on the lane where updates run. With many, each rank copies
and lists there what it commits; the driver threads then agree: all prepare, rank 0 decides, the others follow. It is
one step on all of them, whatever ends the run: until rank 0 has decided no rank releases a byte of the commit before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from tiered_zero.checkpoint.commit import COMMIT_ID, Commits
from tiered_zero.checkpoint.driver import join_states, own_state
from tiered_zero.checkpoint.index import Share, TagManifest
from tiered_zero.checkpoint.last_save import QueuedSave
from tiered_zero.checkpoint.ranks import SAVE
from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import StoreError, UntaggedCommitError
from tiered_zero.hardware.ranks.agreement import agree
from tiered_zero.hardware.runtime import Runtime


@final
@dataclass(frozen=True, kw_only=True)
class InPlaceSave:
    """One save. `fields`: of TagManifest, with this rank's driver state, as `DriverState.capture` gives it.

    `at_cut(act)`: returns what is made between two updates, which ends `save`.
    """

    commits: Commits
    save: QueuedSave
    fields: Mapping[str, Any]
    save_latest: bool
    runtime: Runtime
    at_cut: Callable[[Callable[[], Any]], Any]

    def run(self) -> None:
        """Return when it is durable. Driver thread. Raises UntaggedCommitError and others."""
        if self.runtime.collectives.world_size == 1:
            self.at_cut(self._commit_alone)
            return
        try:
            self._commit_together()
        finally:
            self.save.discard()  # unless it was published

    def _commit_alone(self) -> None:
        pointer = self._prepare_pointer()
        try:
            self.commits.commit(self._manifest([]), [self._share(self.fields["driver"])])
        except BaseException:
            _end(pointer)  # it writes to what is discarded next
            raise
        self._publish(pointer)

    def _commit_together(self) -> None:
        ranks, pointers = self.runtime.collectives, list[Transfer]()
        is_first = ranks.rank == 0

        def share() -> Share:
            made: Share = self.at_cut(lambda: self._share(own_state(self.fields["driver"])))
            return made

        shares = agree(ranks, f"{SAVE}: what it commits", share, encode=Share.encode, decode=Share.decode)

        def prepare() -> None:
            if is_first:
                pointers.append(self._prepare_pointer())
            self.commits.prepare(self._manifest(shares), shares)

        def follow() -> None:
            self.commits.confirm()
            for pointer in pointers:
                self._publish(pointer)

        try:
            self._prepare_together(prepare)
            agree(ranks, f"{SAVE}: its decision", lambda: self.commits.decide() if is_first else None)
            agree(ranks, f"{SAVE}: its tag", follow)
        except UntaggedCommitError as error:
            raise UntaggedCommitError(str(error), self.fields["step"]) from error
        finally:
            for pointer in pointers:
                _end(pointer)

    def _prepare_together(self, prepare: Callable[[], None]) -> None:
        """Raises the error of a rank that could not, on all of them: nothing is prepared then. After any other it is
        not known whether rank 0 decides, and what is prepared stays beside the commit before."""
        failed: list[Exception] = []

        def attempt() -> str | None:
            try:
                prepare()
            except Exception as error:
                failed.append(error)
                return str(error)
            return None

        texts = agree(self.runtime.collectives, f"{SAVE}: the commit", attempt)
        wrong = [f"Rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if wrong:
            self.commits.cancel()
            raise failed[0] if failed else StoreError(wrong[0])

    def _share(self, driver: Mapping[str, Any]) -> Share:
        return self.commits.share(driver, self.fields["swap"][COMMIT_ID])

    def _manifest(self, shares: list[Share]) -> TagManifest:
        """Return the manifest of the commit without the `shares`, which `metadata_of` adds."""
        driver = join_states(self.fields["driver"], [share.driver for share in shares])
        return TagManifest(**{**self.fields, "driver": driver}, tag=self.save.tag.tag)

    def _prepare_pointer(self) -> Transfer:
        fields = {**self.fields, "driver": {}}
        prepare = partial(self.save.tag.prepare_pointer, fields, save_latest=self.save_latest)
        return self.runtime.accelerator.lane("save").submit(prepare)

    def _publish(self, pointer: Transfer) -> None:
        tag, step = self.save.tag, self.fields["step"]
        try:
            pointer.wait()
            tag.publish_pointer()
        except Exception as error:
            swap = self.fields["swap"]["paths"][0]
            raise UntaggedCommitError(
                f"Step {step} is committed in {swap}, but its tag {tag.path} was not made durable: {error} "
                "Earlier tags of this run lead to the commit, and so does tiered_zero.checkpoint.resume = "
                f"{swap!r}. Free space there, or save elsewhere: the next save writes a tag.",
                step,
            ) from error


def _end(pointer: Transfer) -> None:
    with suppress(Exception):
        pointer.wait()
