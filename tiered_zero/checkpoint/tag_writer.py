"""Change a save directory under one lock: begin a tag (one saved checkpoint), publish it, remove it. A tag is written
into a temporary directory. This directory gets the tag's name once all of it is durable."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, final

from tiered_zero.checkpoint.index import (
    LATEST_NAME,
    MANIFEST_NAME,
    Share,
    TagManifest,
    check_tag,
    file_name,
    join_shares,
)
from tiered_zero.errors import ConfigError, StoreError, TransferError
from tiered_zero.io.engine import IOEngine, free_text
from tiered_zero.record.data_files import RecordWriter
from tiered_zero.record.files import (
    disk_nbytes,
    error_text,
    lock_file,
    names_in,
    open_directory,
    remove_files,
    sync_directory,
    unlock,
    write_new_file,
)
from tiered_zero.sizes import MIB, format_nbytes
from tiered_zero.system import CLOSED, Descriptor

logger = logging.getLogger("tiered_zero")

_SPARE_NBYTES = 4 * MIB
"""Free space that is required for a tag's manifest and directory. A manifest takes some 45 bytes per MiB of data, and
200 per tensor."""

_RENAME_EXCHANGE = 2


# -- the save directory ------------------------------------------------------------------------------------------------

LOCK_NAME: Final = ".tiered_zero.lock"
TEMPORARY: Final = ".tmp-"
OLD: Final = ".old-"
"""Prefixes of hidden directories: of a tag that is being written or removed, and of a tag that is being replaced."""

_SUFFIX = re.compile(r"-[0-9a-f]{12}")


def hidden_name(prefix: str, tag: str) -> str:
    """Return a new name for a hidden directory of `tag`: `prefix`, `tag` and random digits."""
    return f"{prefix}{tag}-{secrets.token_hex(6)}"


def hidden_tag(prefix: str, name: str) -> str | None:
    """Return the tag in a name that `hidden_name` has made with this prefix; None for any other name."""
    match = _SUFFIX.fullmatch(name[-13:])
    return name[len(prefix) : -13] if match and name.startswith(prefix) and len(name) > len(prefix) + 13 else None


@final
class SaveDirectory:
    """A save directory. `open` locks it by flock until `release`; `join` does not lock it. One thread uses it. After a
    crash, each change of a name is either durable or undone."""

    def __init__(self, path: Path, fd: Descriptor, lock: Descriptor) -> None:
        """Use `open` or `join` instead."""
        self.path, self.fd = path, fd
        self._lock = lock

    @classmethod
    def open(cls, save_dir: str | os.PathLike[str]) -> SaveDirectory:
        """Open and lock the directory; make it and its parents (mode 0700) if missing. Raises StoreError."""
        path, fd = _opened(save_dir, makes=True)
        try:
            return cls(path, fd, _locked(path, fd))
        except BaseException:
            fd.close()
            raise

    @classmethod
    def join(cls, save_dir: str | os.PathLike[str]) -> SaveDirectory:
        """Open a directory without locking it: rank 0 has locked it, or it is only read. Raises StoreError."""
        return cls(*_opened(save_dir, makes=False), CLOSED)

    def release(self) -> None:
        """Release the lock, even if a forked child has inherited it. Idempotent."""
        unlock(self._lock)
        self.fd.close()

    def restore(self) -> None:
        """Clean up after a writer that died: restore the name of a tag that it was replacing, and remove temporary
        files. Raises OSError."""
        names = sorted(names_in(self.fd))
        for name in names:
            if (tag := hidden_tag(OLD, name)) is not None and tag not in names:
                os.rename(name, tag, src_dir_fd=self.fd, dst_dir_fd=self.fd)
                os.fsync(self.fd)
                logger.warning(
                    "%s: checkpoint %s was being replaced when its writer ended; it is back.", self.path, tag
                )
        tags = {name: hidden_tag(TEMPORARY, name) or hidden_tag(OLD, name) for name in sorted(names_in(self.fd))}
        hidden = {name: tag for name, tag in tags.items() if tag}
        if hidden:
            os.fsync(self.fd)  # a new tag that replaced one may not be durable yet
        for name, tag in hidden.items():
            if hidden_tag(TEMPORARY, name) == LATEST_NAME:
                os.unlink(name, dir_fd=self.fd)
            elif (nbytes := self.try_remove(name)) is not None:
                logger.warning(
                    "%s: removed %s (%s), which a writer of checkpoint %s left when it ended.",
                    *(self.path, name, format_nbytes(nbytes), tag),
                )

    def check_replaceable(self, tag: str) -> None:
        """Check that `tag` may be replaced or removed. Raises StoreError if it exists but is no directory of plain
        files."""
        try:
            with open_directory(tag, self.fd) as fd, os.scandir(fd) as entries:
                # a directory inside it may hold other programs' files, such as an export
                foreign = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(
                f"{self.path / tag} is no directory and is not replaced ({error_text(error)}). Name another tag."
            ) from error
        if foreign:
            raise StoreError(
                f"{self.path / tag} has directories that are no part of a checkpoint, and is neither replaced nor "
                f"removed: {', '.join(map(ascii, foreign))[:200]}. Move them elsewhere, or name another tag."
            )

    def rename(self, name: str, tag: str) -> str | None:
        """Rename the directory `name` to `tag`. Return the new name of the tag that it replaces; None if there was
        none. `finish` makes the rename durable. Raises OSError; the old tag can then still be loaded."""
        try:
            os.stat(tag, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(name, tag, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            return None
        if exchange(self.fd, name, tag):  # rename(2) does not replace a directory that has files
            return name
        # a reader that finds no TAG takes the old one from this name, and the next writer renames it back
        replaced = hidden_name(OLD, tag)
        os.rename(tag, replaced, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)
        os.rename(name, tag, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        return replaced

    def finish(self, replaced: str | None, latest: str | None = None) -> None:
        """Make the last `rename` durable, then remove the tag that it replaced. `replaced`: the present name of this
        tag, which `rename` has returned; None: there is none. `latest`: a file from `prepare_latest`, which is renamed
        to `latest`. If this raises OSError, the replaced tag still exists."""
        if latest is not None:  # after a crash only one rename may be done: safe for pointers, which lead to one state
            os.rename(latest, LATEST_NAME, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)
        if replaced is not None:
            self.try_remove(replaced)

    def prepare_latest(self, tag: str) -> str:
        """Write the next `latest` under a temporary name, durably, and return that name. Raises OSError."""
        name = hidden_name(TEMPORARY, LATEST_NAME)
        try:
            write_new_file(name, [tag.encode()], self.fd)
        except OSError:
            self.unlink(name)
            raise
        return name

    def remove_tag(self, tag: str) -> None:
        """Rename a tag to a hidden name, durably, then remove its files. Raises OSError if it cannot be renamed."""
        name = hidden_name(TEMPORARY, tag)
        os.rename(tag, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)
        self.try_remove(name)

    def try_remove(self, name: str) -> int | None:
        """Remove a directory of plain files, and return the bytes of disk that it took. Return None, with a warning in
        the log, if it cannot be removed."""
        try:
            with open_directory(name, self.fd) as fd:
                nbytes = disk_nbytes(fd)
                remove_files(fd)
            os.rmdir(name, dir_fd=self.fd)
            return nbytes
        except OSError as error:
            logger.warning("%s cannot be removed: %s. Remove it by hand.", self.path / name, error_text(error))
            return None

    def unlink(self, name: str) -> None:
        """Remove a temporary file, if it exists."""
        with suppress(OSError):
            os.unlink(name, dir_fd=self.fd)


def _opened(save_dir: str | os.PathLike[str], *, makes: bool) -> tuple[Path, Descriptor]:
    """Open a save directory, and return its real path and descriptor. `makes`: make missing directories, durably.
    Raises StoreError."""
    try:
        path = Path(os.path.realpath(save_dir))
        for place in reversed((path, *path.parents)) if makes else ():
            if not place.exists():
                with suppress(FileExistsError):
                    os.mkdir(place, 0o700)
                sync_directory(place.parent)
        return path, open_directory(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise StoreError(
            f"Checkpoints cannot be saved to {os.fspath(save_dir)!r}: {error_text(error)}. Name a directory of your "
            "own, which all ranks share."
        ) from error


def _locked(path: Path, dir_fd: int) -> Descriptor:
    """Open and lock the lock file of a save directory, and return its descriptor. Raises StoreError."""
    try:
        return lock_file(LOCK_NAME, dir_fd, os.O_CREAT)
    except BlockingIOError as error:
        raise StoreError(
            f"Another process is writing a checkpoint in {path}. Wait for it, or give each run its own directory."
        ) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be locked: {error_text(error)}. Name another directory.") from error


def exchange(dir_fd: int, name: str, other: str) -> bool:
    """Exchange two names in one atomic call. Return False if the system cannot. Raises OSError."""
    renameat2: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(dir_fd, os.fsencode(name), dir_fd, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), name)


# -- one tag -----------------------------------------------------------------------------------------------------------


@final
class TagWriter:
    """Writes one tag into a temporary directory, and publishes it by renaming that directory. The end of a `with` block
    discards an unpublished tag. Rank 0 begins and publishes a tag; other ranks join it, with their own data files."""

    def __init__(
        self, directory: SaveDirectory, tag: str, name: str, writer: RecordWriter, needed_nbytes: int, *, joins: bool
    ) -> None:
        """Use `begin` or `join` instead. `name`: the name of the temporary directory. `joins`: whether rank 0 has begun
        the tag, and this rank joins it."""
        self.writer, self.tag, self.name = writer, tag, name
        self._directory, self._needed_nbytes, self._joins = directory, needed_nbytes, joins
        self._latest: str | None = None
        self.is_published = False
        """Whether the tag has its name."""

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
        """Begin a tag: lock the save directory, clean it up, check the free space, make the temporary directory.
        `engine`: writes the data; None: the tag gets its own. `needed_nbytes`: bytes of all records. `own_nbytes`:
        bytes of this process's records; None: all. Raises StoreError."""
        check_tag(tag)
        directory = SaveDirectory.open(save_dir)
        try:
            directory.restore()
            directory.check_replaceable(tag)
            _check_space(directory.path, needed_nbytes)
            os.mkdir(name := hidden_name(TEMPORARY, tag), 0o700, dir_fd=directory.fd)
        except BaseException as error:
            directory.release()
            if isinstance(error, OSError):
                raise _store_error(directory.path, tag, error, needed_nbytes) from error
            raise
        own_nbytes = needed_nbytes if own_nbytes is None else own_nbytes
        # without `engine` it makes one of its own, whose failure affects no other transfer
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
        """Join a tag that rank 0 has begun in the temporary directory `name`. Return the writer of this rank's part.
        `needed_nbytes`: bytes of that part. Raises StoreError if `save_dir` is not rank 0's directory."""
        directory = SaveDirectory.join(save_dir)
        if not (directory.path / name).is_dir():
            directory.release()
            raise StoreError(
                f"{directory.path} is not the directory in which rank 0 has begun checkpoint {tag}: every rank must "
                "name the same one. Name a directory that all hosts share."
            )
        writer = RecordWriter(directory.path / name / file_name(rank), engine, needed_nbytes=needed_nbytes)
        return cls(directory, tag, name, writer, needed_nbytes, joins=True)

    @property
    def path(self) -> Path:
        """The path that the tag will have."""
        return self._directory.path / self.tag

    def __enter__(self) -> TagWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Discard the tag if it is not published. Raise StoreError if the block failed to write the tag's files."""
        failure = None
        wrote = isinstance(error, OSError | ConfigError) and (_is_full(error) or self.name in str(error))
        if wrote and isinstance(error, Exception) and not self._directory.fd.closed:
            failure = self._store_error(error)
        self.discard()
        if failure is not None:
            raise failure from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context manager that discards the tag if its block raises."""
        try:
            yield
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def publish(self, fields: Mapping[str, Any], shares: Sequence[Share], *, save_latest: bool = True) -> None:
        """Make everything durable, give the tag its name, then set `latest`. `fields`: what TagManifest has besides the
        tag and the `shares`. If this raises StoreError, a tag without its name is discarded."""
        assert not self._joins, "rank 0 publishes"
        try:
            stores = tuple(store for share in shares for store in share.stores)
            whole = {"kind": "full", "stores": stores, **join_shares(shares), **fields}
            self.prepare(whole, save_latest=save_latest)
            self.writer.wait_durable()
            self._give_name()
            if self._latest is not None:
                self._directory.finish(None, self._latest)
                self._latest = None
        except (OSError, ConfigError) as error:
            if self.is_published:
                raise StoreError(f"{self.path} is complete, but `latest` could not be written: {error}.") from error
            raise self._store_error(error) from error
        finally:
            self.discard()

    def publish_pointer(self) -> None:
        """Give the prepared tag of an in-place commit its name, and set `latest`. Call this once the commit is durable.
        Raises OSError, StoreError."""
        try:
            self._give_name(self._latest)
            self._latest = None
        finally:
            self.discard()

    def prepare(self, fields: Mapping[str, Any], *, save_latest: bool = True) -> None:
        """Write the manifest, and if `save_latest` the new `latest`, under temporary names, durably. This must end
        before the tag is discarded. Raises OSError, StoreError."""
        data = TagManifest(**fields, tag=self.tag).encode()
        with open_directory(self.name, self._directory.fd) as fd:
            write_new_file(MANIFEST_NAME, [data], fd)
            os.fsync(fd)
        self._latest = self._directory.prepare_latest(self.tag) if save_latest else None

    def _give_name(self, latest: str | None = None) -> None:
        """Rename the temporary directory to the tag, durably. `latest`: a file from `prepare_latest`, which gets the
        name `latest`. Raises OSError before the tag has its name, and StoreError after that."""
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
        """Remove the tag's files if it is not published, and release the lock. Logs a failure. Idempotent."""
        try:
            self.writer.close()
        except OSError as error:
            logger.warning("%s cannot be closed: %s", self._directory.path / self.name, error)
        if not self._directory.fd.closed:
            if not self._joins and not self.is_published:
                self._directory.try_remove(self.name)
            if self._latest is not None:
                self._directory.unlink(self._latest)
        self._directory.release()

    def _store_error(self, error: Exception) -> StoreError:
        return _store_error(self._directory.path, self.tag, error, self._needed_nbytes)


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


def _store_error(path: Path, tag: str, error: Exception, needed_nbytes: int) -> StoreError:
    """Return the StoreError for an error that stopped a save."""
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
