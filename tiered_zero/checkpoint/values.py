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
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final

import numpy
import torch

from tiered_zero.errors import ModelError
from tiered_zero.sizes import format_nbytes

MAX_DEPTH = 50
"""Containers inside containers. JSON nests up to three times as deep; Python's own limit is 1000."""

MAX_DATA_NBYTES = 256 << 20
"""Of all tensors, arrays and bytes of one value: they are held in memory and in one JSON text."""

SAVED_TYPES = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range, Counter, OrderedDict, "
    "defaultdict and deque; argparse.Namespace and pathlib.Path; tensors, dtypes, devices and sizes of torch; arrays "
    "and scalars of numpy"
)

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64 "
        "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    ).split()
    if hasattr(torch, name)
}
"""Every dtype that a tensor in a checkpoint may have, by its name."""

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_NUMPY_DTYPE = re.compile(
    r"\|b1|\|[iu]1|[<>](?:[iu][248]|f[248]|c8|c16|[mM]8(?:\[[0-9]{0,9}[a-zA-Z]{1,2}\])?|U[0-9]{1,9})|\|S[0-9]{1,9}"
)
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "None": None, "bool": bool, "int": int, "float": float, "str": str, "bytes": bytes, "list": list, "tuple": tuple,
    "dict": dict, "set": set, "frozenset": frozenset, "Counter": Counter, "OrderedDict": OrderedDict, "deque": deque,
}  # fmt: skip
_INT64 = 1 << 63
_PLAIN = frozenset({type(None), bool, str})


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


def decode(values: Any) -> Any:
    """Return the value that `encode` gave as `values`, as `json.loads` returns it: untrusted. Tensors come on the CPU.

    Raises ValueError for anything that `encode` does not give. Allocates no more than the text takes.
    """
    return _decode(values, 0)


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
            return value if -_INT64 <= value < _INT64 else {"$int": f"{value:x}"}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is str:
            return _text(value)
        if kind in _PLAIN:
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
        if _is_held_by_identity(key):
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
        if not _NUMPY_DTYPE.fullmatch(array.dtype.str) or array.dtype.itemsize == 0:
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


def _is_held_by_identity(key: Any) -> bool:
    """Whether a key is equal to itself alone, so that the copy in a file could not be found again."""
    return isinstance(key, torch.Tensor) or (isinstance(key, tuple | frozenset) and any(map(_is_held_by_identity, key)))


def _defaultdict(encoder: _Encoder, value: defaultdict[Any, Any], depth: int) -> dict[str, Any]:
    name = next((name for name, factory in _FACTORIES.items() if factory is value.default_factory), None)
    if name is None:
        raise _RefusedError(
            f"a defaultdict of {_described(value.default_factory)} cannot be saved, only one of "
            f"{', '.join(_FACTORIES)}; convert it to a dict"
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


def _decode(values: Any, depth: int) -> Any:
    kind = type(values)
    if (
        kind in (dict, list) and depth > MAX_DEPTH
    ):  # one more than encode: the object of a tag is none of its containers
        raise ValueError(f"values are nested deeper than {MAX_DEPTH}")
    if kind is dict:
        tags = [key for key in values if key.startswith("$")]
        if not tags:
            return {key: _decode(value, depth + 1) for key, value in values.items()}
        decoder = _DECODERS.get(tags[0])
        if decoder is None or len(values) > 1:
            raise ValueError(f"an object with the keys {sorted(values)[:4]!a} is no value")
        try:
            return decoder(values[tags[0]], depth)
        except ValueError:
            raise
        except (TypeError, OverflowError, RuntimeError, MemoryError) as error:
            raise ValueError(f"{tags[0]}: {type(error).__name__}: {str(error)[:200]}") from None
    if kind is list:
        return [_decode(value, depth + 1) for value in values]
    if kind in (int, float, str) or kind in _PLAIN:
        return values
    raise ValueError(f"expected what JSON has; found {kind.__name__}")


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}; found {type(value).__name__}")
    return value


def _all_ints(values: Any, least: int | None = None) -> list[int]:
    numbers: list[int] = [_as(int, value) for value in _as(list, values)]
    if any(abs(number) >= _INT64 or (least is not None and number < least) for number in numbers):
        raise ValueError("an integer is out of range")
    return numbers


def _list(values: Any, depth: int) -> list[Any]:
    return [_decode(value, depth + 1) for value in _as(list, values)]


def _distinct(values: Any, depth: int) -> frozenset[Any]:
    found = _list(values, depth)
    if any(map(_is_held_by_identity, found)) or len(made := frozenset(found)) != len(found):
        raise ValueError("a set has an element twice, or a tensor")
    return made


