"""Write and read JSON files of strict pydantic models: every manifest, owner file and index.

A file is a header line (format, version, bytes and xxh3 of the body) and a JSON body; the header reveals a torn file.
Files may be hostile: types, fields and ranges are checked before anything is computed from them, and models check
declared sizes before anything is allocated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiered_zero.errors import StoreError
from tiered_zero.sizes import format_nbytes

VERSION: Final = 3
"""The version of every file. 0.1.0 was never published, so files of earlier versions are refused."""

MOST_NBYTES: Final = 1 << 28
"""Limit of a file's size. A checksum takes about 45 bytes, so this is enough for several TiB of state."""

MOST_INTEGER: Final = 2**63 - 1
"""Limit of offsets, sizes and steps, which are signed 64-bit integers."""

Count = Annotated[int, Field(ge=0, le=MOST_INTEGER)]
Digest = Annotated[int, Field(ge=0, le=2**64 - 1)]


class StrictModel(BaseModel):
    """A frozen record with exactly its fields, each of exactly its type (True is no int, 1 no text)."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", ser_json_inf_nan="constants")


Model = TypeVar("Model", bound=StrictModel)


def encode_file(format_name: str, model: StrictModel) -> bytes:
    """Return the file's bytes: header line and body. Raises StoreError if `model` is not JSON or too large to read
    back."""
    try:
        data = model.model_dump_json().encode()
    except ValueError as error:  # PydanticSerializationError
        raise StoreError(f"A {format_name} must be JSON: {error}.") from error
    if len(data) > MOST_NBYTES:
        raise StoreError(
            f"A {format_name} takes {format_nbytes(len(data))}; at most {format_nbytes(MOST_NBYTES)} can be read back. "
            "Keep large values out of client_state, or raise zero_optimization.sub_group_size."
        )
    header = {"format": format_name, "version": VERSION, "nbytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}
    return json.dumps(header).encode() + b"\n" + data + b"\n"


def decode_file(data: bytes, path: Path, format_name: str, model: type[Model]) -> Model:
    """Return the body of a file. Raises StoreError for another format or version, damage, or an invalid model."""
    line, _, rest = data.partition(b"\n")
    try:
        header: Any = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if type(header) is not dict:
        raise StoreError(
            f"{path}: expected {format_name} version {VERSION}, found no header: it is damaged, or of an older version."
        )
    if header.get("format") != format_name or header.get("version") != VERSION:
        named, other = (ascii(header.get(name))[:80].strip("'\"") for name in ("format", "version"))
        way = "; read it with the release that wrote it" if header.get("format") == format_name else ""
        raise StoreError(f"{path}: expected {format_name} version {VERSION}, found {named} version {other}{way}.")
    body = rest[:-1]
    if header.get("nbytes") != len(body) or header.get("xxh3") != xxhash.xxh3_64_hexdigest(body):
        raise StoreError(f"{path} is damaged: its checksum does not match. This state cannot be recovered.")
    return decode_body(body, path, format_name, model)


def decode_body(body: bytes, path: Path, name: str, model: type[Model]) -> Model:
    """Parse JSON text as a model. Raises StoreError with the first problem."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise StoreError(f"{path} is not a {name} ({first_problem(error)}).") from error


def first_problem(error: ValidationError) -> str:
    """Describe the first problem and its place: "tensors.master/w.dtype: Input should be a valid string"."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{ascii(where)[1:-1][:200]}: {first['msg']}" if where else first["msg"]
