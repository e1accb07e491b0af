"""JSON that was read from a disk: its types are checked before anything is computed from it.

A file is a header line (format, version, bytes and xxh3 of the body) and a JSON body; its header shows a torn one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import xxhash

from tiered_zero.errors import StoreError

MOST_INTEGER = 2**63 - 1
"""Offsets, sizes and steps are signed 64-bit integers."""

MOST_DIGEST = 2**64 - 1

Kinds = type | tuple[type, ...]


def decode_json(data: bytes) -> Any:
    """Raises ValueError for anything that is no JSON, or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def encode_checked(format_name: str, version: int, body: Any) -> bytes:
    """Header line and body. Raises ValueError, TypeError, RecursionError for a body that is no JSON."""
    data = json.dumps(body, separators=(",", ":")).encode()
    header = {"format": format_name, "version": version, "nbytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}
    return json.dumps(header).encode() + b"\n" + data + b"\n"


def decode_checked(data: bytes, path: Path, format_name: str, version: int) -> Any:
    """The body. Raises StoreError for another format or version and for damage, ValueError for what is no such file."""
    line, _, rest = data.partition(b"\n")
    header = decode_json(line)
    if type(header) is dict and (header.get("format") != format_name or header.get("version") != version):
        named, other = (ascii(header.get(name))[:80].strip("'\"") for name in ("format", "version"))
        raise StoreError(f"{path}: expected {format_name} version {version}, found {named} version {other}.")
    check_fields(header, {"format": str, "version": int, "nbytes": int, "xxh3": str})
    body = rest[: max(0, header["nbytes"])]
    if len(body) != header["nbytes"] or xxhash.xxh3_64_hexdigest(body) != header["xxh3"]:
        raise StoreError(f"{path} is damaged: its checksum does not match. This state cannot be recovered.")
    return decode_json(body)


def kinds_of(record: type) -> dict[str, Kinds]:
    """Return the JSON kinds of each field of a dataclass: a list for a tuple (which passes too, if it was not JSON
    yet), an object for a record, and a whole number may be a float."""
    return {name: _kinds_of_hint(hint) for name, hint in get_type_hints(record).items()}


def _kinds_of_hint(hint: Any) -> tuple[type, ...]:
    kind = get_origin(hint) or hint
    if kind is UnionType:
        return tuple(one for each in get_args(hint) for one in _kinds_of_hint(each))
    if is_dataclass(kind):
        return (dict,)
    others: dict[type, tuple[type, ...]] = {tuple: (list, tuple), float: (float, int)}
    return others.get(kind, (kind,))


def check_fields(values: Any, kinds: Mapping[str, Kinds]) -> dict[str, Any]:
    """`values` as an object that has these fields and no others, each exactly of its kinds (True is no int).

    Integers fit into 64 bits, floats are finite. Raises ValueError, naming the field.
    """
    if type(values) is not dict:
        raise ValueError(f"expected an object; found {type(values).__name__}")
    if values.keys() != kinds.keys():
        differing = sorted(values.keys() ^ kinds.keys())[:5]
        raise ValueError(f"expected the fields {', '.join(kinds)}; missing or unknown: {differing!a}")
    for name, kind in kinds.items():
        found = type(values[name])
        if found in (int, float) or found not in (kind if isinstance(kind, tuple) else (kind,)):
            check_kind(name, values[name], kind)
    return values


def check_kind(name: str, value: Any, kind: Kinds) -> None:
    """Raises ValueError."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        expected = " or ".join(one.__name__ for one in kinds)
        raise ValueError(f"{name}: expected {expected}; found {type(value).__name__}")
    if type(value) is int and abs(value) > MOST_INTEGER:
        raise ValueError(f"{name}: expected a 64-bit integer; found a larger one")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number; found {value}")


def check_integers(name: str, values: Iterable[Any], most: int = MOST_INTEGER) -> None:
    """Raises ValueError for anything but whole numbers from 0 to `most`."""
    for value in values:
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"{name}: expected whole numbers from 0 to {most}")
