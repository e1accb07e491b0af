"""Bind the C kernels, each a plain shared object, with ctypes.

Promise: every kernel is optional. Without its library, `find_library` returns None, and the caller runs Python code.
Owner: the file that binds a kernel owns its argument types. C code includes neither Python.h nor torch headers, so one
object serves every version of Python and torch. Never: a kernel keeps global state or prints. Its threads end with its
handle, except those stuck in a system call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from tiered_zero.errors import ConfigError

VERSION = 12
"""The version of the C sources, as in version.h. Libraries of other versions may have other structures."""

LIBRARY_DIR_VARIABLE = "TIERED_ZERO_NATIVE_DIR"
"""The environment variable that names a directory of libraries to use instead of the package's own. An empty directory
switches the kernels off."""


def find_library(stem: str) -> Path | None:
    """Return the shared object that the build made for `stem` ("_direct_io", "_update"), or None."""
    if own := _library_in(_own_directory(), stem):
        return own
    # a source tree in the working directory shadows the installed package, and may have no libraries
    return next((path for path, version in _installed_libraries(stem) if version == VERSION), None)


def why_missing(stem: str) -> tuple[str, str]:
    """Return the reason why `find_library(stem)` returns None, and what the user can do about it."""
    if directory := os.environ.get(LIBRARY_DIR_VARIABLE):
        return f"{LIBRARY_DIR_VARIABLE} is {directory}, which has no {stem}", f"unset {LIBRARY_DIR_VARIABLE}"
    for _, version in _installed_libraries(stem):
        return (
            f"the source tree in {_PACKAGE.parent} shadows the installed package, whose library was built from version "
            f"{version} of the C sources, not {VERSION}",
            "run from another directory, or install this source (pip install .)",
        )
    if (_PACKAGE.parent / "setup.py").is_file():
        return f"it was not built in the source tree {_PACKAGE.parent}", "python setup.py build_ext --inplace, there"
    return "no C compiler worked when tiered_zero was installed", "install gcc or clang, then tiered_zero again"


_PACKAGE = Path(__file__).parent.parent


def _own_directory() -> Path:
    return Path(os.environ.get(LIBRARY_DIR_VARIABLE) or Path(__file__).parent)


def _library_in(directory: Path, stem: str) -> Path | None:
    paths = (directory / f"{stem}{suffix}" for suffix in (".so", *EXTENSION_SUFFIXES))
    return next(filter(Path.is_file, paths), None)


def _installed_libraries(stem: str) -> Iterator[tuple[Path, int | str]]:
    """Yield (path, version of its C sources) of the library `stem` in each installed distribution of this package. The
    version is "none" if the library names none."""
    if os.environ.get(LIBRARY_DIR_VARIABLE):
        return
    from importlib.metadata import distributions

    for distribution in distributions(name="tiered-zero"):
        if path := _library_in(Path(str(distribution.locate_file("tiered_zero/native"))), stem):
            with suppress(OSError):  # no library
                yield path, _version_of(ctypes.CDLL(str(path)))


def load(path: Path) -> ctypes.CDLL:
    """Load a library. Raises OSError if `path` is no library, and ConfigError if its C sources have another VERSION."""
    library = ctypes.CDLL(str(path))
    if (found := _version_of(library)) != VERSION:
        raise ConfigError(
            f"{path}: version {VERSION} of the C sources was expected; found {found}; rebuild: pip install ."
        )
    return library


def _version_of(library: ctypes.CDLL) -> int | str:
    return library.tz_version() if hasattr(library, "tz_version") else "none"


def declare(function: Any, result: Any, *arguments: Any) -> Any:
    """Set the result and argument types of a library's function, and return the function. `result`: None for void."""
    function.restype, function.argtypes = result, arguments
    return function


def struct_fields(*rows: tuple[Any, str]) -> list[tuple[str, Any]]:
    """List the `_fields_` of a ctypes.Structure. `rows`: (ctypes type, names of its fields), in the order of C."""
    return [(name, kind) for kind, names in rows for name in names.split()]
