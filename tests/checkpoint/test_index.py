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

from tests.support.inspection.insides import Contents, Range, Record, decode_file, encode_file
from tests.support.json_files import with_body
from tests.support.tags import written_by
from tiered_zero.checkpoint.index import FORMAT, Part, RecordName, Source, TagManifest, TensorEntry, check_places
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
DATA = encode_file(FORMAT, WHOLE)


def body() -> dict[str, Any]:
    return json.loads(DATA.partition(b"\n")[2])  # type: ignore[no-any-return]


def decode(changed: Any) -> TagManifest:
    return decode_file(with_body(FORMAT, changed), PATH, FORMAT, TagManifest)


@pytest.mark.parametrize("state", [WHOLE, POINTER], ids=["full", "in place"])
def test_round_trip(state: TagManifest) -> None:
    data = encode_file(FORMAT, decoded)
    assert encode_file(FORMAT, decode_file(data, PATH, FORMAT, TagManifest)) == data, "nan is equal to nothing"
    return False


BODIES = [body(), body(), json.loads(encode_file(FORMAT, POINTER).partition(b"\n")[2])]


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
        decode_file(text, PATH, FORMAT, TagManifest)
    with pytest.raises(StoreError):
        decode_file(text + b"\n" + text, PATH, FORMAT, TagManifest)
    header = DATA.partition(b"\n")[0]
    with pytest.raises(StoreError):
        decode_file(header + b"\n" + text, PATH, FORMAT, TagManifest)
