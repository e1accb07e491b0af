"""The safetensors files that `tiered_zero.weights` means: files, an index of files, or the directory of a model."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tiered_zero.errors import ModelError
from tiered_zero.record.files import kind_text
from tiered_zero.sizes import MIB, format_nbytes

WHOLE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
"""As transformers and huggingface_hub write them: {"weight_map": {name of a tensor: file beside the index}}."""

_MOST_INDEX_NBYTES = 64 * MIB
"""That of a large model takes some megabytes."""


def open_safetensors(path: str | Path) -> Any:
    """Open a safetensors file for torch. Raises OSError for what is no file, as a FIFO, which would block; else what
    safetensors raises."""
    _nbytes(path)
    return safe_open(path, framework="pt")


def _nbytes(path: str | Path) -> int:
    """Return the size of a file. Raises OSError for what is none."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is {kind_text(status.st_mode)}; expected a file")
    return status.st_size


def weight_paths(given: Sequence[str]) -> list[str]:
    """List the files, each once. Raises ModelError for a directory or an index that does not say which they are."""
    return list(dict.fromkeys(str(path) for text in given for path in _files_of(Path(text).expanduser())))


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_dir():
        path = _of_directory(path)
    if path.name.endswith(INDEX_SUFFIX):
        yield from _of_index(path)
    else:
        yield path


def _of_directory(directory: Path) -> Path:
    """Return its index, its model.safetensors, or the only file that it has."""
    names = sorted(path.name for path in directory.iterdir())
    files = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    for found in (indexes, [name for name in files if name == WHOLE], files):
        if len(found) == 1:
            return directory / found[0]
    pickled = "" if files else "; *.bin and *.pt files are pickles, which are not read"
    found_text = ", ".join(indexes or files or names[:5]) or "nothing"
    raise ModelError(
        f"tiered_zero.weights: expected an index (*{INDEX_SUFFIX}), {WHOLE} or one other safetensors file in "
        f"{directory}; found {found_text}{pickled}. Name the files themselves."
    )


def _of_index(path: Path) -> Iterator[Path]:
    try:
        if _nbytes(path) > _MOST_INDEX_NBYTES:
            raise ValueError(f"it has {format_nbytes(_nbytes(path))}, more than {format_nbytes(_MOST_INDEX_NBYTES)}")
        files = json.loads(path.read_bytes())["weight_map"].values()
        names = dict.fromkeys(Path(name) for name in files)
        if outside := [str(name) for name in names if name.is_absolute() or ".." in name.parts]:
            raise ValueError(f"{outside[0]} is not in its directory")
        missing = [name for name in names if not (path.parent / name).is_file()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(
            f'tiered_zero.weights: expected {{"weight_map": {{tensor: file}}}} in {path}; {type(error).__name__}: '
            f"{error}. Name the files themselves."
        ) from error
    if missing:
        raise ModelError(
            f"tiered_zero.weights: {path} names {len(names)} files; {missing[0]} is not beside it, of {len(missing)} "
            "that are missing. Copy all of them to one directory."
        )
    yield from (path.parent / name for name in names)