def _dict(values: Any, depth: int) -> dict[Any, Any]:
    pairs = [_list(pair, depth) for pair in _as(list, values)]
    if any(len(pair) != 2 or _is_held_by_identity(pair[0]) for pair in pairs):
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


def _complex(values: Any, depth: int) -> complex:
    real, imag = (_as(float, part) for part in _list(values, depth))
    return complex(real, imag)


def _range(values: Any) -> range:
    start, stop, step = (_as(int, _decode(part, MAX_DEPTH)) for part in _as(list, values))
    return range(start, stop, step)


def _default(values: Any, depth: int) -> defaultdict[Any, Any]:
    name, pairs = _as(list, values)
    if _as(str, name) not in _FACTORIES:
        raise ValueError(f"a defaultdict of {name!a:.80}")
    return defaultdict(_FACTORIES[name], _dict(pairs, depth))


def _deque(values: Any, depth: int) -> deque[Any]:
    maxlen, items = _as(list, values)
    found = _list(items, depth)
    if maxlen is not None and not len(found) <= _as(int, maxlen) < _INT64:
        raise ValueError("a deque is longer than its maxlen")
    return deque(found, maxlen)


def _make_namespace(values: Any, depth: int) -> Namespace:
    made = Namespace()
    made.__dict__.update({name: _decode(value, depth + 1) for name, value in _as(dict, values).items()})
    return made


def _data_of(values: Any) -> tuple[str, list[int], bytes]:
    if _as(dict, values).keys() != {"dtype", "shape", "data"}:
        raise ValueError(f"an array was expected with dtype, shape and data; found {sorted(values)[:4]!a}")
    shape = _all_ints(values["shape"], least=0)
    if len(shape) > 64:
        raise ValueError(f"an array has {len(shape)} dimensions; at most 64")
    return _as(str, values["dtype"]), shape, _bytes(values["data"])


def _check_size(data: bytes, shape: list[int], itemsize: int) -> None:
    if math.prod(shape) * itemsize != len(data):
        raise ValueError(f"an array of shape {shape} and {itemsize} bytes an element has {len(data)} bytes")


def _tensor(values: Any) -> torch.Tensor:
    name, shape, data = _data_of(values)
    dtype = _dtype(name)
    _check_size(data, shape, dtype.itemsize)
    if not data:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool and max(data) > 1:
        raise ValueError("a bool is neither 0 nor 1")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape).clone()


def _array(values: Any) -> numpy.ndarray[Any, Any]:
    name, shape, data = _data_of(values)
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"no dtype of numpy: {name!a:.80}")
    dtype = numpy.dtype(name)
    _check_size(data, shape, dtype.itemsize)
    if not data:
        return numpy.empty(shape, dtype)
    if dtype.kind == "b" and max(data) > 1:
        raise ValueError("a bool is neither 0 nor 1")
    if dtype.kind == "U" and numpy.frombuffer(data, dtype.byteorder + "u4").max() > 0x10FFFF:
        raise ValueError("text of numpy is no Unicode")
    array: numpy.ndarray[Any, Any] = numpy.frombuffer(data, dtype).reshape(shape).copy()
    return array


def _scalar(values: Any) -> Any:
    array = _array(values)
    if array.ndim:
        raise ValueError("a scalar was expected without dimensions")
    return array[()]


def _dtype(name: Any) -> torch.dtype:
    if _as(str, name) not in TORCH_DTYPES:
        raise ValueError(f"no dtype of torch: {name!a:.80}")
    return TORCH_DTYPES[name]


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "$int": lambda v, d: int(_as(str, v), 16),
    "$float": lambda v, d: _float(v),
    "$complex": _complex,
    "$bytes": lambda v, d: _bytes(v),
    "$bytearray": lambda v, d: bytearray(_bytes(v)),
    "$path": lambda v, d: Path(_as(str, v)),
    "$tuple": lambda v, d: tuple(_list(v, d)),
    "$set": lambda v, d: set(_distinct(v, d)),
    "$frozenset": _distinct,
    "$range": lambda v, d: _range(v),
    "$dict": _dict,
    "$ordered": lambda v, d: OrderedDict(_dict(v, d)),
    "$counter": lambda v, d: Counter(_dict(v, d)),
    "$defaultdict": _default,
    "$deque": _deque,
    "$namespace": _make_namespace,
    "$tensor": lambda v, d: _tensor(v),
    "$array": lambda v, d: _array(v),
    "$scalar": lambda v, d: _scalar(v),
    "$dtype": lambda v, d: _dtype(v),
    "$device": lambda v, d: torch.device(_as(str, v)),
    "$size": lambda v, d: torch.Size(_all_ints(v)),
}
