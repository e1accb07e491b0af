"""Name the tiers, and align, print and parse byte sizes."""

import math

TIERS = ("device", "host", "nvme")
"""The names of the tiers, fastest first."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

PAGE_NBYTES = 4096
"""The alignment of every extent in a file, slot in host memory and O_DIRECT request. It suits disks with sectors of 512
bytes and of 4 KiB."""

HUGE_PAGE_NBYTES = 2 * MIB
"""The size of a huge page on x86 and most ARM systems."""

_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "kib": KIB, "m": 10**6, "mb": 10**6, "mib": MIB}
_UNITS |= {"g": 10**9, "gb": 10**9, "gib": GIB, "t": 10**12, "tb": 10**12, "tib": 1 << 40}


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


def format_nbytes(nbytes: float) -> str:
    """Format a size: 1536 -> '1.5 KiB'; exact below 1 KiB."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def ceil_nbytes(nbytes: int) -> str:
    """Format a size, rounded up: 1537 -> '1.6 KiB'. `parse_nbytes` of the text gives at least `nbytes`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            tenths = -(-10 * nbytes // unit)
            return f"{tenths // 10}.{tenths % 10} {name}"
    return f"{nbytes} B"


def parse_nbytes(text: str | int | float) -> int:
    """Parse a size in bytes, such as '1.5GiB', '512 MB' or 4096. Raises ValueError for another form or a negative
    size."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not 0 <= text < math.inf or text != int(text):
            raise ValueError(f"a size in bytes must be a whole number >= 0, not {text!s:.100}")
        return int(text)
    digits, unit = _split_unit(text)
    try:
        nbytes = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        nbytes = -1
    if nbytes < 0:
        raise ValueError(f"{text!r:.100} is no size; write bytes, or a number with KiB to TiB, or KB to TB")
    return nbytes


def parse_hardware_nbytes(text: str) -> int:
    """Parse a size or rate of hardware. Raises ValueError for text that `parse_nbytes` refuses, for zero, and for a
    number below 1 MiB without a unit."""
    nbytes = parse_nbytes(text)
    if nbytes <= 0:
        raise ValueError(f"{text!r:.100} is not above zero")
    if nbytes < MIB and not _split_unit(text)[1]:
        raise ValueError(f"{text!r:.100} has no unit and would be bytes; add one, such as {text.strip():.20}GiB")
    return nbytes


def _split_unit(text: object) -> tuple[str, str]:
    stripped = str(text).strip().lower().replace(" ", "")
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyz")
    return digits, stripped[len(digits) :]
