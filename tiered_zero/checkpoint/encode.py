"""Python values as JSON: values.py has the format."""

from __future__ import annotations

import base64
import json
import math
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final

import numpy
import torch

from tiered_zero.checkpoint.values import (
    FACTORIES,
    INT64,
    MAX_DEPTH,
    NUMPY_DTYPE,
    PLAIN,
    TORCH_DTYPES,
    is_held_by_identity,
)
from tiered_zero.errors import ModelError
from tiered_zero.sizes import format_nbytes

MAX_DATA_NBYTES = 256 << 20
"""Of all tensors, arrays and bytes of one value: they are held in memory and in one JSON text."""

SAVED_TYPES = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range, Counter, OrderedDict, "
    "defaultdict and deque; argparse.Namespace and pathlib.Path; tensors, dtypes, devices and sizes of torch; arrays "
    "and scalars of numpy"
)

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def encode(value: Any, where: str) -> Any:
    """Return `value` as JSON has it, with copies of all data. `where`: what the value is, for messages.

    Raises ModelError, naming the path to it, for a value of any other type than `SAVED_TYPES` (a subclass is another
    type), for text that is no Unicode, for nesting deeper than `MAX_DEPTH`, as of a list that contains itself, and for
    more than `MAX_DATA_NBYTES` of data.
    """
    try:
        return _Encoder().encode(value, 0)
    except _RefusedError as error:
        raise ModelError(f"{where}{''.join(reversed(error.path))}: {error}") from None


class _RefusedError(Exception):
    """`path`: steps from the value that is refused up to the whole."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path: list[str] = []


@final
class _Encoder:
    def __init__(self) -> None:
        self._room = MAX_DATA_NBYTES

    def encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is int:
            return value if -INT64 <= value < INT64 else {"$int": f"{value:x}"}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is str:
            return _text(value)
        if kind in PLAIN:
            return value
        if depth == MAX_DEPTH:
            raise _RefusedError(f"values nested deeper than {MAX_DEPTH} cannot be saved; does one contain itself?")
        if kind is list:
            return self._items(value, depth)
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {_text(key): self._item(value[key], f"[{key!r}]", depth) for key in value}
            return {"$dict": self._pairs(value, depth)}
        encoder = _ENCODERS.get(kind)
        if encoder is not None:
            return encoder(self, value, depth)
        if isinstance(value, numpy.generic):
            return {"$scalar": self._array(numpy.asarray(value))}
        raise _RefusedError(
            f"{_described(value)} cannot be saved. Saved are {SAVED_TYPES}; convert it, or leave it out."
        )

    def _item(self, value: Any, step: str, depth: int) -> Any:
        try:
            return self.encode(value, depth + 1)
        except _RefusedError as error:
            error.path.append(step)
            raise

    def _items(self, values: Iterable[Any], depth: int) -> list[Any]:
        return [self._item(value, f"[{index}]", depth) for index, value in enumerate(values)]

    def _pairs(self, values: dict[Any, Any], depth: int) -> list[Any]:
        return [[self._key(key, depth), self._item(value, f"[{key!r}]", depth)] for key, value in values.items()]

    def _key(self, key: Any, depth: int) -> Any:
        if is_held_by_identity(key):
            raise _RefusedError(f"{_described(key)} cannot be saved as a key; use a number or text")
        return self._item(key, f" (key {key!r:.80})", depth)

    def _elements(self, values: Iterable[Any], depth: int) -> list[Any]:
        """Of a set, in an order that depends on the values alone."""
        return sorted((self._key(value, depth) for value in values), key=json.dumps)

    def _take_room(self, nbytes: int) -> None:
        self._room -= nbytes
        if self._room < 0:
            raise _RefusedError(
                f"at most {format_nbytes(MAX_DATA_NBYTES)} of tensors, arrays and bytes can be saved here, in one text "
                "with the counters. Save more in a file of its own, as with safetensors."
            )

    def _data(self, data: bytes | bytearray) -> str:
        self._take_room(len(data))
        return _base64(data)

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in _DTYPE_NAMES:
            found = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
            raise _RefusedError(f"a {found} tensor cannot be saved; make it a dense one of a plain dtype")
        self._take_room(tensor.nbytes)
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        return {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data": _base64(data)}

    def _array(self, array: numpy.ndarray[Any, Any]) -> dict[str, Any]:
        if not NUMPY_DTYPE.fullmatch(array.dtype.str) or array.dtype.itemsize == 0:
            raise _RefusedError(f"a numpy array of dtype {array.dtype} cannot be saved; convert it to a plain dtype")
        self._take_room(array.nbytes)
        data = array.tobytes()  # row-major
        return {"dtype": array.dtype.str, "shape": list(array.shape), "data": _base64(data)}


def _base64(data: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(data).decode("ascii")


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
    if isinstance(value, torch.nn.Parameter):
        return "an nn.Parameter (take .detach().clone())"
    base = next((base for base in kind.__mro__[1:] if base in (dict, list, tuple, set, str, int, float)), None)
    of = f", a subclass of {base.__name__}," if base is not None else ""
    return f"a value of type {kind.__module__}.{kind.__qualname__}{of}".replace("builtins.", "")


def _defaultdict(encoder: _Encoder, value: defaultdict[Any, Any], depth: int) -> dict[str, Any]:
    name = next((name for name, factory in FACTORIES.items() if factory is value.default_factory), None)
    if name is None:
        raise _RefusedError(
            f"a defaultdict of {_described(value.default_factory)} cannot be saved, only one of "
            f"{', '.join(FACTORIES)}; convert it to a dict"
        )
    return {"$defaultdict": [name, encoder._pairs(value, depth)]}


def _namespace(encoder: _Encoder, value: Namespace, depth: int) -> dict[str, Any]:
    return {"$namespace": {_text(n): encoder._item(item, f".{n}", depth) for n, item in vars(value).items()}}


_ENCODERS: dict[type, Callable[[_Encoder, Any, int], dict[str, Any]]] = {
    complex: lambda e, v, d: {"$complex": e._items((v.real, v.imag), d)},
    bytes: lambda e, v, d: {"$bytes": e._data(v)},
    bytearray: lambda e, v, d: {"$bytearray": e._data(v)},
    tuple: lambda e, v, d: {"$tuple": e._items(v, d)},
    set: lambda e, v, d: {"$set": e._elements(v, d)},
    frozenset: lambda e, v, d: {"$frozenset": e._elements(v, d)},
    range: lambda e, v, d: {"$range": e._items((v.start, v.stop, v.step), d)},
    OrderedDict: lambda e, v, d: {"$ordered": e._pairs(v, d)},
    Counter: lambda e, v, d: {"$counter": e._pairs(v, d)},
    defaultdict: _defaultdict,
    deque: lambda e, v, d: {"$deque": [v.maxlen, e._items(v, d)]},
    Namespace: _namespace,
    type(Path()): lambda e, v, d: {"$path": _text(str(v))},
    torch.Tensor: lambda e, v, d: {"$tensor": e._tensor(v)},
    numpy.ndarray: lambda e, v, d: {"$array": e._array(v)},
    torch.dtype: lambda e, v, d: {"$dtype": str(v).removeprefix("torch.")},
    torch.device: lambda e, v, d: {"$device": str(v)},
    torch.Size: lambda e, v, d: {"$size": list(v)},
}
