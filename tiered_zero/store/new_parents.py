"""Make the swap paths that a config names and that do not exist yet."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from tiered_zero.errors import ConfigError
from tiered_zero.io.disk import errno_text

logger = logging.getLogger("tiered_zero")

_ROOT = Path("/")


def make_missing(groups: Mapping[tuple[str, ...], str]) -> None:
    """Make the directories that are missing, with their parents (mode 0700).

    `groups`: directories that are striped together -> the config's key that names them. If some of a group exist, the
    missing one is left to the check that follows, which refuses it: its disk may not be mounted. Raises ConfigError.
    """
    for group, key in groups.items():
        paths = [Path(path) for path in group]
        if not any(path.exists() for path in paths):
            for path in paths:
                _make(path, key)


def _make(path: Path, key: str) -> None:
    missing = [place for place in (path, *path.parents) if not place.exists()][::-1]
    try:
        for place in missing:
            place.mkdir(mode=0o700, exist_ok=True)  # another rank may have made it since
    except OSError as error:
        raise ConfigError(
            f"{key} {path} is missing and cannot be made: {errno_text(error.errno or 0)}. Name a directory on the "
            "disk that is to be swapped to."
        ) from error
    if missing:
        doubt = _doubt(path, missing[0])
        logger.log(logging.WARNING if doubt else logging.INFO, "Made the swap directory %s.%s", path.resolve(), doubt)


def _doubt(path: Path, first: Path) -> str:
    """Warn if an absolute path seems to mean a disk that is not mounted. `first`: the outermost directory that was
    made."""
    is_placeholder = path.is_absolute() and (first != path or first.parent == _ROOT)
    if not is_placeholder or first.stat().st_dev != _ROOT.stat().st_dev:
        return ""
    return (
        f" It lies on the root file system, for {first} did not exist. If a disk was to be mounted there, stop this "
        "run and mount it, or name another nvme_path."
    )
