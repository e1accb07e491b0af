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

from tests.support.inspection.insides import Contents, Range, Record, RecordFiles, RecordReader
from tests.support.json_files import with_body
from tests.support.tags import written_by
from tiered_zero.checkpoint.index import Part, Source, TagManifest, TensorEntry, check_places
from tiered_zero.errors import StoreError
from tiered_zero.sizes import MIB

PATH = Path("ck/tag/manifest.json")


def record(name: str, nbytes: int, offset: int = 0) -> Record:
    return Record(name=name, nbytes=nbytes, committed=True, offsets=(offset,))


WHOLE = TagManifest(
    tag="global_step7",
    save_id="0123456789ab",
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
    tensors={
        "master/layer.0.weight": TensorEntry(
            dtype="float32",
            shape=(100, 30),
            parts=(Part(0, 1000, (Source(0, "state/0", 4096),)), Part(1000, 3000, (Source(0, "state/0", 65536),))),
        ),
        "master/half": TensorEntry(
            dtype="float32",
            shape=(7,),
            form="joined",
            parts=(Part(0, 7, (Source(1, "state/0", 0), Source(1, "state/0", 1024), Source(1, "state/0", 2048))),),
        ),
        "exp_avg/conv": TensorEntry(
            dtype="bfloat16", shape=(2, 3, 4, 5), order=(0, 2, 3, 1), parts=(Part(0, 120, (Source(1, "state/0", 64),)),)
        ),
        "buffer/ä": TensorEntry(dtype="int64", shape=(), parts=(Part(0, 1, (Source(0, "buffers", 1024),)),)),
        "buffer/empty": TensorEntry(dtype="bool", shape=(0, 7)),
    },
    scalars={"layer.0.weight": {"step": 7}},
    driver={"global_step": 7, "rng": {"python": [3, [1, 2, 3], None]}},
)
POINTER = TagManifest(
    tag="global_step8",
    save_id="fedcba987654",
    step=8,
    written_by=written_by(),
    swap={
        "run_id": "20260101-000000-1-abcd",
        "paths": ["/nvme/tiered_zero-20260101-000000-1-abcd"],
    },
)
DATA = WHOLE.encode()


def body() -> dict[str, Any]:
    return json.loads(DATA.partition(b"\n")[2])  # type: ignore[no-any-return]


def decode(changed: Any) -> TagManifest:
    return TagManifest.decode(with_body(TagManifest.format_name, changed), PATH)


@pytest.mark.parametrize("state", [WHOLE, POINTER], ids=["full", "in place"])
def test_round_trip(state: TagManifest) -> None:
    assert TagManifest.decode(state.encode(), PATH) == state
    assert WHOLE.files == {"data-00000-0123456789ab.bin": MIB + 8192, "data-00001-0123456789ab.bin": 4096}
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
    with pytest.raises(StoreError, match=r"version 5, found tiered_zero\.checkpoint version 2"):
        TagManifest.decode(DATA.replace(b'"version": 5', b'"version": 2', 1), PATH)
    with pytest.raises(StoreError, match=r"expected tiered_zero\.checkpoint version 5, found tiered_zero\.store"):
        TagManifest.decode(DATA.replace(b"tiered_zero.checkpoint", b"tiered_zero.store", 1), PATH)


