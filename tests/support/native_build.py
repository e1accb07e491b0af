"""The C sources of the checkout, compiled for a test: an installed package carries the libraries, not their sources."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UPDATE_SOURCE = ROOT / "tiered_zero/native/update.c"
DIRECT_IO_SOURCE = ROOT / "tiered_zero/native/direct_io.c"


def compile_shared(source: Path, target: Path, *flags: str) -> Path:
    """`target`, built without a warning; the test is skipped where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on this machine: what is written in C is optional, and is not there")
    command = [compiler, "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", str(source)]
    subprocess.run([*command, "-o", str(target), *flags], check=True)
    return target
