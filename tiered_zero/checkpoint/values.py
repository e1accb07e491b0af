"""Python values as JSON and back, of a closed list of types: what a driver's state and a user's `client_state` hold.

No pickle: reading a stranger's checkpoint makes plain values and runs nothing. A value that JSON has is itself; any
other is an object with one key that begins with "$", its type:

    None, bool, str, float, int below 2**63, list, dict with text keys    themselves
    {"$int": "-8000..."}    a larger int, hexadecimal       {"$float": "7ff8..."}   nan and the infinities, 8 bytes
    {"$bytes": base64}      {"$tuple": [...]}               {"$dict": [[key, value], ...]}
    {"$tensor": {"dtype", "shape", "data": base64}}         row-major; strides, device and graph are not kept
    {"$array": the same}    {"$scalar": the same}           numpy's
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable
from typing import Any, Final, final

import numpy
import torch

from tiered_zero.checkpoint.index import ITEMSIZES
from tiered_zero.checkpoint.run_state import torch_dtype
from tiered_zero.errors import ModelError
from tiered_zero.sizes import format_nbytes

MAX_DEPTH: Final = 50
"""Containers inside containers. JSON nests up to three times as deep; Python's own limit is 1000."""

MAX_DATA_NBYTES = 256 << 20
"""Of all tensors, arrays and bytes of one value: they are held in memory and in one JSON text."""

SAVED_TYPES: Final = "None, bool, int, float, str, bytes, list, tuple, dict, tensors, and arrays and scalars of numpy"

_NUMPY_DTYPE = re.compile(
    r"\|b1|\|[iu]1|[<>](?:[iu][248]|f[248]|c8|c16|[mM]8(?:\[[0-9]{0,9}[a-zA-Z]{1,2}\])?|U[0-9]{1,9})|\|S[0-9]{1,9}"
)
"""Every dtype of numpy that may be saved, as `dtype.str`."""

_INT64 = 1 << 63
_PLAIN = frozenset({type(None), bool, str})
_AS_THEY_ARE = _PLAIN | {int, float}
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


# -- to JSON -----------------------------------------------------------------------------------------------------------


def encode(value: Any, where: str) -> Any:
    """Return `value` as JSON has it, with copies of all data. `where`: what the value is, for messages.

    Raises ModelError, with the path, for any other type than `SAVED_TYPES` (a subclass is another type), for text that
    is no Unicode, nesting deeper than `MAX_DEPTH`, and more than `MAX_DATA_NBYTES` of data.
    """
    encoder = _Encoder()
    try:
        return encoder.encode(value)
    except _RefusedError as error:
        raise ModelError(f"{where}{''.join(encoder.path)}: {error}") from None


class _RefusedError(Exception):
    """A value cannot be saved."""


