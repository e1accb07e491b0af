"""Values go to JSON and back with their types and their bits; whatever else is in the JSON is refused by one error."""

import argparse
import base64
import enum
import functools
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_zero.checkpoint.driver import MAX_DEPTH, from_json, to_json
from tiered_zero.checkpoint.index import ITEMSIZES, torch_dtype
from tiered_zero.errors import ModelError

TORCH_DTYPES = [torch_dtype(name) for name in sorted(ITEMSIZES)]


def through_text(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value, "value"))))


def same(left: Any, right: Any) -> bool:
    """Type, order and bits; an array without dimensions comes back as a scalar."""
    if isinstance(left, numpy.ndarray) and not left.ndim:
        left = left[()]
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return left.numel() == 0 or raw(left) == raw(right)
    if isinstance(left, numpy.ndarray | numpy.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, dict):
        return same([*left], [*right]) and same([*left.values()], [*right.values()])
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


texts = st.text(st.characters(exclude_categories=["Cs"]))
plain = (
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary()
    | st.integers(min_value=2**62, max_value=2**200)
)  # fmt: skip
scalars = plain | st.sampled_from([numpy.float32(0.1), numpy.int64(-3), numpy.float64(-0.0), numpy.bool_(True)])
keys = plain | st.tuples(plain, plain) | st.tuples(st.tuples(plain))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    nbytes = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=nbytes, max_size=nbytes)))
    if not data:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> numpy.ndarray[Any, Any]:
    names = ["|b1", "|u1", "<i2", ">i8", "<u4", "<f2", ">f4", "<f8", "<c8", "<c16"]
    dtype = numpy.dtype(draw(st.sampled_from(names)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    nbytes = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    return numpy.frombuffer(data, dtype).reshape(shape) if data else numpy.empty(shape, dtype)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(texts | st.just("$tensor"), inner, max_size=3)
    )


values = st.recursive(scalars | tensors() | arrays(), containers, max_leaves=12)


@settings(max_examples=300, deadline=None)
@given(values)
def test_a_value_comes_back_with_its_type_and_bits(value: Any) -> None:
    assert same(value, through_text(value))


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_of_a_tensor(dtype: torch.dtype) -> None:
    nbytes = 6 * dtype.itemsize
    data = torch.arange(nbytes).to(torch.uint8) % (2 if dtype is torch.bool else 255)
    tensor = data.view(dtype).reshape(2, 3)
    found = through_text(tensor)
    assert same(tensor, found) and found.is_contiguous()
    assert same(tensor.t(), through_text(tensor.t()))
    assert same(tensor[0, 0], through_text(tensor[0, 0])) and through_text(tensor[0, 0]).dim() == 0
    assert same(tensor[:, :0], through_text(tensor[:, :0]))


def test_a_copy_shares_nothing_with_the_value() -> None:
    tensor, items = torch.zeros(3), [1]
    saved = to_json({"tensor": tensor, "items": items}, "value")
    tensor += 1
    items.append(2)
    found = from_json(saved)
    assert same(found, {"tensor": torch.zeros(3), "items": [1]})
    found["tensor"] += 1  # memory of its own
    assert same(from_json(saved)["tensor"], torch.zeros(3))


def test_a_tensor_is_saved_without_its_graph() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert same(through_text(leaf * 2), torch.full((2,), 2.0))
    assert same(through_text(torch.tensor([1 + 2j]).conj()), torch.tensor([1 - 2j]))


class Colour(enum.Enum):
    RED = 1


class Ordered(dict[Any, Any]):
    pass


Point = namedtuple("Point", "x y")


def contains_itself() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("value", "path", "what"),
    [
        ({"model": [0, 1, 2, print]}, "['model'][3]", "builtin_function_or_method"),
        ([lambda: 0], "[0]", "function"),
        ({1: {"a": functools.partial(print)}}, "[1]['a']", "functools.partial"),
        (Colour.RED, "", "Colour"),
        ((torch.nn.Parameter(torch.ones(1)),), "[0]", "torch.nn.parameter.Parameter"),
        ({"m": torch.nn.Linear(1, 1)}, "['m']", "torch.nn.modules.linear.Linear"),
        (Ordered(), "", "Ordered cannot be saved"),
        (Point(1, 2), "", "Point cannot be saved"),
        ({"s": "a\ud800"}, "['s']", "surrogate"),
        ({"\udfff": 1}, "", "surrogate"),
        ({torch.ones(1): 1}, "", "as a key"),
        ({(1, (frozenset(),)): 1}, "", "as a key"),
        ({numpy.int64(1): 1}, "", "as a key"),
        ({"args": argparse.Namespace(f=[open])}, "['args']", "argparse.Namespace"),
        ([Path("a")], "[0]", "pathlib"),
        (OrderedDict(), "", "collections.OrderedDict cannot be saved"),
        (Counter("a"), "", "not their subclasses: convert it"),
        (defaultdict(list), "", "collections.defaultdict"),
        (deque(), "", "collections.deque"),
        ({"a": {1, 2}}, "['a']", "type set"),
        (torch.float32, "", "torch.dtype"),
        (torch.Size([1]), "", "torch.Size"),
        (torch.device("cpu"), "", "torch.device"),
        (1j, "", "type complex"),
        (numpy.array([object()]), "", "a numpy array of dtype object"),
        (numpy.zeros(2, [("a", "i4")]), "", "a numpy array of dtype"),
        (numpy.longdouble(1), "", "longdouble"),
        (torch.ones(2, device="meta"), "", "meta"),
        (torch.eye(2).to_sparse(), "", "sparse"),
        (object, "", "type type"),
        (contains_itself(), "[0][0]", "contain itself"),
        (functools.reduce(lambda inner, _: (inner,), range(MAX_DEPTH + 1), 0), "[0]", "nested deeper"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_another_type_is_refused_by_its_path(value: Any, path: str, what: str) -> None:
    with pytest.raises(ModelError) as found:
        to_json(value, "client_state")
    message = str(found.value)
    assert message.startswith(f"client_state{path}"), message
    assert what in message.replace("float128", "longdouble"), message
    assert len(message) < 1500


def test_the_deepest_value_comes_back() -> None:
    value: Any = float("inf")
    for _ in range(MAX_DEPTH):
        value = {1: value}
    assert same(value, through_text(value))


def numbers(dtype: object, shape: object, nbytes: int) -> list[object]:
    return [dtype, shape, base64.b64encode(bytes(nbytes)).decode()]


HOSTILE = [
    {"$unknown": 1},
    {"$tuple": [], "x": 1},
    {"$tuple": [], "$list": []},
    {"$tuple": 3},
    {"$dict": [[1, 2], [1, 3]]},
    {"$dict": [[1, 2], [True, 3]]},
    {"$dict": [[[], 2]]},
    {"$dict": [[1]]},
    {"$dict": 4},
    {"$dict": [[{"$array": numbers("<f8", [], 8)}, 1]]},
    {"$set": [1]},
    {"$bytes": "*"},
    {"$bytes": "AA="},
    {"$bytes": [1]},
    {"$bytes": "\u00e4"},
    {"$array": 1},
    {"$array": ""},
    {"$array": [1]},
    {"$array": numbers("|O8", [1], 8)},
    {"$array": numbers("<f8", [3], 8)},
    {"$array": numbers("<f8", [1 << 60], 8)},
    {"$array": numbers("<f8", [1 << 70], 8)},
    {"$array": numbers("<f8", None, 8)},
    {"$array": numbers("<f9", [1], 9)},
    {"$array": numbers(["<f8"], [1], 8)},
    {"$array": numbers("<M8[s]", [1], 8)},
    {"$tensor": []},
    {"$tensor": ["float32"]},
    {"$tensor": numbers("float32", [1], 2)},
    {"$tensor": numbers("float32", [4], 4)},
    {"$tensor": numbers("float32", None, 4)},
    {"$tensor": numbers("nothing", [4], 4)},
    {"$tensor": numbers("load", [4], 4)},
    {"$tensor": numbers(["float32"], [1], 4)},
]


@pytest.mark.parametrize("saved", HOSTILE, ids=lambda saved: json.dumps(saved)[:60])
def test_what_encode_never_gives_is_a_value_error(saved: Any) -> None:
    with pytest.raises(ValueError, match=r".") as found:
        from_json(json.loads(json.dumps(saved)))
    assert type(found.value).__module__ in ("builtins", "binascii")
    assert len(str(found.value)) < 500


jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("AAAA"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [next(iter(saved)) for saved in HOSTILE if len(saved) == 1] + ["dtype", "shape", "data", "a"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=15,
)


@settings(max_examples=500, deadline=None)
@given(jsons)
def test_no_json_raises_another_error(saved: Any) -> None:
    try:
        value = from_json(saved)
    except ValueError:
        return
    again = from_json(to_json(value, "value"))
    assert same(value, again)


@pytest.mark.parametrize("value", [float("nan"), math.inf, -math.inf, -0.0, 5e-324, 0.1, 1e308], ids=str)
def test_floats_are_exact(value: float) -> None:
    assert same(value, through_text(value))


def test_torchs_and_pythons_own_states_come_back() -> None:
    import random

    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    for state in (
        random.getstate(),
        numpy.random.get_state(legacy=False),
        numpy.random.get_state(),
        numpy.random.default_rng(1).bit_generator.state,
        torch.get_rng_state(),
        plateau.state_dict(),
    ):
        assert same(state, through_text(state))
