"""A tag's manifest comes back as it was; whatever else stands in its file is one clear error, in little memory."""

import copy
import json
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.inspection.insides import Contents, Range, Record, encode_checked
from tests.support.tags import written_by
from tiered_zero.checkpoint import tag_manifest
from tiered_zero.checkpoint.tag_manifest import Part, RecordName, Source, TagManifest, TensorEntry
from tiered_zero.errors import StoreError
from tiered_zero.sizes import MIB

PATH = Path("ck/tag/manifest.json")


def record(name: str, nbytes: int, offset: int = 0) -> Record:
    return Record(name=name, nbytes=nbytes, committed=True, offsets=(offset,))


WHOLE = TagManifest(
    kind="full",
    tag="global_step7",
    step=7,
    written_by=written_by(created_s=1.5),
    stores=(
        Contents(
            capacity_nbytes=MIB + 8192,
            weights=(1.0,),
            records=(record("state/0", MIB + 4096), record("buffers", 4096, MIB + 4096)),
            ranges={
                "state/0": [Range(0, MIB, 0, 2**64 - 1), Range(MIB, MIB + 4096, 0, 5)],
                "buffers": [Range(0, 4096, 0, 0)],
            },
        ),
        Contents(
            capacity_nbytes=4096,
            weights=(1.0,),
            records=(record("state/0", 4096),),
            ranges={"state/0": [Range(0, 4096, 0, 9)]},
        ),
    ),
    records=(RecordName(0, "state/0"), RecordName(1, "state/0"), RecordName(0, "buffers")),
    tensors={
        "master/layer.0.weight": TensorEntry(
            dtype="float32",
            shape=(100, 30),
            parts=(Part(0, 1000, (Source(0, 4096),)), Part(1000, 3000, (Source(0, 65536),))),
        ),
        "master/half": TensorEntry(
            dtype="float32",
            shape=(7,),
            form="joined",
            parts=(Part(0, 7, (Source(1, 0), Source(1, 1024), Source(1, 2048))),),
        ),
        "exp_avg/conv": TensorEntry(
            dtype="bfloat16", shape=(2, 3, 4, 5), order=(0, 2, 3, 1), parts=(Part(0, 120, (Source(1, 64),)),)
        ),
        "buffer/ä": TensorEntry(dtype="int64", shape=(), parts=(Part(0, 1, (Source(2, 1024),)),)),
        "buffer/empty": TensorEntry(dtype="bool", shape=(0, 7)),
    },
    scalars={"layer.0.weight": {"step": 7}},
    driver={"global_step": 7, "rng": {"python": [3, [1, 2, 3], None]}},
)
POINTER = TagManifest(
    kind="in_place",
    tag="global_step8",
    step=8,
    written_by=written_by(),
    swap={
        "run_id": "20260101-000000-1-abcd",
        "paths": ["/nvme/tiered_zero-20260101-000000-1-abcd"],
        "commit_id": "c",
    },
)
DATA = WHOLE.encode()


def body() -> dict[str, Any]:
    return json.loads(DATA.partition(b"\n")[2])  # type: ignore[no-any-return]


def decode(changed: Any) -> TagManifest:
    return TagManifest.decode(encode_checked(tag_manifest.FORMAT, tag_manifest.VERSION, changed), PATH)


@pytest.mark.parametrize("state", [WHOLE, POINTER], ids=["full", "in place"])
def test_round_trip(state: TagManifest) -> None:
    assert TagManifest.decode(state.encode(), PATH) == state
    assert TagManifest.from_body(json.loads(json.dumps(state.body()))) == state
    assert WHOLE.files == {"data-00000.bin": MIB + 8192, "data-00001.bin": 4096} and WHOLE.data_nbytes == MIB + 12288
    assert WHOLE.tensors["exp_avg/conv"].memory_shape == (2, 4, 5, 3)


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_no_changed_byte_passes(place: int, difference: int) -> None:
    data = bytearray(DATA)
    data[place] ^= difference
    try:
        decoded = TagManifest.decode(bytes(data), PATH)
    except StoreError:
        return
    assert decoded == WHOLE, "only what means nothing (the last line's end, spaces) may change"


@given(st.integers(0, len(DATA) - 2))
def test_no_cut_manifest_passes(length: int) -> None:
    with pytest.raises(StoreError):
        TagManifest.decode(DATA[:length], PATH)


