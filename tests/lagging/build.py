"""Compiles the lagging device, once for each torch, compiler and source, into the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

SOURCES = Path(__file__).resolve().parent / "device"
MAIN = SOURCES / "lagging_device.cpp"
NUM_KEPT = 8
"""Libraries in the cache, those used last: of several checkouts and environments."""

FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-pthread")


def why_not() -> str:
    """Why the device cannot be built here; "" where it can."""
    if sys.platform != "linux":
        return f"the lagging device maps its memory as Linux does; this is {sys.platform}"
    if find_compiler() is None:
        return "the lagging device is C++, and there is no g++, clang++ or c++ on this machine"
    if torch.version.cuda is not None or torch.version.hip is not None:
        return (
            f"the lagging device takes the place of CUDA, which this torch ({torch.__version__}) has: use a CPU build"
        )
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        return f"the lagging device is written for torch 2.13; this is {torch.__version__}"
    return ""


def find_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def build() -> Path:
    """Return the library, compiled if it is not in the cache: some 10 s of a core. Processes wait for each other."""
    with _locked(_cache()) as folder:
        library = folder / f"{_key()}.so"
        if not library.exists():
            _compile(library)
        library.touch()
        by_use = sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime)
        for outdated in by_use[:-NUM_KEPT]:
            outdated.unlink()
        return library


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "tiered_zero" / "lagging_device"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # what lies here is loaded and run
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield folder


def _key() -> str:
    """Of everything that the library depends on; where torch lies is not of it: a new environment compiles nothing."""
    compiler = find_compiler()
    assert compiler is not None, why_not()
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    built = f"{torch.__version__} {torch.version.git_version} {torch.__config__.show()}"
    digest = hashlib.sha256(f"{built} {version} {FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _compile(library: Path) -> None:
    """One call of the compiler, without ninja or setuptools."""
    compiler, home = find_compiler(), Path(torch.__file__).parent
    assert compiler is not None, why_not()
    headers = [home / "include", home / "include/torch/csrc/api/include"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    part = library.with_suffix(".part")
    command = [compiler, *FLAGS, abi, *(f"-isystem{path}" for path in headers), "-Wall", "-Werror", str(MAIN)]
    command += ["-o", str(part), f"-L{home / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the lagging device does not compile:\n{done.stderr[-4000:]}")
    part.replace(library)
