"""An open file of any engine, and the text of everything that can go wrong with it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import final

from tiered_zero.errors import TransferError
from tiered_zero.io.engine import File, Request
from tiered_zero.native import struct_fields
from tiered_zero.sizes import MIB, align_up, format_nbytes
from tiered_zero.system.descriptor import Descriptor, opened

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)

_ADVICE = {
    errno.ENOSPC: "Free space there, or point the swap directory to a larger disk.",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or use a file system that takes larger files.",
    errno.EDQUOT: "Raise the disk quota, or point the swap directory to another disk.",
    errno.EIO: "The device reported a failure: look at the kernel log (dmesg) and the drive's health (smartctl -a).",
    errno.ENODATA: "The drive cannot read a sector any more (medium error): replace it (smartctl -a).",
    errno.EINVAL: "The file system refused this O_DIRECT transfer: it needs another alignment, or buffered access.",
    errno.EROFS: "The file system is mounted read-only, often after an error: look at the kernel log (dmesg).",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "The machine's table of open files is full: raise fs.file-max.",
    errno.ENOENT: "The file or its directory is gone: has something removed the swap directory?",
    errno.EEXIST: "Another run owns this file, or left it behind.",
    errno.ELOOP: "The path is a symbolic link, which is refused: name the file itself.",
    errno.EACCES: "Give this user the right to read and write there.",
    errno.ESTALE: "The network file system lost the file: use a local disk.",
}
_ADVICE_ELSE = "Look at the kernel log (dmesg) for the cause."


def errno_text(code: int) -> str:
    """5 -> 'EIO (Input/output error)'."""
    return f"{errno.errorcode.get(code, code)} ({os.strerror(code)})"


def errno_advice(code: int) -> str:
    """Return what a user can do about an error of a file."""
    return _ADVICE.get(code, _ADVICE_ELSE)


def free_text(path: str) -> str:
    """Free bytes of the file system that holds `path` (or held it)."""
    with contextlib.suppress(OSError, AttributeError):
        status = os.statvfs(os.path.dirname(path) or ".")
        return f"{format_nbytes(status.f_bavail * status.f_frsize)} free there"
    return "free space there unknown"


def file_error(act: str, path: str, code: int) -> TransferError:
    """An error of opening, allocating or closing; nothing was transferred."""
    text = f"cannot {act} {path}: {errno_text(code)}; {free_text(path)}. {errno_advice(code)}"
    return _with_errno(text, code)


def transfer_error(request: Request, at: int, wanted: int, got: int, code: int) -> TransferError:
    """The error of a request whose block at offset `at` moved `got` of `wanted` bytes and then met errno `code`."""
    if request.kind == "sync":
        what = f"sync of {request.path} failed"
        advice = "Writes since the last sync may be lost: resume from the last checkpoint."
    else:
        what = f"{request.kind} of {request.nbytes} bytes at offset {request.offset} of {request.path} failed"
        what += f": at offset {at} wanted {wanted} bytes, got {got}"
        advice = _ADVICE.get(code, _ADVICE_ELSE)
    text = f"{what}: {errno_text(code)}; {free_text(request.path)}. {advice}"
    return _with_errno(text, code)


def end_of_file_error(request: Request, at: int, wanted: int, got: int, file_nbytes: int) -> TransferError:
    return TransferError(
        f"read of {request.nbytes} bytes at offset {request.offset} of {request.path} met the end of the file: "
        f"at offset {at} wanted {wanted} bytes, got {got}; the file has {file_nbytes} bytes. "
        "Something cut it short: it cannot be used any more."
    )


def _with_errno(text: str, code: int) -> TransferError:
    """`errno` for programs; not `filename`, which would make OSError print another text."""
    error = TransferError(text)
    error.errno = code
    return error


class _PyBuffer(ctypes.Structure):
    """Python's Py_buffer (Include/pybuffer.h), for the address of memory that may be read-only."""

    _fields_ = struct_fields(
        (ctypes.c_void_p, "buf obj"),
        (ctypes.c_ssize_t, "len itemsize"),
        (ctypes.c_int, "readonly ndim"),
        (ctypes.c_char_p, "format"),
        (ctypes.c_void_p, "shape strides suboffsets internal"),
    )


def memory_address(view: memoryview) -> int:
    """Return the address of a contiguous view's memory; valid while the view lives."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = int(buffer.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


def open_descriptor(path: str, *, create: bool, writable: bool, direct: bool) -> Descriptor:
    """Open a file that no child inherits; a new file has mode 0600 and did not exist. Raises TransferError."""
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW
    flags |= os.O_CREAT | os.O_EXCL if create else 0
    flags |= _O_DIRECT if direct else 0
    try:
        return opened(path, flags, 0o600)
    except OSError as error:
        raise file_error("create" if create else "open", path, error.errno or errno.EIO) from error


@final
class DiskFile(File):
    """One descriptor. `drain` waits until nothing of this file is in flight, and returns False if it is stuck."""

    def __init__(
        self, path: str, fd: Descriptor, *, alignment: int, direct: bool, drain: Callable[[DiskFile], bool]
    ) -> None:
        self.path, self.alignment = path, alignment
        self.fd, self.direct = int(fd), direct
        self._descriptor, self._drain = fd, drain

    def allocate(self, nbytes: int) -> None:
        try:
            if not self._fallocate(nbytes):
                self._fill_with_zeros(nbytes)
        except OSError as error:
            act = f"reserve {format_nbytes(nbytes)} ({nbytes} bytes) for"
            raise file_error(act, self.path, error.errno or errno.EIO) from error

    def _fallocate(self, nbytes: int) -> bool:
        """False where the file system cannot: glibc's own emulation does not work through O_DIRECT."""
        if not hasattr(os, "posix_fallocate"):
            return False
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
                return False
            raise
        return True

    def _fill_with_zeros(self, nbytes: int) -> None:
        """Reserve blocks by writing them, from the file's present end on."""
        position, end = (align_up(size, self.alignment) for size in (self.size_nbytes(), nbytes))
        with mmap.mmap(-1, MIB) as zeros, memoryview(zeros) as view:
            while position < end:
                os.lseek(self.fd, position, os.SEEK_SET)
                position += os.write(self.fd, view[: min(MIB, end - position)])

    def sync(self) -> None:
        """Raises OSError. What is on the disk need not stay in memory."""
        getattr(os, "fdatasync", os.fsync)(self.fd)
        self.drop_pages(0, 0)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        """Ask for buffered pages to be written and dropped (`nbytes` 0: to the end): host memory has its own plan."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # advice only
                os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def size_nbytes(self) -> int:
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Idempotent. The descriptor of a stuck request stays: a late write would land in the file that gets its
        number."""
        if self.fd >= 0 and self._drain(self):
            self._descriptor.close()
        self.fd = -1
