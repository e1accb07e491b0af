"""Descriptors that are closed once, and with their object."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, final


@final
class Descriptor(int):
    """An open descriptor of this process, from `opened`.

    It is closed by `close`, by the end of a `with` block, or with the object. An int, for the calls that take one; the
    object has to live as long as they use it.
    """

    closed = False

    def close(self) -> None:
        """Idempotent. Raises OSError."""
        if not self.closed and self >= 0:
            self.closed = True  # first: a number that is free again may be another file's
            os.close(self)

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, suppress: type[suppress] = suppress) -> None:  # which is gone as the interpreter ends
        with suppress(Exception):  # a finalizer cannot raise it
            self.close()


def opened(path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> Descriptor:
    """Open as os.open does. Raises OSError."""
    return Descriptor(os.open(path, flags, mode, dir_fd=dir_fd))


CLOSED: Final = Descriptor(-1)
"""Where none is open."""

CLOSED.closed = True
