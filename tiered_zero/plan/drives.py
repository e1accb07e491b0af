"""Drives that a run is planned for in place of this machine's: `--disk SIZE[:READ,WRITE[:TBW]]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiered_zero.errors import ConfigError
from tiered_zero.plan.swap_capacity import DirectoryNeed
from tiered_zero.sizes import parse_nbytes

_TERABYTES = {"tbw": 10**12, "pbw": 10**15}


@dataclass(frozen=True, kw_only=True)
class Drive:
    """`text`: as it was given. Rates in bytes a second; `rated_nbytes`: what may be written in its life. None: not
    given."""

    text: str
    nbytes: int
    read_bytes_per_s: int | None = None
    write_bytes_per_s: int | None = None
    rated_nbytes: int | None = None


def parse_drive(text: str) -> Drive:
    """Read "2TB", "2TB:7GB/s,5GB/s" or "2TB:7GB/s,5GB/s:1200TBW". Raises ConfigError."""
    size, _, rest = text.partition(":")
    rates, _, rating = rest.partition(":")
    try:
        read, write = (parse_nbytes(rate.strip().removesuffix("/s")) for rate in rates.split(",")) if rates else (0, 0)
        scale = _TERABYTES[rating.strip().lower()[-3:]] if rating else 0
        rated_nbytes = int(float(rating.strip()[:-3]) * scale) if rating else 0
        nbytes = parse_nbytes(size)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"expected SIZE[:READ,WRITE[:TBW]], such as 2TB:7GB/s,5GB/s:1200TBW; found {text!r:.100} ({error})"
        ) from error
    return Drive(
        text=text,
        nbytes=nbytes,
        read_bytes_per_s=read or None,
        write_bytes_per_s=write or None,
        rated_nbytes=rated_nbytes or None,
    )


def fill_drives(needs: Sequence[DirectoryNeed], drives: Sequence[Drive]) -> list[dict[str, Any]]:
    """Return rows as `look_at_drives` does. As many drives as directories have one each, in the order of the config;
    other numbers of drives share all bytes evenly, as `nvme_path` with a directory on each has them."""
    rows = []
    for index, drive in enumerate(drives):
        own, shares = (needs[index : index + 1], 1) if len(drives) == len(needs) else (needs, len(drives))
        nbytes = -(-sum(need.nbytes for need in own) // shares)
        written = -(-sum(need.written_per_step for need in own) // shares)
        rows.append(
            {
                "disk": drive.text,
                "directories": [need.path for need in own],
                "nbytes": nbytes,
                "free_nbytes": drive.nbytes,
                "fits": nbytes <= drive.nbytes,
                "written_nbytes_per_step": written,
                "read_bytes_per_s": drive.read_bytes_per_s,
                "write_bytes_per_s": drive.write_bytes_per_s,
                "rated_nbytes": drive.rated_nbytes,
            }
        )
    return rows
