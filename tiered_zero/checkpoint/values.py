"""Python values as JSON and back, of a closed list of types: what a driver's state and a user's `client_state` hold.

No pickle: reading a stranger's checkpoint makes plain values and runs nothing. A value that JSON has (nan, infinities
and integers of any size too) is itself; any other is an object with one key that begins with "$", its type:

    {"$bytes": base64}    {"$tuple": [...]}    {"$dict": [[key, value], ...]}    keys that are not all plain text
    {"$array": base64}                a .npy file; one without dimensions comes back as a scalar of numpy
    {"$tensor": [dtype, base64]}      a .npy file of its bytes, [*shape, itemsize]; not its strides, device and graph
"""

from __future__ import annotations

import base64
import io
from typing import Any, Final

import numpy
import torch
from numpy.lib import format as npy

from tiered_zero.checkpoint.run_state import dtype_name, torch_dtype
from tiered_zero.errors import ModelError, StoreError

MAX_DEPTH: Final = 50
"""Containers inside containers. JSON nests up to three times as deep, and its parser refuses more than 200 levels."""

SAVED_TYPES: Final = "None, bool, int, float, str, bytes, list, tuple, dict, tensors, and arrays and scalars of numpy"

_AS_THEY_ARE = frozenset({type(None), bool, int, float})
_KEYS = (type(None), bool, int, float, str, bytes, tuple)

