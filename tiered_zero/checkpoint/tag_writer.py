"""Write, publish and remove tags (saved checkpoints) in a save directory, under one lock.

A tag is a directory. Its `manifest.json` names the save whose data files belong to it. A save writes data files with
new names. If it replaces a tag, the old data files stay until one rename of `manifest.json` publishes the save. The
lock file names the save and the tag that a process is changing. After a crash, the next process removes the files left
behind."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, final

from tiered_zero.checkpoint.index import (
    DATA_FILE,
    LATEST_NAME,
    MANIFEST_NAME,
    Share,
    TagManifest,
    check_tag,
    file_name,
    join_shares,
)
from tiered_zero.errors import ConfigError, StoreError, TransferError
from tiered_zero.io.engine import free_text
from tiered_zero.io.select import PROBE_PREFIX
from tiered_zero.record.data_files import RecordWriter
from tiered_zero.record.files import (
    MOST_NBYTES,
    confirm_file,
    discard_file,
    error_text,
    kind_text,
    lock_file,
    next_path,
    open_directory,
    prepare_file,
    read_file,
    sync_directory,
    unlock,
)
from tiered_zero.sizes import MIB, format_nbytes
from tiered_zero.system import Descriptor

logger = logging.getLogger("tiered_zero")

_SPARE_NBYTES = 4 * MIB
"""Free bytes that a save requires for the tag's manifest and directory. A manifest takes about 45 bytes per MiB of
data, and 200 bytes per tensor."""


# -- the save directory ------------------------------------------------------------------------------------------------

LOCK_NAME: Final = ".tiered_zero.lock"


def change_under_way(save_dir: Path) -> tuple[str, str]:
    """Return the save id and the tag that the lock file names; ("", "") if it names none. A process is changing files
    of this save, or has ended before the change was complete."""
    try:
        with open_directory(os.path.realpath(save_dir)) as fd:
            save_id, _, tag = read_file(LOCK_NAME, fd, most_nbytes=4096).decode().partition(" ")
        return save_id, check_tag(tag)
    except (OSError, ValueError, StoreError):
        return "", ""


@final
class SaveDirectory:
    """A save directory, locked by flock until `release`. One thread uses it."""

    def __init__(self, path: Path, lock: Descriptor) -> None:
        """Use `open` instead."""
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, save_dir: str | os.PathLike[str]) -> SaveDirectory:
        """Lock a save directory, and remove files that a dead writer has left in it. Make the directory and its parents
        (mode 0700) if missing. Raises StoreError."""
        try:
            path = Path(os.path.realpath(save_dir))
            for place in reversed((path, *path.parents)):
                if not place.exists():
                    with suppress(FileExistsError):
                        os.mkdir(place, 0o700)
                    sync_directory(place.parent)
            with open_directory(path) as fd:
                directory = cls(path, lock_file(LOCK_NAME, fd, os.O_CREAT))
        except BlockingIOError as error:
            raise StoreError(
                f"Another process is writing a checkpoint in {save_dir}. Wait for it, or give each run its own "
                "directory."
            ) from error
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise StoreError(
                f"Checkpoints cannot be saved to {os.fspath(save_dir)!r}: {error_text(error)}. Name a directory of "
                "your own, on a disk with file locks, which all ranks share."
            ) from error
        if os.fstat(directory._lock).st_size:
            directory._restore()
        return directory

    def begin(self, tag: str, save_id: str) -> None:
        """Note in the lock file, durably, that files of the save `save_id` will be written to `tag` or removed from it.
        Make the tag's directory if missing. Raises OSError, and StoreError if the name is taken by a file or a link."""
        path = self.path / tag
        if os.path.lexists(path) and not stat.S_ISDIR(mode := os.lstat(path).st_mode):
            raise StoreError(f"{path} is {kind_text(mode)}, and is not replaced by a checkpoint. Name another tag.")
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{save_id} {tag}".encode(), 0)
        os.fsync(self._lock)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        sync_directory(self.path)

    def end(self, tag: str, save_id: str, *, is_published: bool) -> int:
        """End the change that `begin` began. If the save is published, remove the data files of the tag's older saves;
        else remove the files of this save. Return the bytes freed on disk. If files cannot be removed, log that and
        return 0."""
        path, nbytes = self.path / tag, 0
        try:
            for name in os.listdir(path):
                own = DATA_FILE.fullmatch(name)
                if name.startswith(PROBE_PREFIX) or (own is not None and (own[1] == save_id) != is_published):
                    nbytes += os.lstat(path / name).st_blocks * 512
                    os.unlink(path / name)
            if nbytes:
                sync_directory(path)  # before the lock file forgets the save
            if is_published:
                os.ftruncate(self._lock, 0)
            else:
                discard_file(path / MANIFEST_NAME)
                discard_file(self.path / LATEST_NAME)
                with suppress(OSError):  # an earlier save, or files of other programs
                    os.rmdir(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("Files in %s cannot be removed: %s. Remove them by hand.", path, error_text(error))
            return 0
        return nbytes

    def remove(self, tag: str, save_id: str) -> None:
        """Remove a tag that the save `save_id` has written. Raises OSError if the manifest cannot be removed durably;
        the tag may then still be loaded."""
        try:
            self.begin(tag, save_id)
        except OSError as error:
            if not _is_full(error):
                raise
            # the lock file needs a block, which this removal frees: no later process ends it if this one is killed
        os.unlink(self.path / tag / MANIFEST_NAME)
        sync_directory(self.path / tag)
        self.end(tag, save_id, is_published=False)

    def _restore(self) -> None:
        """Remove files that a dead writer has left. Keep them if the tag's manifest cannot be read."""
        save_id, tag = change_under_way(self.path)
        if not tag:
            return
        try:
            is_published = _save_id(self.path / tag) == save_id
        except (OSError, StoreError) as error:
            logger.warning("%s: what a writer left when it ended stays: %s", self.path / tag, error_text(error))
            return
        if nbytes := self.end(tag, save_id, is_published=is_published):
            logger.warning(
                "%s: removed %s, which a writer of checkpoint %s left when it ended.",
                *(self.path, format_nbytes(nbytes), tag),
            )

    def release(self) -> None:
        """Release the lock, even if a forked child has inherited it. Idempotent."""
        unlock(self._lock)


def _save_id(path: Path) -> str:
    """Return the id of the save that is published as the tag at `path`; "" if there is none. Raises OSError,
    StoreError."""
    try:
        sync_directory(path)  # its name may not be durable yet
        with open_directory(path) as fd:
            return TagManifest.decode(read_file(MANIFEST_NAME, fd, most_nbytes=MOST_NBYTES), path).save_id
    except FileNotFoundError:
        return ""


# -- one tag -----------------------------------------------------------------------------------------------------------


@final
class TagWriter:
    """Writes one save to a tag, and publishes it. Rank 0 begins and publishes a save; the other ranks join it with
    their own data files. The end of a `with` block releases the lock, and discards a save that is not published."""

    def __init__(
        self,
        path: Path,
        save_id: str,
        writer: RecordWriter,
        needed_nbytes: int,
        directory: SaveDirectory | None = None,
    ) -> None:
        """Use `begin` or `join` instead. `path`: the tag's directory. `directory`: the locked save directory; None on
        ranks other than 0."""
        self.path, self.save_id, self.writer = path, save_id, writer
        self.tag = path.name
        self._needed_nbytes = needed_nbytes
        self._directory = directory
        self._has_latest = False
        self.is_published = False
        """Whether this save is published: its manifest is the tag's manifest."""

    @classmethod
    def begin(
        cls,
        save_dir: str | os.PathLike[str],
        tag: str,
        *,
        needed_nbytes: int = 0,
        own_nbytes: int | None = None,
    ) -> TagWriter:
        """Begin a save on rank 0: lock the save directory, remove a dead writer's files, check the free space, make the
        tag's directory. `needed_nbytes`: bytes of all ranks' records. `own_nbytes`: bytes of this rank's records; None:
        `needed_nbytes`. Raises StoreError."""
        save_id = secrets.token_hex(6)
        check_tag(tag)
        directory = SaveDirectory.open(save_dir)
        path = directory.path / tag
        try:
            _check_space(directory.path, needed_nbytes)
            directory.begin(tag, save_id)
        except BaseException as error:
            directory.release()
            if isinstance(error, OSError):
                raise _store_error(path, error, needed_nbytes) from error
            raise
        own_nbytes = needed_nbytes if own_nbytes is None else own_nbytes
        writer = RecordWriter(path / file_name(0, save_id), needed_nbytes=own_nbytes)
        return cls(path, save_id, writer, needed_nbytes, directory)

    @classmethod
    def join(
        cls, save_dir: str | os.PathLike[str], tag: str, save_id: str, *, rank: int, needed_nbytes: int = 0
    ) -> TagWriter:
        """Join the save `save_id` that rank 0 has begun, and return the writer of this rank's part. `needed_nbytes`:
        bytes of this part. Raises StoreError if `save_dir` is not rank 0's directory."""
        path = Path(os.path.realpath(save_dir)) / tag
        if change_under_way(path.parent) != (save_id, tag):
            raise StoreError(
                f"{path.parent} is not the directory in which rank 0 has begun checkpoint {tag}: every rank must name "
                "the same one. Name a directory that all hosts share."
            )
        writer = RecordWriter(path / file_name(rank, save_id), needed_nbytes=needed_nbytes)
        return cls(path, save_id, writer, needed_nbytes)

    def __enter__(self) -> TagWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context manager that raises StoreError if its block failed to write the tag's files."""
        try:
            yield
        except (OSError, ConfigError) as error:
            if _is_full(error) or str(self.path) in str(error):
                raise _store_error(self.path, error, self._needed_nbytes) from error
            raise

    def publish(self, fields: Mapping[str, Any], shares: Sequence[Share], *, save_latest: bool = True) -> None:
        """Make the save durable, and publish it. `fields`: the fields of TagManifest except `tag`, `save_id` and those
        that `shares` contain. Raises StoreError."""
        try:
            stores = tuple(store for share in shares for store in share.stores)
            self.prepare({"stores": stores, **join_shares(shares), **fields}, save_latest=save_latest)
            self.writer.wait_durable()
            self.publish_prepared()
        except (OSError, ConfigError) as error:
            raise _store_error(self.path, error, self._needed_nbytes) from error

    def prepare(self, fields: Mapping[str, Any], *, save_latest: bool = True) -> None:
        """Write the new manifest, and with `save_latest` the new `latest`, durably next to the present files. Call
        `discard` only after this has ended. Raises OSError, StoreError."""
        assert self._directory is not None, "rank 0 publishes"
        prepare_file(self.path / MANIFEST_NAME, TagManifest(**fields, tag=self.tag, save_id=self.save_id).encode())
        sync_directory(self.path)
        if save_latest:
            prepare_file(self._directory.path / LATEST_NAME, self.tag.encode())
            self._has_latest = True

    def publish_prepared(self) -> None:
        """Publish the prepared save, replace `latest`, then remove the data files of the tag's previous save.
        Raises OSError if the save is not published, and StoreError if it is published but may not be durable."""
        assert self._directory is not None, "rank 0 publishes"
        manifest = self.path / MANIFEST_NAME
        os.rename(next_path(manifest), manifest)
        self.is_published = True
        try:
            sync_directory(self.path)
            if self._has_latest:
                confirm_file(self._directory.path / LATEST_NAME)
        except OSError as error:  # the replaced files stay until the next save
            raise StoreError(
                f"{self.path} is complete, but it or `latest` may not be durable: {error}. Look at the kernel's log, "
                "and save again, or elsewhere."
            ) from error
        self._directory.end(self.tag, self.save_id, is_published=True)

    def discard(self) -> None:
        """Remove the files of the save if it is not published, and release the lock. Log a failure. Idempotent."""
        try:
            self.writer.close()
        except OSError as error:
            logger.warning("A data file in %s cannot be closed: %s", self.path, error)
        directory, self._directory = self._directory, None
        if directory is not None:
            if not self.is_published:
                directory.end(self.tag, self.save_id, is_published=False)
            directory.release()


def _check_space(path: Path, tensors_nbytes: int) -> None:
    """Check that `tensors_nbytes` and a manifest fit on the disk of `path`. Raises StoreError."""
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


def _store_error(path: Path, error: Exception, needed_nbytes: int) -> StoreError:
    """Return the StoreError to raise when `error` has stopped a save of the tag at `path`."""
    if _is_full(error):
        needed = f" It needs {format_nbytes(needed_nbytes)}." if needed_nbytes else ""
        return StoreError(
            f"The disk is full: checkpoint {path.name} could not be written to {path.parent}; {free_text(str(path))}."
            f"{needed} Free space there, or save elsewhere. What was saved before is untouched. ({error})"
        )
    kind = "" if isinstance(error, TransferError | ConfigError) else f"{type(error).__name__}: "
    return StoreError(
        f"Checkpoint {path.name} could not be written to {path.parent}: {kind}{error} What was saved before is "
        "untouched."
    )
