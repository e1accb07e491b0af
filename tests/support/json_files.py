"""Files of strict models with any body, as a stranger may have written them: their headers are right."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from tests.support.inspection.insides import FILE_VERSION


def read_body(data: bytes) -> Any:
    return json.loads(data.split(b"\n")[1])


def with_body(format_name: str, body: Any) -> bytes:
    """A file of this format, whatever its body is."""
    text = json.dumps(body).encode()
    checksum = xxhash.xxh3_64_hexdigest(text)
    header = {"format": format_name, "version": FILE_VERSION, "nbytes": len(text), "xxh3": checksum}
    return json.dumps(header).encode() + b"\n" + text + b"\n"