LAYER, CONV = "master/layer.0.weight", "exp_avg/conv"
WRONG: dict[str, tuple[list[Any], Any, str]] = {
    "no id of a save": (["save_id"], "../0123456789ab", "save_id: String should match pattern"),
    "swap directories and data files": (["swap"], {"run_id": "r", "paths": ["/x"]}, "none of an in-place commit"),
    "negative step": (["step"], -1, "step: "),
    "step of another type": (["step"], True, "step: Input should be a valid integer"),
    "huge step": (["step"], 2**70, "step: "),
    "time that is not finite": (["written_by", "created_s"], float("nan"), "created_s: Input should be a finite"),
    "unknown field": (["written_by", "host"], "x", "written_by.host: Extra inputs are not permitted"),
    "half of a surrogate pair": (["tag"], "\ud800", "Invalid JSON: .*hex escape"),
    "store of two files": (["stores", 0, "weights"], [1.0, 1.0], "stores: expected one file of each"),
    "record past the file's end": (["stores", 1, "capacity_nbytes"], 100, "'state/0' lies outside of its store"),
    "record without all of its checksums": (
        ["stores", 0, "ranges", "state/0"],
        [[0, MIB, 0, 5]],
        "stores: expected checksums of all bytes",
    ),
    "record without a store": (["tensors", LAYER, "parts", 0, 2, 0], ["state/0", 0], "parts.0.2.0"),
    "no such form": (["tensors", LAYER, "form"], "halved", "form: Input should be 'plain'"),
    "codes that are joined": (["tensors", "master/half", "dtype"], "int8", "found a joined one of dtype 'int8'"),
    "joined from one source": (["tensors", LAYER, "form"], "joined", "elements 0 to 1000 with 1 sources"),
    "no such dtype": (["tensors", LAYER, "dtype"], "object", "of dtype 'object'"),
    "code for a dtype": (["tensors", LAYER, "dtype"], "load", "of dtype 'load'"),
    "negative size": (["tensors", LAYER, "shape"], [-1, 3], "shape.0: "),
    "huge shape": (["tensors", LAYER, "shape"], [2**40, 2**40], "more than"),
    "huge empty shape": (["tensors", LAYER, "shape"], [0, 2**40, 2**40], "more than"),
    "many dimensions": (["tensors", LAYER, "shape"], [1] * 65, "shape: "),
    "order that is none": (["tensors", CONV, "order"], [0, 1, 1, 3], "not each dimension once"),
    "order of other dimensions": (["tensors", CONV, "order"], [0, 1], "not each dimension once"),
    "no parts": (["tensors", LAYER, "parts"], [], "found 0 elements, of 3000"),
    "gap": (["tensors", LAYER, "parts", 1, 0], 1001, "elements 1001 to 3000 with 1 sources behind element 1000"),
    "overlap": (["tensors", LAYER, "parts", 1, 0], 999, "elements 999 to 3000 with 1 sources behind"),
    "end before the last element": (["tensors", LAYER, "parts", 1, 1], 2999, "found 2999 elements, of 3000"),
    "end after the last element": (["tensors", LAYER, "parts", 1, 1], 3001, "found 3001 elements, of 3000"),
    "negative store": (["tensors", LAYER, "parts", 0, 2, 0, 0], -1, "parts.0.2.0"),
    "part of three": (["tensors", LAYER, "parts", 0], [0, 1000, 0], "parts.0"),
    "scalars that are a list": (["scalars"], [], "scalars: "),
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
    "source",
    [
        Source(0, "state/0", 65537),
        Source(0, "state/0", MIB),
        Source(1, "state/0", 2**62),
        Source(0, "state/1", 0),
        Source(2**62, "state/0", 0),
    ],
)
def test_parts_outside_of_their_records_are_refused(source: Source) -> None:
    files = [RecordFiles(paths=[PATH], contents=contents) for contents in WHOLE.stores]
    extents = RecordReader(files).extents
    check_places(WHOLE.tensors, extents)
    layer = WHOLE.tensors[LAYER]
    moved = layer.parts[1]._replace(sources=(source,))
    with pytest.raises(ValueError, match="lies outside of its records"):
        check_places({LAYER: layer.with_parts([layer.parts[0], moved])}, extents)


@pytest.mark.parametrize(
    "swap",
    [{}, {"run_id": "r", "paths": []}, {"run_id": "r", "paths": ["nvme/x"]}, {"run_id": 3, "paths": ["/x"]}]
    + [{"run_id": "r", "paths": [path]} for path in ("/a/../etc", "/a\0", 3, "/a/", "")],
)
def test_a_pointer_must_name_plain_absolute_paths(swap: Any) -> None:
    with pytest.raises(StoreError):
        decode(POINTER.model_dump(mode="json") | {"swap": swap})


def test_what_could_not_be_read_back_is_not_encoded() -> None:
    with pytest.raises(StoreError):
        TagManifest(**{**vars(WHOLE), "driver": {"x": object()}}).encode()
    for changes in ({"step": -1}, {"kind": "half"}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            TagManifest(**{**vars(WHOLE), **changes})


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
    data = decoded.encode()
    assert TagManifest.decode(data, PATH).encode() == data, "nan is equal to nothing"
    return False


BODIES = [body(), body(), json.loads(POINTER.encode().partition(b"\n")[2])]


def test_two_thousand_mutated_manifests() -> None:
    random = Random(0)
    num_refused = sum(check_mutated(random) for _ in range(2000))
    assert num_refused > 1200, "the mutations reach what is checked"


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
