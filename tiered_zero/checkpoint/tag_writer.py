"""Write one tag: into a temporary directory, which gets the tag's name when all of it is durable."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from tiered_zero.checkpoint.save_directory import SaveDirectory, check_tag
from tiered_zero.checkpoint.shares import Share, join_shares
from tiered_zero.checkpoint.tag_manifest import MANIFEST_NAME, TagManifest, file_name
from tiered_zero.errors import ConfigError, StoreError, TransferError
from tiered_zero.io.disk_file import free_text
from tiered_zero.io.engine import IOEngine
from tiered_zero.sizes import MIB, format_nbytes
from tiered_zero.store.files import open_directory, write_new_file
from tiered_zero.store.record_writer import RecordWriter

logger = logging.getLogger("tiered_zero")

_SPARE_NBYTES = 4 * MIB
"""Asked for beyond the records of a tag: its manifest and its directory, whose bytes are known only when they are
written. A manifest has some 45 bytes for each MiB, and 200 for each tensor."""


@final
class TagWriter:
    """One tag that is being written. `with TagWriter.begin(...) as tag:` discards it unless it was published.

    N-1 until the rename, N after it: whatever fails before leaves all earlier tags, and no new one. With many ranks
    rank 0 begins and publishes a tag, and the others join it: each writes data files of its own.
    """

    def __init__(
        self, directory: SaveDirectory, tag: str, name: str, writer: RecordWriter, needed_nbytes: int, *, joins: bool
    ) -> None:
        """`name`: of the temporary directory. Use `begin` or `join`."""
        self.writer, self.tag, self.name = writer, tag, name
        self._directory, self._needed_nbytes, self._joins = directory, needed_nbytes, joins
        self._latest: str | None = None
        self._pointing = threading.Lock()
        self.is_published = False
        """Whether it has its name."""

    @classmethod
    def begin(
        cls,
        save_dir: str | os.PathLike[str],
        tag: str,
        *,
        engine: IOEngine | None = None,
        needed_nbytes: int = 0,
        own_nbytes: int | None = None,
    ) -> TagWriter:
        """Lock the save directory, remove what dead writers left, check the space, make the temporary directory.

        `engine`: None: the tag's own, so that its failure concerns no other transfer. `needed_nbytes`: of all records;
        `own_nbytes`: of those that this process writes, if others join it. Raises StoreError.
        """
        check_tag(tag)
        directory = SaveDirectory.open(save_dir)
        try:
            directory.restore()
            directory.check_replaceable(tag)
            _check_space(directory.path, needed_nbytes)
            name = directory.make_temporary(tag)
        except BaseException as error:
            directory.release()
            if isinstance(error, OSError):
                raise _store_error(directory.path, tag, error, needed_nbytes) from error
            raise
        own_nbytes = needed_nbytes if own_nbytes is None else own_nbytes
        writer = RecordWriter(directory.path / name / file_name(0), engine, needed_nbytes=own_nbytes)
        return cls(directory, tag, name, writer, needed_nbytes, joins=False)

    @classmethod
    def join(
        cls,
        save_dir: str | os.PathLike[str],
        tag: str,
        name: str,
        *,
        rank: int,
        engine: IOEngine | None = None,
        needed_nbytes: int = 0,
    ) -> TagWriter:
        """Write rank `rank`'s part of a tag that rank 0 has begun in the temporary directory `name`. `needed_nbytes`:
        of that part. Raises StoreError if `save_dir` is not rank 0's directory."""
        directory = SaveDirectory.join(save_dir)
        if not (directory.path / name).is_dir():
            directory.release()
            raise StoreError(
                f"{directory.path} is not the directory in which rank 0 has begun checkpoint {tag}: every rank must "
                "name the same one. Name a directory that all hosts share."
            )
        writer = RecordWriter(directory.path / name / file_name(rank), engine, needed_nbytes=needed_nbytes)
        return cls(directory, tag, name, writer, needed_nbytes, joins=True)

    def __enter__(self) -> TagWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Discard what was not published. A failed write, which names the file, is raised as a StoreError."""
        self._end(error)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Discard the tag where the block raises; else it is written on, or published, later."""
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException | None) -> None:
        failure = None
        wrote = isinstance(error, OSError | ConfigError) and (_is_full(error) or self.name in str(error))
        if wrote and isinstance(error, Exception) and not self._directory.fd.closed:
            failure = self._store_error(error)
        self.discard()
        if failure is not None:
            raise failure from error

    @property
    def path(self) -> Path:
        """The path that the tag will have."""
        return self._directory.path / self.tag

    def publish(self, fields: Mapping[str, Any], shares: Sequence[Share], *, save_latest: bool = True) -> TagManifest:
        """Make all durable and give it its name; then `latest`. Raises StoreError: then it is discarded.

        `fields`: of TagManifest, without the tag and what `shares` have. Data, manifest and the new `latest` become
        durable beside each other, before the tag has its name.
        """
        assert not self._joins, "rank 0 publishes"
        no_latest = None
        try:
            stores = tuple(store for share in shares for store in share.stores)
            joined = {"kind": "full", "stores": stores, **join_shares(shares)}
            manifest = TagManifest(**{**joined, **fields}, tag=self.tag)
            self._write_manifest(manifest)
            try:
                self._latest = self._directory.prepare_latest(self.tag) if save_latest else None
            except OSError as error:
                no_latest = error
            self.writer.wait_durable()
            self._give_name()
            if no_latest is not None:
                raise no_latest
            if self._latest is not None:
                self._directory.finish(None, self._latest)
                self._latest = None
        except (OSError, ConfigError) as error:
            if self.is_published:
                raise StoreError(f"{self.path} is complete, but `latest` could not be written: {error}.") from error
            raise self._store_error(error) from error
        finally:
            self.discard()
        return manifest

    def prepare_pointer(self, fields: Mapping[str, Any], *, save_latest: bool = True) -> None:
        """Write a tag without files of its own, as far as it can be made durable before its state is. Any thread,
        beside the commit that it points to; nothing, once it is discarded. Raises OSError, StoreError."""
        with self._pointing:
            if not self._directory.fd.closed:
                self._write_manifest(TagManifest(**fields, tag=self.tag))
                self._latest = self._directory.prepare_latest(self.tag) if save_latest else None

    def publish_pointer(self) -> None:
        """Give the prepared tag its name, and `latest` its value: the state is durable. Raises OSError, StoreError."""
        try:
            self._give_name(self._latest)
            self._latest = None
        finally:
            self.discard()

    def _give_name(self, latest: str | None = None) -> None:
        """`latest`: see `SaveDirectory.finish`. Raises OSError before the tag has its name, and StoreError after that:
        `name` may then be what the tag has replaced, which stays."""
        replaced = self._directory.rename(self.name, self.tag)
        self.is_published = True
        try:
            self._directory.finish(replaced, latest)
        except OSError as error:
            kept = "" if replaced is None else f" The one that it replaced is kept as {replaced}, until the next save."
            raise StoreError(
                f"{self.path} is complete and has its name, which may not be durable: {error}.{kept} Look at the "
                "kernel's log, and save again, or elsewhere."
            ) from error

    def discard(self) -> None:
        """Remove what was written, unless it was published; end the lock. Idempotent; logs a failure. Waits for a
        `prepare_pointer`."""
        with self._pointing:
            self._discard()

    def _discard(self) -> None:
        try:
            self.writer.close()
            if not self._directory.fd.closed and not self._joins and not self.is_published:
                with suppress(FileNotFoundError):
                    self._directory.remove(self.name)
            if not self._directory.fd.closed and self._latest is not None:
                with suppress(FileNotFoundError):
                    os.unlink(self._latest, dir_fd=self._directory.fd)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", self._directory.path / self.name, error)
        self._directory.release()

    def _store_error(self, error: Exception) -> StoreError:
        return _store_error(self._directory.path, self.tag, error, self._needed_nbytes)

    def _write_manifest(self, manifest: TagManifest) -> None:
        """Write it to the temporary directory, and make both durable. Raises OSError, StoreError."""
        data = manifest.encode()
        with open_directory(self.name, self._directory.fd) as fd:
            write_new_file(MANIFEST_NAME, [data], fd)
            os.fsync(fd)