def test_another_format_or_version_is_refused_by_name() -> None:
    with pytest.raises(StoreError, match=r"version 2, found tiered_zero\.checkpoint version 3"):
        TagManifest.decode(DATA.replace(b'"version": 2', b'"version": 3', 1), PATH)
    with pytest.raises(StoreError, match=r"expected tiered_zero\.checkpoint version 2, found tiered_zero\.store"):
        TagManifest.decode(DATA.replace(b"tiered_zero.checkpoint", b"tiered_zero.store", 1), PATH)


LAYER, CONV = "master/layer.0.weight", "exp_avg/conv"
WRONG: dict[str, tuple[list[Any], Any, str]] = {
    "kind": (["kind"], "half", "kind: expected one of full, in_place"),
    "swap without its kind": (
        ["swap"],
        {"run_id": "r", "paths": ["/x"], "commit_id": "c"},
        "swap: expected with kind in_place",
    ),
    "negative step": (["step"], -1, "step: expected 0 or more"),
    "step of another type": (["step"], True, "step: expected int; found bool"),
    "huge step": (["step"], 2**70, "step: expected a 64-bit integer"),
    "time that is not finite": (["written_by", "created_s"], float("nan"), "created_s: expected a finite number"),
    "unknown field": (["written_by", "host"], "x", "missing or unknown: ..host.."),
    "half of a surrogate pair": (["tag"], "\ud800", "surrogates not allowed"),
    "store of two files": (["stores", 0, "weights"], [1.0, 1.0], "stores: expected one file of each"),
    "record past the file's end": (["stores", 1, "capacity_nbytes"], 100, "'state/0' lies outside of its store"),
    "record of no bytes": (["stores", 1, "records", 0, "nbytes"], 0, "'state/0': expected bytes"),
    "huge record": (["stores", 1, "records", 0, "nbytes"], 2**62, "'state/0' lies outside of its store"),
    "two records of a name": (["stores", 0, "records", 1, "name"], "state/0", "expected records of different names"),
    "range past its record's end": (["stores", 1, "ranges", "state/0", 0, 1], 8192, "out of order or outside of it"),
    "checksum of 65 bits": (["stores", 1, "ranges", "state/0", 0, 3], 2**64, "checksum: expected whole numbers"),
    "checksum of another type": (["stores", 1, "ranges", "state/0", 0, 3], "0", "checksum: expected whole numbers"),
    "record without a store": (["records", 0], ["state/0"], "the number of a store and a name"),
    "no such form": (["tensors", LAYER, "form"], "halved", "form: expected one of plain"),
    "codes that are joined": (["tensors", "master/half", "dtype"], "int8", "only float32 is joined"),
    "joined from one source": (["tensors", LAYER, "form"], "joined", "expected start, stop and 3 sources of each"),
    "no such dtype": (["tensors", LAYER, "dtype"], "object", "dtype: expected one of"),
    "code for a dtype": (["tensors", LAYER, "dtype"], "load", "dtype: expected one of"),
    "negative size": (["tensors", LAYER, "shape"], [-1, 3], "shape: expected whole numbers from 0"),
    "huge shape": (["tensors", LAYER, "shape"], [2**40, 2**40], "shape: expected at most"),
    "huge empty shape": (["tensors", LAYER, "shape"], [0, 2**40, 2**40], "shape: expected at most"),
    "many dimensions": (["tensors", LAYER, "shape"], [1] * 65, "at most 64 dimensions"),
    "order that is none": (["tensors", CONV, "order"], [0, 1, 1, 3], "order: expected each dimension once"),
    "order of other dimensions": (["tensors", CONV, "order"], [0, 1], "order: expected each dimension once"),
    "no parts": (["tensors", LAYER, "parts"], [], "expected 3000 elements; found 0"),
    "gap": (["tensors", LAYER, "parts", 1, 0], 1001, "out of order, overlap or leave a gap"),
    "overlap": (["tensors", LAYER, "parts", 1, 0], 999, "out of order, overlap or leave a gap"),
    "end before the last element": (["tensors", LAYER, "parts", 1, 1], 2999, "expected 3000 elements; found 2999"),
    "end after the last element": (["tensors", LAYER, "parts", 1, 1], 3001, "expected 3000 elements; found 3001"),
    "no such record": (["tensors", LAYER, "parts", 0, 2], 3, "there is no record 3"),
    "negative record": (["tensors", LAYER, "parts", 0, 2], -1, "expected whole numbers from 0"),
    "offset within an element": (["tensors", LAYER, "parts", 1, 3], 65537, "multiples of their size"),
    "part of three": (["tensors", LAYER, "parts", 0], [0, 1000, 0], "start, stop and 1 sources"),
    "scalars that are a list": (["scalars"], [], "scalars: expected dict; found list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_checkpoint_has_is_refused(name: str) -> None:
    path, value, message = WRONG[name]
    changed = body()
    place: Any = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(StoreError, match=message):
        decode(changed)


@pytest.mark.parametrize(
    "swap",
    [None, {}, {"run_id": "r", "paths": []}, {"run_id": "r", "paths": ["nvme/x"]}, {"run_id": 3, "paths": ["/x"]}]
    + [{"run_id": "r", "paths": [path]} for path in ("/a/../etc", "/a\0", 3, "/a/", "")],
)
def test_a_pointer_must_name_plain_absolute_paths(swap: Any) -> None:
    with pytest.raises(StoreError):
        decode(json.loads(json.dumps(POINTER.body())) | {"swap": swap})


def test_what_could_not_be_read_back_is_not_encoded() -> None:
    for changes in ({"driver": {"x": object()}}, {"step": -1}, {"kind": "half"}, {"driver": {"x": b""}}):
        with pytest.raises(StoreError):
            TagManifest(**{**vars(WHOLE), **changes}).encode()


PRIMITIVES = [None, True, False, 0, 1, -1, 2**31, 2**62, 2**63, 2**64, 10**400, 0.5, 1e308, float("inf"), float("nan")]
PRIMITIVES += ["", "x", "\ud800", "a\0", "../x", "manifest.json", "float32", "full", "in_place", [], {}, [[]], {"": 0}]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def mutate(value: Any, random: Random) -> Any:
    """One place of a JSON value changed: replaced, removed, doubled, moved, or made a little larger or smaller."""
    path = random.choice(places(value)[1:])
    parent = value
    for step in path[:-1]:
        parent = parent[step]
    key, act = path[-1], random.randrange(7)
    if act == 0:
        del parent[key]
    elif act == 1 and isinstance(parent, list):
        parent.insert(random.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
    elif act == 2 and isinstance(parent, dict):
        parent[random.choice(["", "x", key + "x", "step", "master/other"])] = parent.pop(key)
    elif act == 3 and type(parent[key]) is int:
        parent[key] += random.choice([-4096, -8, -1, 1, 8, 4096, MIB, 2**32])
    elif act == 4 and isinstance(parent[key], list):
        random.shuffle(parent[key])
    elif act == 5:
        other = value
        for step in random.choice(places(value)):
            other = other[step]
        parent[key] = copy.deepcopy(other)
    else:
        parent[key] = copy.deepcopy(random.choice(PRIMITIVES))
    return value


def check_mutated(random: Random) -> bool:
    """Whether a mutated manifest is refused, with our error; one that is not comes back as it is."""
    changed = copy.deepcopy(random.choice(BODIES))
    for _ in range(random.choice([1, 1, 2, 5])):
        if len(places(changed)) > 1:
            changed = mutate(changed, random)
    try:
        decoded = decode(changed)
    except StoreError as error:
        assert len(str(error)) < 1000 and str(error).isprintable(), error
        return True
    assert TagManifest.decode(decoded.encode(), PATH) == decoded
    return False


BODIES = [body(), body(), json.loads(POINTER.encode().partition(b"\n")[2])]


@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_mutated_manifests(seed: int) -> None:
    random = Random(seed)
    num_refused = sum(check_mutated(random) for _ in range(1000))
    assert num_refused > 600, "the mutations reach what is checked"


def test_a_mutated_manifest_takes_little_memory() -> None:
    random = Random(10)
    tracemalloc.start()
    try:
        for _ in range(200):
            tracemalloc.reset_peak()
            before_nbytes = tracemalloc.get_traced_memory()[0]
            check_mutated(random)
            assert tracemalloc.get_traced_memory()[1] - before_nbytes < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text", [b"[" * 10**6, b"{" * 10**6, b'{"a":' * 10**5, b"9" * 10**6, b"\xff\xfe", b"\n\n", b""]
)
def test_json_bombs(text: bytes) -> None:
    with pytest.raises(StoreError):
        TagManifest.decode(text, PATH)
    with pytest.raises(StoreError):
        TagManifest.decode(text + b"\n" + text, PATH)
    header = DATA.partition(b"\n")[0]
    with pytest.raises(StoreError):
        TagManifest.decode(header + b"\n" + text, PATH)