@final
class _Encoder:
    """`path`: steps from the whole to the value that is being encoded."""

    def __init__(self) -> None:
        self.path: list[str] = []
        self._room = MAX_DATA_NBYTES

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind is str:
            return value if value.isascii() else _text(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if -_INT64 <= value < _INT64 else {"$int": f"{value:x}"}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is bytes:
            return {"$bytes": self._data(value)}
        if kind is torch.Tensor:
            return {"$tensor": self._tensor(value)}
        if kind is numpy.ndarray:
            return {"$array": self._array(value)}
        if len(self.path) == MAX_DEPTH and kind in (list, tuple, dict):
            raise _RefusedError(f"values nested deeper than {MAX_DEPTH} cannot be saved; does one contain itself?")
        if kind is list or kind is tuple:
            items = self._items(value)
            return items if kind is list else {"$tuple": items}
        if kind is dict:
            return self._dict(value)
        if isinstance(value, numpy.generic):
            return {"$scalar": self._array(numpy.asarray(value))}
        raise _RefusedError(f"{_described(value)} cannot be saved. Saved are {SAVED_TYPES}; {_instead(value)}.")

    def _items(self, values: list[Any] | tuple[Any, ...]) -> list[Any]:
        if {*map(type, values)} == {int} and min(values) >= -_INT64 and max(values) < _INT64:
            return [*values]  # the words of a generator, at once
        found = []
        for index, value in enumerate(values):
            self.path.append(f"[{index}]")
            found.append(self.encode(value))
            self.path.pop()
        return found

    def _dict(self, values: dict[Any, Any]) -> dict[str, Any]:
        is_plain = {*map(type, values)} <= {str} and "$" not in {key[:1] for key in values}
        pairs = []
        for key, value in values.items():
            if not is_plain and not _is_key(key):
                raise _RefusedError(f"{_described(key)} cannot be saved as a key; use a number or text.")
            own = key if is_plain and key.isascii() else self.encode(key)
            self.path.append(f"[{key!r}]")
            pairs.append([own, self.encode(value)])
            self.path.pop()
        return dict(pairs) if is_plain else {"$dict": pairs}

    def _take_room(self, nbytes: int) -> None:
        self._room -= nbytes
        if self._room < 0:
            raise _RefusedError(
                f"at most {format_nbytes(MAX_DATA_NBYTES)} of tensors, arrays and bytes can be saved here, in one text "
                "with the counters. Save more in a file of its own, as with safetensors."
            )

    def _data(self, data: bytes) -> str:
        self._take_room(len(data))
        return base64.b64encode(data).decode("ascii")

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout is not torch.strided or tensor.is_meta or name not in ITEMSIZES:
            found = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
            raise _RefusedError(f"a {found} tensor cannot be saved; make it a dense one of a plain dtype")
        self._take_room(tensor.nbytes)
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        data = base64.b64encode(flat.view(torch.uint8).numpy().data if flat.numel() else b"").decode("ascii")
        return {"dtype": name, "shape": list(tensor.shape), "data": data}

    def _array(self, array: numpy.ndarray[Any, Any]) -> dict[str, Any]:
        if not _NUMPY_DTYPE.fullmatch(array.dtype.str) or array.dtype.itemsize == 0:
            raise _RefusedError(f"a numpy array of dtype {array.dtype} cannot be saved; convert it to a plain dtype")
        self._take_room(array.nbytes)
        data = base64.b64encode(array.tobytes()).decode("ascii")  # row-major
        return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def _is_key(key: Any) -> bool:
    """Whether it is a key that is found again by its value."""
    return type(key) in _KEYS and (type(key) is not tuple or all(map(_is_key, key)))


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _RefusedError(
            f"{text!r:.80} cannot be saved: {text[error.start]!a} is half of a surrogate pair, which no text file "
            'holds. Decode the bytes that it came from with errors="replace", or save them as bytes.'
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


# -- from JSON, which is untrusted -------------------------------------------------------------------------------------


def decode(values: Any) -> Any:
    """Return the value that `encode` gave as `values`, as `json.loads` returns it: untrusted. Tensors come on the CPU.

    Raises ValueError for anything that `encode` does not give. Allocates no more than the text takes.
    """
    return _decode(values, 0)


def _decode(values: Any, depth: int) -> Any:
    kind = type(values)
    # one more than encode: the object of a tag is none of its containers
    if kind in (dict, list) and depth > MAX_DEPTH:
        raise ValueError(f"values are nested deeper than {MAX_DEPTH}")
    if kind is list:
        return _list(values, depth)
    if kind is dict:
        tags = [key for key in values if key.startswith("$")]
        if not tags:
            return dict(zip(values, _items([*values.values()], depth), strict=True))
        decoder = _DECODERS.get(tags[0])
        if decoder is None or len(values) > 1:
            raise ValueError(f"an object with the keys {sorted(values)[:4]!a} is no value")
        try:
            return decoder(values[tags[0]], depth)
        except ValueError:
            raise
        except (TypeError, OverflowError, RuntimeError, MemoryError) as error:
            raise ValueError(f"{tags[0]}: {type(error).__name__}: {str(error)[:200]}") from None
    if kind in _AS_THEY_ARE:
        return values
    raise ValueError(f"expected what JSON has; found {kind.__name__}")


def _list(values: Any, depth: int) -> list[Any]:
    return _items(_as(list, values), depth)


def _items(values: list[Any], depth: int) -> list[Any]:
    if {*map(type, values)} <= _AS_THEY_ARE:
        return [*values]
    return [value if type(value) in _AS_THEY_ARE else _decode(value, depth + 1) for value in values]


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}; found {type(value).__name__}")
    return value


def _dict(values: Any, depth: int) -> dict[Any, Any]:
    pairs = [_list(pair, depth) for pair in _as(list, values)]
    if any(len(pair) != 2 or not _is_key(pair[0]) for pair in pairs):
        raise ValueError("a dict was expected as pairs of a key and a value")
    if len(found := {key: value for key, value in pairs}) != len(pairs):
        raise ValueError("a dict has a key twice")
    return found


def _float(text: Any) -> float:
    number: float = struct.unpack(">d", bytes.fromhex(_as(str, text)))[0] if len(text) == 16 else 0.0
    if math.isfinite(number):
        raise ValueError("expected nan or an infinity, as 16 hexadecimal digits")
    return number


def _bytes(text: Any) -> bytes:
    return base64.b64decode(_as(str, text), validate=True)


def _data_of(values: Any) -> tuple[str, list[int], bytes]:
    if _as(dict, values).keys() != {"dtype", "shape", "data"}:
        raise ValueError(f"an array was expected with dtype, shape and data; found {sorted(values)[:4]!a}")
    shape: list[int] = _as(list, values["shape"])
    if len(shape) > 64 or any(not 0 <= _as(int, size) < _INT64 for size in shape):
        raise ValueError("an array was expected to have a shape of at most 64 dimensions")
    return _as(str, values["dtype"]), shape, _bytes(values["data"])


def _check_data(data: bytes, shape: list[int], itemsize: int, is_bool: bool) -> None:
    if math.prod(shape) * itemsize != len(data):
        raise ValueError(f"an array of shape {shape} and {itemsize} bytes an element has {len(data)} bytes")
    if is_bool and max(data, default=0) > 1:
        raise ValueError("a bool is neither 0 nor 1")


def _tensor(values: Any) -> torch.Tensor:
    name, shape, data = _data_of(values)
    if name not in ITEMSIZES:
        raise ValueError(f"no dtype of torch: {name!a:.80}")
    dtype = torch_dtype(name)
    _check_data(data, shape, dtype.itemsize, dtype is torch.bool)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape).clone()


def _array(values: Any) -> numpy.ndarray[Any, Any]:
    name, shape, data = _data_of(values)
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"no dtype of numpy: {name!a:.80}")
    dtype = numpy.dtype(name)
    _check_data(data, shape, dtype.itemsize, dtype.kind == "b")
    if not data:
        return numpy.empty(shape, dtype)
    if dtype.kind == "U" and numpy.frombuffer(data, dtype.byteorder + "u4").max() > 0x10FFFF:
        raise ValueError("text of numpy is no Unicode")
    array: numpy.ndarray[Any, Any] = numpy.frombuffer(data, dtype).reshape(shape).copy()
    return array


def _scalar(values: Any) -> Any:
    array = _array(values)
    if array.ndim:
        raise ValueError("a scalar was expected without dimensions")
    return array[()]


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "$int": lambda v, d: int(_as(str, v), 16),
    "$float": lambda v, d: _float(v),
    "$bytes": lambda v, d: _bytes(v),
    "$tuple": lambda v, d: tuple(_list(v, d)),
    "$dict": _dict,
    "$tensor": lambda v, d: _tensor(v),
    "$array": lambda v, d: _array(v),
    "$scalar": lambda v, d: _scalar(v),
}
