"""Python values as JSON and back, of a closed list of types: what a driver's state and a user's `client_state` hold.

No pickle: reading a stranger's checkpoint makes plain values and runs nothing. A value that JSON has is itself; any
other is an object with one key that begins with "$", its type:

    None, bool, str, float, int below 2**63, list, dict with text keys    themselves
    {"$int": "-8000..."}       a larger int, hexadecimal         {"$float": "7ff8..."}   nan and the infinities, 8 bytes
    {"$complex": [re, im]}     {"$bytes": base64}                {"$bytearray": base64}  {"$path": text}
    {"$tuple": [...]}          {"$set": [...]}                   {"$frozenset": [...]}   {"$range": [start, stop, step]}
    {"$dict": [[key, value], ...]}                               {"$ordered": the same}  {"$counter": the same}
    {"$defaultdict": [name of the factory, [[key, value], ...]]} {"$deque": [maxlen, [...]]}
    {"$namespace": {name: value}}                                argparse's
    {"$tensor": {"dtype", "shape", "data": base64}}              row-major; strides, device and graph are not kept
    {"$array": the same}       {"$scalar": the same}             numpy's
    {"$dtype": "bfloat16"}     {"$device": "cuda:0"}             {"$size": [...]}        torch's

This file has what the two directions share: encode.py and decode.py.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch

MAX_DEPTH = 50
"""Containers inside containers. JSON nests up to three times as deep; Python's own limit is 1000."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64 "
        "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    ).split()
    if hasattr(torch, name)
}
"""Every dtype that a tensor in a checkpoint may have, by its name."""

NUMPY_DTYPE = re.compile(
    r"\|b1|\|[iu]1|[<>](?:[iu][248]|f[248]|c8|c16|[mM]8(?:\[[0-9]{0,9}[a-zA-Z]{1,2}\])?|U[0-9]{1,9})|\|S[0-9]{1,9}"
)
"""Every dtype of numpy that may be saved, as `dtype.str`."""

FACTORIES: dict[str, Callable[[], Any] | None] = {
    "None": None, "bool": bool, "int": int, "float": float, "str": str, "bytes": bytes, "list": list, "tuple": tuple,
    "dict": dict, "set": set, "frozenset": frozenset, "Counter": Counter, "OrderedDict": OrderedDict, "deque": deque,
}  # fmt: skip
"""What a saved defaultdict may make, by its name."""

INT64 = 1 << 63
PLAIN = frozenset({type(None), bool, str})
"""Types that JSON has as they are."""


def is_held_by_identity(key: Any) -> bool:
    """Whether a key is equal to itself alone, so that the copy in a file could not be found again."""
    return isinstance(key, torch.Tensor) or (isinstance(key, tuple | frozenset) and any(map(is_held_by_identity, key)))
