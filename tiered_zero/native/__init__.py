"""The C kernels, each a plain shared object bound with ctypes.

Promise: everything here is optional. Where no C compiler was at hand at install, `find_library` returns None and the
caller takes its Python path and says so once.
Owner: the file that binds a kernel owns its argument types; C code includes neither Python.h nor torch headers, so
that one object serves every Python and every torch, and ctypes releases the GIL around each call.
Never: a kernel keeps no global state, starts no thread that outlives its handle, and prints nothing.
"""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from tiered_zero.errors import ConfigError

VERSION = 2
"""Of the C sources, as in version.h. A library that was built from others may take structures of another layout."""

LIBRARY_DIR_VARIABLE = "TIERED_ZERO_NATIVE_DIR"
"""Environment: a directory that is searched instead of this package's own; an empty one switches the kernels off."""


def find_library(stem: str) -> Path | None:
    """The shared object that the build made for `stem` ("_direct_io", "_update"), or None where there is none."""
    directory = Path(os.environ.get(LIBRARY_DIR_VARIABLE) or Path(__file__).parent)
    for suffix in (*EXTENSION_SUFFIXES, ".so", ".dylib"):
        candidate = directory / f"{stem}{suffix}"
        if candidate.is_file():
            return candidate
    return None


def load(path: Path) -> ctypes.CDLL:
    """Raises OSError where `path` is no library, ConfigError where it was built from other C sources than VERSION's."""
    library = ctypes.CDLL(str(path))
    found = library.tz_version() if hasattr(library, "tz_version") else "none"
    if found != VERSION:
        raise ConfigError(
            f"{path}: version {VERSION} of the C sources was expected; found {found}; rebuild: pip install ."
        )
    return library


def declare(function: Any, result: Any, *arguments: Any) -> Any:
    """Give a function of a library its types, and return it. `result`: None for void."""
    function.restype, function.argtypes = result, arguments
    return function


def struct_fields(*rows: tuple[Any, str]) -> list[tuple[str, Any]]:
    """List `_fields_` of a ctypes.Structure from rows of a type and its names, as C declares them."""
    return [(name, kind) for kind, names in rows for name in names.split()]
