"""Python values from the JSON of values.py, which is untrusted."""

from __future__ import annotations

import base64
import math
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    if kind in (int, float, str) or kind in PLAIN:
        return values
    raise ValueError(f"expected what JSON has; found {kind.__name__}")


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}; found {type(value).__name__}")
    return value


def _all_ints(values: Any, least: int | None = None) -> list[int]:
    numbers: list[int] = [_as(int, value) for value in _as(list, values)]
    if any(abs(number) >= INT64 or (least is not None and number < least) for number in numbers):
        raise ValueError("an integer is out of range")
    return numbers


def _list(values: Any, depth: int) -> list[Any]:
    return [_decode(value, depth + 1) for value in _as(list, values)]


def _distinct(values: Any, depth: int) -> frozenset[Any]:
    found = _list(values, depth)
    if any(map(is_held_by_identity, found)) or len(made := frozenset(found)) != len(found):
        raise ValueError("a set has an element twice, or a tensor")
    return made


def _dict(values: Any, depth: int) -> dict[Any, Any]:
    pairs = [_list(pair, depth) for pair in _as(list, values)]
    if any(len(pair) != 2 or is_held_by_identity(pair[0]) for pair in pairs):
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
    if _as(str, name) not in FACTORIES:
        raise ValueError(f"a defaultdict of {name!a:.80}")
    return defaultdict(FACTORIES[name], _dict(pairs, depth))


def _deque(values: Any, depth: int) -> deque[Any]:
    maxlen, items = _as(list, values)
    found = _list(items, depth)
    if maxlen is not None and not len(found) <= _as(int, maxlen) < INT64:
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
    if not NUMPY_DTYPE.fullmatch(name):
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