_INSTEAD: Final = {
    "argparse.Namespace": "save vars(args)",
    "pathlib": "save str(path)",
    "set": "save sorted(values)",
    "frozenset": "save sorted(values)",
    "collections.deque": "save list(values)",
    "torch.Size": "save tuple(size)",
    "torch.dtype": "save str(dtype)",
    "torch.device": "save str(device)",
    "complex": "save (z.real, z.imag)",
    "bytearray": "save bytes(data)",
    "range": "save (start, stop, step)",
}
"""Type, or its module -> what to save in its place."""


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """Return `value` as JSON has it, with copies of all data. `where`: what the value is, for messages.

    Raises ModelError, with the path, for any other type than `SAVED_TYPES` (a subclass is another type), for text that
    is no Unicode, and for nesting deeper than `MAX_DEPTH`.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is str:
        return _text(value, where)
    if kind is bytes:
        return {"$bytes": _base64(value)}
    if kind is torch.Tensor:
        return {"$tensor": _tensor(value, where)}
    if kind is numpy.ndarray or isinstance(value, numpy.generic):
        return {"$array": _array(numpy.asarray(value), where)}
    if kind in (list, tuple, dict) and depth == MAX_DEPTH:
        raise ModelError(f"{where}: values nested deeper than {MAX_DEPTH} cannot be saved; does one contain itself?")
    if kind is list or kind is tuple:
        items = [
            one if type(one) in _AS_THEY_ARE else encode(one, f"{where}[{at}]", depth + 1)
            for at, one in enumerate(value)
        ]
        return items if kind is list else {"$tuple": items}
    if kind is dict:
        is_plain = all(type(key) is str and key.isascii() and not key.startswith("$") for key in value)
        pairs = []
        for key, own in value.items():
            if not is_plain and not _is_key(key):
                raise ModelError(f"{where}: {_described(key)} cannot be saved as a key; use a number or text.")
            is_itself = type(own) in _AS_THEY_ARE
            name = key if is_plain else encode(key, where)
            pairs.append([name, own if is_itself else encode(own, f"{where}[{key!r}]", depth + 1)])
        return dict(pairs) if is_plain else {"$dict": pairs}
    raise ModelError(f"{where}: {_described(value)} cannot be saved. Saved are {SAVED_TYPES}; {_instead(value)}.")


def decode(values: Any) -> Any:
    """Return the value that `encode` gave as `values`, read from JSON: untrusted. Tensors come on the CPU.

    Raises ValueError for anything that `encode` does not give. Allocates no more than the text takes.
    """
    if type(values) is list:
        return _items(values)
    if type(values) is not dict:
        return values
    if not any(key.startswith("$") for key in values):
        return dict(zip(values, _items([*values.values()]), strict=True))
    if len(values) > 1:
        raise ValueError(f"an object with the keys {sorted(values)[:4]!a} is no value")
    [(kind, own)] = values.items()
    try:
        if kind == "$tuple" and type(own) is list:
            return tuple(_items(own))
        if kind == "$dict":
            pairs = [(decode(key), decode(value)) for key, value in own]
            if len(found := dict(pairs)) == len(pairs) and all(map(_is_key, found)):
                return found
        if kind == "$bytes":
            return base64.b64decode(own, validate=True)
        if kind == "$array":
            return _read_array(own)[()]
        if kind == "$tensor":
            name, data = own
            raw = _read_array(data)
            if raw.dtype == numpy.uint8 and raw.ndim and raw.shape[-1] == torch_dtype(name).itemsize:
                return torch.from_numpy(raw).view(torch_dtype(name))[..., 0]
    except (TypeError, ValueError, OverflowError, RuntimeError, MemoryError, StoreError) as error:
        raise ValueError(f"{kind[:20]!a}: {type(error).__name__}: {str(error)[:200]}") from None
    raise ValueError(f"{kind[:20]!a}: no value of this kind was saved")


def _items(values: list[Any]) -> list[Any]:
    return [*values] if {*map(type, values)} <= _AS_THEY_ARE else [*map(decode, values)]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _tensor(tensor: torch.Tensor, where: str) -> list[str]:
    if tensor.layout is not torch.strided or tensor.is_meta:
        found = "meta" if tensor.is_meta else str(tensor.layout)
        raise ModelError(f"{where}: a {found} tensor cannot be saved; make it a dense one of a plain dtype.")
    try:
        name = dtype_name(tensor.dtype)
    except StoreError as error:
        raise ModelError(f"{where}: {error}") from None
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return [name, _array(plain.unsqueeze(-1).view(torch.uint8).numpy(), where)]


def _array(array: numpy.ndarray[Any, Any], where: str) -> str:
    if array.dtype.kind not in "biufcmMSU" or array.dtype.char in "gG" or not array.dtype.itemsize:  # g: by host
        raise ModelError(f"{where}: a numpy array of dtype {array.dtype} cannot be saved; convert it to a plain dtype.")
    file = io.BytesIO()
    npy.write_array(file, array, version=(1, 0), allow_pickle=False)
    return _base64(file.getvalue())


def _read_array(text: Any) -> numpy.ndarray[Any, Any]:
    """Read a .npy file; `numpy.load` would allocate what its header declares."""
    data = base64.b64decode(text, validate=True)
    file = io.BytesIO(data)
    npy.read_magic(file)
    shape, is_fortran, dtype = npy.read_array_header_1_0(file)
    if dtype.hasobject:
        raise ValueError("an array of objects is never saved")
    array: numpy.ndarray[Any, Any] = numpy.frombuffer(bytearray(data), dtype, offset=file.tell())
    return array.reshape(shape, order="F" if is_fortran else "C")


def _is_key(key: Any) -> bool:
    """Whether it is a key that is found again by its value."""
    return type(key) in _KEYS and (type(key) is not tuple or all(map(_is_key, key)))


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ModelError(
            f"{where}: {text!r:.80} cannot be saved: {text[error.start]!a} is half of a surrogate pair, which no text "
            'file holds. Decode the bytes that it came from with errors="replace", or save them as bytes.'
        ) from None
    return text


def _described(value: Any) -> str:
    kind = type(value)
    if callable(value) and hasattr(value, "__name__"):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__name__}"
    base = next((base for base in kind.__mro__[1:] if base in (dict, list, tuple, set, str, int, float)), None)
    of = f", a subclass of {base.__name__}," if base is not None else ""
    return f"a value of type {kind.__module__}.{kind.__qualname__}{of}".replace("builtins.", "")


def _instead(value: Any) -> str:
    """Name what to save in place of a value that is refused."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if isinstance(value, torch.nn.Parameter):
        return "save .detach().clone()"
    for base in (dict, list, tuple, str, int, float):
        if isinstance(value, base):
            return f"save {base.__name__}(value)"
    return _INSTEAD.get(name) or _INSTEAD.get(name.partition(".")[0]) or "convert it, or leave it out"