def _check_space(path: Path, tensors_nbytes: int) -> None:
    """Raises StoreError."""
    status = os.statvfs(path)
    free_nbytes = status.f_bavail * status.f_frsize
    needed_nbytes = tensors_nbytes + _SPARE_NBYTES
    if free_nbytes < needed_nbytes:
        raise StoreError(
            f"The checkpoint needs {format_nbytes(needed_nbytes)} ({needed_nbytes} bytes) in {path}: "
            f"{format_nbytes(tensors_nbytes)} of tensors, and {format_nbytes(_SPARE_NBYTES)} that are kept for its "
            f"manifest; {format_nbytes(free_nbytes)} ({free_nbytes} bytes) are free. Free space "
            "there, `tiered-zero checkpoint prune` it, or save elsewhere. What was saved before is untouched."
        )


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _store_error(path: Path, tag: str, error: Exception, needed_nbytes: int) -> StoreError:
    """Return what stopped a save as one error; a full disk by its name."""
    if _is_full(error):
        needed = f" It needs {format_nbytes(needed_nbytes)}." if needed_nbytes else ""
        return StoreError(
            f"The disk is full: checkpoint {tag} could not be written to {path}; {free_text(str(path / tag))}.{needed} "
            f"Free space there, or save elsewhere. What was saved before is untouched. ({error})"
        )
    kind = "" if isinstance(error, TransferError | ConfigError) else f"{type(error).__name__}: "
    return StoreError(
        f"Checkpoint {tag} could not be written to {path}: {kind}{error} What was saved before is untouched."
    )
