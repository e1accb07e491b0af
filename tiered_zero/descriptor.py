"""Descriptors that are closed once, and do not stay open where an interrupt comes."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from typing import Final, final


@final
class Descriptor(int):
    """An open descriptor of this process, from `opened`.

    It is closed by `close`, by the end of a `with` block, or with the object: an interrupt between the statement that
    opens and the one that closes leaves nothing open. An int, for the calls that take one; the object has to live as
    long as they use it.
    """

    @property
    def closed(self) -> bool:
        return not self._left()

    def close(self) -> None:
        """Idempotent, so that it can be called again after an interrupt. Raises OSError."""
        left = self._left()
        # one call: no signal comes between the two, and a number that is free again may be another file's
        any(map(os.close, map(left.pop, [0] * len(left))))

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(OSError):  # a finalizer cannot raise it
            self.close()

    def _left(self) -> list[int]:
        """The number, until it is closed."""
        left: list[int] = vars(self).setdefault("left", [int(self)] if self >= 0 else [])
        return left


def opened(path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> Descriptor:
    """Open as os.open does. Raises OSError.

    CPython looks for signals behind a call: unpacking an iterator is none, so that the number has its owner at once."""
    return Descriptor(*map(partial(os.open, flags=flags, mode=mode, dir_fd=dir_fd), [path]))


CLOSED: Final = Descriptor(-1)
"""Where none is open."""
