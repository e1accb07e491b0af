"""Open, read, lock, write and remove files, safely and durably.

Another user may have put a FIFO, a device or a link under a name that a run uses. Therefore `open_file` never blocks,
and accepts only regular files of this user or of the directory's owner.

A JSON file has a header line (format, version, size and xxh3 of the body) and a body. The file may be hostile, so
sizes, types and fields are checked before they are used."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiered_zero.errors import StoreError
from tiered_zero.io.engine import errno_text
from tiered_zero.sizes import format_nbytes
from tiered_zero.system import Descriptor, opened

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def kind_text(mode: int) -> str:
    """Return the kind of a file as text for messages, such as "a directory". `mode`: the file's st_mode."""
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link"}
    return kinds.get(stat.S_IFMT(mode), "no file")


def error_text(error: Exception) -> str:
    """Return the text of an error. For an OSError the text is like "EIO (Input/output error)", without the path."""
    return errno_text(error.errno) if isinstance(error, OSError) and error.errno else str(error)


# -- open and read -----------------------------------------------------------------------------------------------------


def open_directory(path: str | Path, dir_fd: int | None = None) -> Descriptor:
    """Open a directory. `dir_fd`: an open directory to which `path` is relative. Raises OSError, also for a symbolic
    link."""
    return opened(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=dir_fd)


def open_file(name: str, dir_fd: int, flags: int = os.O_RDONLY) -> Descriptor:
    """Open the file `name` in the open directory `dir_fd`. Raises OSError. Raises StoreError unless it is a regular
    file of this user or of the directory's owner."""
    fd = opened(name, flags | _SAFE, 0o600, dir_fd=dir_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"{name} is {kind_text(status.st_mode)}; expected a file")
        if status.st_uid not in (os.geteuid(), owner := os.fstat(dir_fd).st_uid):
            raise StoreError(f"{name} belongs to user id {status.st_uid}; expected {owner}")
    except Exception:
        fd.close()
        raise
    return fd


def open_of_owner(path: Path) -> Descriptor:
    """Open a file by its path, read-only. Raises OSError. Raises StoreError unless it is a regular file of this user or
    of its directory's owner."""
    with open_directory(path.parent) as directory:
        return open_file(path.name, directory)


def read_file(name: str, dir_fd: int, *, most_nbytes: int) -> bytes:
    """Open a file with `open_file`, and return its bytes. Raises OSError. Raises StoreError if `open_file` refuses the
    file, or if the file has more than `most_nbytes` bytes."""
    with open_file(name, dir_fd) as fd:
        if (size := os.fstat(fd).st_size) > most_nbytes:
            raise StoreError(
                f"{name} has {format_nbytes(size)} ({size} bytes); expected at most {format_nbytes(most_nbytes)}"
            )
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(size)


def names_in(dir_fd: int) -> list[str]:
    """Return the names of all entries of an open directory."""
    try:
        with open_directory(".", dir_fd) as fd:  # btrfs lists only names that existed when a descriptor was opened
            return os.listdir(fd)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    return os.listdir(dir_fd)  # needs one descriptor instead of two


def disk_nbytes(dir_fd: int) -> int:
    """Return the disk space, in bytes, of the files in an open directory."""
    total = 0
    for name in names_in(dir_fd):
        with suppress(FileNotFoundError):
            total += os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_blocks * 512
    return total


# -- lock --------------------------------------------------------------------------------------------------------------


def lock_file(name: str, dir_fd: int, flags: int = 0) -> Descriptor:
    """Open a file for writing with `open_file`, and take an exclusive flock on it. `flags`: extra flags for opening.
    Raises the errors of `open_file`, and BlockingIOError if the file is locked."""
    fd = open_file(name, dir_fd, os.O_RDWR | flags)
    try:
        for _ in range(20):  # `is_locked` of another process holds the lock for a moment
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            time.sleep(0.01)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        fd.close()
        raise
    return fd


def is_locked(name: str, dir_fd: int) -> bool:
    """Return whether a process holds the lock of the file; False if there is no file. Raises StoreError, and OSError
    (ENOLCK: the file system has no locks)."""
    try:
        with open_file(name, dir_fd) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two calls do not see each other
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def unlock(lock: Descriptor) -> None:
    """Release the lock and close its descriptor. Idempotent."""
    if not lock.closed:
        with suppress(OSError):  # the disk may be gone; the descriptor is closed all the same
            fcntl.flock(lock, fcntl.LOCK_UN)  # frees the lock even if a forked child has the descriptor too
        with suppress(OSError):
            lock.close()


# -- write and remove --------------------------------------------------------------------------------------------------


def write_and_sync(fd: int, parts: Iterable[bytes | memoryview]) -> None:
    """Write `parts` in order to an open file, then fsync it. Raises OSError."""
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(fd, left) :]
    os.fsync(fd)


def write_new_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a new file (mode 0600), and fsync it. The file's name is durable only after `sync_directory`. Raises
    OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with opened(path, flags, 0o600) as fd:
        write_and_sync(fd, parts)


