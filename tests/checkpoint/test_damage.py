"""A tag whose bytes were changed, cut or swapped is one clear error: no other exception, and little memory."""

import json
import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.fakes.sync_io import SyncEngine
from tests.support.json_files import with_body
from tests.support.tags import (
    Tensors,
    data_file,
    equal_bits,
    fields,
    load_tag,
    moved_by,
    open_tag,
    save_tag,
    tag_to_load,
    write_share,
)
from tiered_zero.checkpoint.index import MANIFEST_NAME, Part, Share, Source, describe
from tiered_zero.checkpoint.load import Target
from tiered_zero.checkpoint.tag import find_checkpoint, find_damage, list_tags
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.errors import CorruptionError, StoreError
from tiered_zero.sizes import MIB, PAGE_NBYTES
from tiered_zero.system import map_memory

TENSORS = {
    "master/a": torch.arange(2 * MIB // 4 + 100, dtype=torch.float32),
    "exp_avg/a": torch.arange(700, dtype=torch.float32).view(7, 100),
    "buffer/b": torch.tensor([True, False, True]),
}


@pytest.fixture
def tag(tmp_path: Path) -> Path:
    save_tag(tmp_path, "a", TENSORS, 1, SyncEngine())
    return tmp_path / "a"


@pytest.fixture
def data(tag: Path) -> Path:
    return data_file(tag)


def check(tag: Path, expected: Tensors = TENSORS) -> bool:
    """Whether the tag loads, to the bits that were saved; otherwise it is refused with our error."""
    try:
        loaded = load_tag(tag, SyncEngine())
    except StoreError as error:
        assert str(tag) in str(error) and len(str(error)) < 1500
        return False
    assert equal_bits(loaded, expected)
    return True


def flip(path: Path, place: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def test_no_flipped_bit_of_the_data_passes(tag: Path, data: Path) -> None:
    random = Random(0)
    size = data.stat().st_size
    corners = [0, MIB - 1, MIB, 2 * MIB + 399, 2 * MIB + 400, size - 1]
    for place in [*corners, *(random.randrange(size) for _ in range(60))]:
        bit = random.randrange(8)
        flip(data, place, bit)
        with pytest.raises(CorruptionError, match="are not those written"):
            load_tag(tag, SyncEngine())
        flip(data, place, bit)
    assert check(tag)


def test_no_flipped_bit_of_the_manifest_passes(tag: Path) -> None:
    random = Random(1)
    size = (tag / MANIFEST_NAME).stat().st_size
    num_refused = 0
    for _ in range(300):
        place, bit = random.randrange(size), random.randrange(8)
        flip(tag / MANIFEST_NAME, place, bit)
        num_refused += not check(tag)
        flip(tag / MANIFEST_NAME, place, bit)
    assert num_refused > 290, "only what means nothing (the last line's end, spaces) may change"


@pytest.mark.parametrize("name", ["data", "manifest"])
def test_no_cut_file_passes(tag: Path, data: Path, name: str) -> None:
    path = data if name == "data" else tag / MANIFEST_NAME
    whole = path.read_bytes()
    random = Random(2)
    lengths = {0, 1, len(whole) - 2, len(whole) - PAGE_NBYTES, *(random.randrange(len(whole) - 1) for _ in range(40))}
    for length in sorted(length for length in lengths if length >= 0):
        path.write_bytes(whole[:length])
        assert not check(tag)
        with pytest.raises(StoreError):
            find_damage(tag)
        assert not list_tags(tag.parent)[0].complete


def test_exchanged_files_are_noticed(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.full((MIB // 4,), float(index)) for index in range(2)}
    with TagWriter.begin(tmp_path, "a") as first:
        with TagWriter.join(tmp_path, "a", first.save_id, rank=1) as second:
            shares = [write_share(first, {"t0": tensors["t0"]}), write_share(second, {"t1": tensors["t1"]})]
            second.writer.wait_durable()
        first.publish(fields(1), shares)
    assert check(tmp_path / "a", tensors)
    names = sorted(path.name for path in (tmp_path / "a").glob("*.bin"))
    assert len(names) == 2
    os.rename(tmp_path / "a" / names[0], tmp_path / "aside")
    os.rename(tmp_path / "a" / names[1], tmp_path / "a" / names[0])
    os.rename(tmp_path / "aside", tmp_path / "a" / names[1])
    assert not check(tmp_path / "a", tensors)


def test_hostile_manifests_beside_real_files(tag: Path) -> None:
    """Manifests with right checksums of their own, whose tensors and files are not those on the disk."""
    body: dict[str, Any] = json.loads((tag / MANIFEST_NAME).read_bytes().partition(b"\n")[2])
    (store,) = body["stores"]
    ranges = {name: [[*item[:3], item[3] ^ 1] for item in items] for name, items in store["ranges"].items()}
    huge = 1 << 45
    entry = {"dtype": "int8", "shape": [huge], "order": None, "form": "plain", "parts": []}
    first = store["records"][0]
    for changes in (
        {"stores": [{**store, "capacity_nbytes": store["capacity_nbytes"] + PAGE_NBYTES}]},
        {"stores": [{**store, "capacity_nbytes": huge}]},
        {"stores": [{**store, "ranges": ranges}]},
        {"stores": [store, store]},
        {"stores": [{**store, "records": [{**first, "nbytes": huge}, *store["records"][1:]]}]},
        {"stores": [{**store, "ranges": {**store["ranges"], first["name"]: []}}]},
        {"tensors": {**body["tensors"], "x": entry}},
        {"tensors": {"x": {**entry, "parts": [[0, huge, [[0, first["name"], 0]]]]}}},
        {"tensors": {"x": {**entry, "shape": [1], "parts": [[0, 1, [[0, first["name"], huge]]]]}}},
        {"tensors": {"x": {**entry, "shape": [1], "parts": [[0, 1, [[0, "none", 0]]]]}}},
        {"tensors": {"x": {**entry, "shape": [1], "parts": [[0, 1, [[1, first["name"], 0]]]]}}},
        {"stores": []},
    ):
        (tag / MANIFEST_NAME).write_bytes(with_body("tiered_zero.checkpoint", body | changes))
        assert not check(tag)
        with suppress(StoreError):
            assert find_damage(tag) != []
    with pytest.raises(StoreError):
        find_checkpoint(tag.parent)


def test_a_manifest_that_is_large_without_data_is_not_read(tag: Path) -> None:
    """What is decoded takes many times the bytes of its text."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    body = b"[" + b"[]," * (30 * MIB) + b"[]]"
    (tag / MANIFEST_NAME).write_bytes(body)
    del body
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not check(tag)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - max(before_kib, after_kib) < 64 * 1024


def test_nothing_is_copied_from_a_damaged_chunk(tag: Path, data: Path) -> None:
    flip(data, MIB + 5, 0)
    into = torch.full_like(TENSORS["master/a"], -1.0)
    with open_tag(tag) as reader, pytest.raises(CorruptionError):
        reader.fill([Target("master/a", 0, into)])
    assert into[MIB // 4 : 2 * MIB // 4].eq(-1.0).all()


def test_a_tag_may_be_copied_and_renamed(tag: Path) -> None:
    shutil.copytree(tag, tag.parent / "elsewhere" / "best")
    assert check(tag.parent / "elsewhere" / "best")
    assert tag_to_load(tag.parent / "elsewhere").tag == "best"


def test_bytes_that_change_while_they_are_written_are_noticed_when_read(tmp_path: Path) -> None:
    """The checksum and the file may then be of different bytes: a caller that does not keep memory as it is."""
    memory = map_memory(MIB)
    engine = SyncEngine(held=[])
    with moved_by(engine), TagWriter.begin(tmp_path, "a") as writer:
        appended = writer.writer.append("x", memoryview(memory))
        while not appended._parts[1].done():  # type: ignore[attr-defined]
            pass
        memory[5] = 1
        engine.release()
        part = Part(0, MIB, (Source(0, "x", 0),))
        entry = describe(torch.uint8, (MIB,)).with_parts([part])
        stores = [writer.writer.finish()]
        share = Share(tensors={"x": entry}, scalars={}, driver={}, stores=stores)
        writer.publish(fields(1), [share])
    assert len(find_damage(tmp_path / "a")) == 1
