"""A library that was built from other C sources is refused, and nothing of it is called."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.native_build import DIRECT_IO_SOURCE, UPDATE_SOURCE, compile_shared
from tiered_zero.errors import ConfigError
from tiered_zero.io.native import load_library
from tiered_zero.native import VERSION
from tiered_zero.native.update import UpdateKernel

SOURCES_DIGEST = "e3bcd69f555990d3"
"""Of the C sources of VERSION."""


@pytest.mark.parametrize("load", [load_library, UpdateKernel])
@pytest.mark.parametrize(
    ("text", "found"), [(f"int tz_version(void) {{ return {VERSION + 1}; }}", VERSION + 1), ("int other;", "none")]
)
def test_a_library_of_another_version_is_refused(
    load: Callable[[Path], object], text: str, found: object, tmp_path: Path
) -> None:
    source = tmp_path / "other.c"
    source.write_text(text)
    message = f"version {VERSION} of the C sources was expected; found {found}; rebuild: pip install ."
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(compile_shared(source, tmp_path / "other.so"))


@pytest.mark.parametrize("source", [DIRECT_IO_SOURCE, UPDATE_SOURCE])
def test_the_sources_state_the_version(source: Path, tmp_path: Path) -> None:
    load = load_library if source == DIRECT_IO_SOURCE else UpdateKernel
    load(compile_shared(source, tmp_path / "this.so"))


def test_the_version_is_raised_with_the_sources() -> None:
    sources = sorted(path for path in UPDATE_SOURCE.parent.iterdir() if path.suffix in (".c", ".h"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    assert digest == SOURCES_DIGEST, f"C sources changed: raise VERSION and TZ_VERSION, and set SOURCES_DIGEST {digest}"