def sync_directory(directory: Path) -> None:
    """Make the creation, renaming or removal of names in `directory` durable. Raises OSError."""
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
        os.fsync(fd)


def next_path(path: Path) -> Path:
    """Return the path at which the next version of the file `path` is prepared."""
    return path.with_name(f"{path.name}.next")


def prepare_file(path: Path, data: bytes) -> None:
    """Write `data`, the next version of the file `path`, to the file `next_path(path)`, and fsync it. That file's name
    is durable only after `sync_directory`. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with opened(next_path(path), flags, 0o600) as fd:
        write_and_sync(fd, [data])


def confirm_file(path: Path) -> None:
    """Rename the prepared version of the file `path` to `path`, durably. Raises OSError."""
    os.rename(next_path(path), path)
    sync_directory(path.parent)


def discard_file(path: Path) -> None:
    """Remove the prepared version of the file `path`, if it exists, durably. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(next_path(path))
        sync_directory(path.parent)


def remove_files(dir_fd: int, last: str = "") -> None:
    """Remove all files and empty directories in an open directory; remove the file `last` after all others. If an entry
    cannot be removed, keep `last`, remove the rest, and raise the first OSError."""
    failure: OSError | None = None
    for name in names_in(dir_fd):
        if name != last:
            try:
                _remove(name, dir_fd)
            except FileNotFoundError:
                pass
            except OSError as error:
                failure = failure or error
    if failure is not None:
        raise failure
    if last:
        with suppress(FileNotFoundError):
            os.unlink(last, dir_fd=dir_fd)


def _remove(name: str, dir_fd: int) -> None:
    try:
        os.unlink(name, dir_fd=dir_fd)
    except OSError as error:  # for a directory: EISDIR on Linux, EPERM in POSIX
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        os.rmdir(name, dir_fd=dir_fd)


# -- JSON files of strict models: manifests, owner files, indexes ------------------------------------------------------

VERSION: Final = 5
"""The format version of every JSON file. A file with another version is refused."""

MOST_NBYTES: Final = 1 << 28
"""The largest size of a JSON file in bytes. A manifest takes about 45 bytes for each checksum of 1 MiB, so it can
describe several TiB."""

MOST_INTEGER: Final = 2**63 - 1
"""The largest offset, size or step: these are signed 64-bit integers."""

Count = Annotated[int, Field(ge=0, le=MOST_INTEGER)]
Digest = Annotated[int, Field(ge=0, le=2**64 - 1)]


class StrictModel(BaseModel):
    """An immutable pydantic model. Input may have only the declared fields, each of exactly the declared type."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", ser_json_inf_nan="constants")


Model = TypeVar("Model", bound="JsonFile")


class JsonFile(StrictModel):
    """A model that is saved as one JSON file. `format_name`: the format's name in the file's header."""

    format_name: ClassVar[str]

    def encode(self) -> bytes:
        """Return the content of the file. Raises StoreError if the model cannot be encoded as JSON, or takes more than
        `MOST_NBYTES` bytes."""
        try:
            data = self.model_dump_json().encode()
        except ValueError as error:  # PydanticSerializationError
            raise StoreError(f"A {self.format_name} must be JSON: {error}.") from error
        if len(data) > MOST_NBYTES:
            raise StoreError(
                f"A {self.format_name} takes {format_nbytes(len(data))}; at most {format_nbytes(MOST_NBYTES)} can be "
                "read back. Keep large values out of client_state, or raise zero_optimization.sub_group_size."
            )
        header = {"format": self.format_name, "version": VERSION}
        header |= {"nbytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}
        return json.dumps(header).encode() + b"\n" + data + b"\n"

    @classmethod
    def decode(cls: type[Model], data: bytes, path: Path) -> Model:
        """Return the model that the file's content `data` describes. `path`: the file, for errors. Raises StoreError if
        the file is damaged, invalid, or of another format or version."""
        expected = f"{path}: expected {cls.format_name} version {VERSION}, found"
        line, _, rest = data.partition(b"\n")
        try:
            header: Any = json.loads(line)
        except (ValueError, RecursionError):
            header = None
        if type(header) is not dict:
            raise StoreError(f"{expected} no header: it is damaged, or of an older version.")
        if header.get("format") != cls.format_name or header.get("version") != VERSION:
            found, version = (ascii(header.get(name))[:80].strip("'\"") for name in ("format", "version"))
            advice = "; read it with the release that wrote it" if found == cls.format_name else ""
            raise StoreError(f"{expected} {found} version {version}{advice}.")
        body = rest[:-1]
        if header.get("nbytes") != len(body) or header.get("xxh3") != xxhash.xxh3_64_hexdigest(body):
            raise StoreError(f"{path} is damaged: its checksum does not match. This state cannot be recovered.")
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise StoreError(f"{path} is not a {cls.format_name} ({first_problem(error)}).") from error


def first_problem(error: ValidationError) -> str:
    """Return the first error and its place, such as "tensors.master/w.dtype: Input should be a valid string"."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{ascii(where)[1:-1][:200]}: {first['msg']}" if where else first["msg"]
