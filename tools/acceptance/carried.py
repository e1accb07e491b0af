"""Unpacks carried wheels where there is no network and no pip, and says what is missing.

    python tools/acceptance/carried.py TARGET WHEELS...

Needs the standard library alone. Unpacks into TARGET what this Python lacks of tiered_zero's dependencies, each from a
wheel in the first folder of WHEELS that has one. Ends with 1, and the command that fetches the rest on a connected
machine, if something is missing still. torch is not carried: it has to be there, built for the device.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import zipfile
from pathlib import Path

NAMES = (
    *("aiofiles", "click", "numpy", "psutil", "pydantic", "rich", "safetensors", "xxhash", "pytest"),
    *("pydantic-core", "annotated-types", "typing-inspection", "typing-extensions"),  # of pydantic
    *("markdown-it-py", "mdurl", "pygments"),  # of rich
    *("iniconfig", "packaging", "pluggy"),  # of pytest
)
"""Distributions: those of pyproject.toml without torch, pytest, and what these need."""

MODULES = {"markdown-it-py": "markdown_it"}
"""Distribution -> module, where it is not the same with underscores."""


def find_missing(target: Path) -> list[str]:
    """List the distributions whose modules neither this Python nor `target` has."""
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()
    try:
        return [name for name in NAMES if importlib.util.find_spec(MODULES.get(name, name.replace("-", "_"))) is None]
    finally:
        sys.path.remove(str(target))


def find_wheel(name: str, folder: Path) -> Path | None:
    """Find a distribution's wheel that this Python can load."""
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for path in sorted(folder.glob("*.whl"), reverse=True):
        found, *_, pythons, abi, _ = path.stem.split("-")
        fits = abi in ("none", "abi3") or own in pythons.split(".")
        if fits and re.sub(r"[-_.]+", "-", found).lower() == name:
            return path
    return None


def unpack(names: list[str], folders: list[Path], target: Path) -> None:
    for name in names:
        if wheel := next(filter(None, (find_wheel(name, folder) for folder in folders)), None):
            print(f"unpacking {wheel.name}")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)


def main(arguments: list[str]) -> int:
    target, folders = Path(arguments[0]), [Path(name) for name in arguments[1:]]
    target.mkdir(parents=True, exist_ok=True)
    unpack(find_missing(target), folders, target)
    if missing := find_missing(target):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        print(f"this Python {version} lacks {', '.join(missing)}. On a connected machine:")
        print(
            "  pip download --only-binary=:all: --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 "
            f"--python-version {version} -d wheels {' '.join(missing)}"
        )
        print("then bring the folder wheels/ here, into the checkout or next to it, or name it with --wheels.")
        return 1
    if importlib.util.find_spec("torch") is None:
        print("this Python has no torch, which has to be built for the device; PYTHON names another")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
