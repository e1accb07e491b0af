"""Plain torch.distributed.checkpoint over our files: loaded is what was saved, to the bit, however it is cut."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tests.support.tags import equal_bits, fields, load_tag, plain_load, plain_save, save_tag
from tiered_zero.checkpoint import data_files
from tiered_zero.checkpoint.boxes import Box, boxes
from tiered_zero.checkpoint.storage import FileReader, FileWriter, Piece
from tiered_zero.checkpoint.tag_manifest import ITEMSIZES
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.checkpoint.tensors import describe
from tiered_zero.errors import InternalError, StoreError
from tiered_zero.io.select import ENGINES, select_engine
from tiered_zero.mappings import map_memory
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up

SHAPES = [(3, 4), (), (1,), (0, 5), (700, 900), (2, 3, 4, 5), (1_200_000,)]


def every_tensor() -> dict[str, torch.Tensor]:
    tensors = {f"shape{index}": torch.randn(shape) for index, shape in enumerate(SHAPES)}
    for name in sorted(ITEMSIZES):
        if isinstance(dtype := getattr(torch, name, None), torch.dtype):
            raw = torch.randint(0, 2 if name == "bool" else 256, (33 * 7 * ITEMSIZES[name],), dtype=torch.uint8)
            tensors[f"dtype/{name}"] = raw.view(dtype).view(33, 7)
    tensors["transposed"] = torch.randn(500, 400).t()
    tensors["channels last"] = torch.randn(4, 5, 6, 7).to(memory_format=torch.channels_last)
    tensors["strided"] = torch.randn(300, 20)[::3, 1::2]
    tensors["parameter"] = torch.nn.Parameter(torch.randn(5, 5))
    return tensors


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_plain_save_and_load(swap_path: Path, where: str, no_leaks: None) -> None:
    if where == "memory":
        swap_path = Path("/dev/shm") if Path("/dev/shm").is_dir() else swap_path
        swap_path = swap_path / f"tiered-zero-test-{Random().randrange(10**12)}"
    tensors = every_tensor()
    try:
        manifest = save_tag(swap_path, "a", tensors, step=1)
        assert equal_bits(load_tag(swap_path / "a"), {key: tensor.detach() for key, tensor in tensors.items()})
        assert manifest.tensors["transposed"].parts[0][:2] == (0, 200_000)
    finally:
        for path in sorted(swap_path.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        swap_path.rmdir() if where == "memory" else None


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_writes_what_every_other_reads(swap_path: Path, name: str) -> None:
    tensors = {"x": torch.randn(900_000), "y": torch.randn(77)}
    engine = select_engine(swap_path, prefer=name).engine
    save_tag(swap_path, "a", tensors, 1, engine)
    assert equal_bits(load_tag(swap_path / "a"), tensors)
    save_tag(swap_path, "b", tensors, 1)
    assert equal_bits(load_tag(swap_path / "b", engine), tensors)
    engine.close()


def shard_item(key: str, tensor: torch.Tensor, box: Box) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=tensor.dtype), size=tensor.shape)
    return WriteItem(index=MetadataIndex(key, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)


def window(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]


class CutPlanner(DefaultSavePlanner):
    """Cuts each tensor into flat ranges, as sub-groups do, and each range into boxes."""

    def __init__(self, cuts: dict[str, Sequence[int]]) -> None:
        super().__init__()
        self.cuts = cuts

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, tensor in self.state_dict.items():
            borders = [0, *self.cuts[key], tensor.numel()]
            for start, stop in pairwise(borders):
                items += [shard_item(key, tensor, box) for box in boxes(tensor.shape, start, stop)]
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return window(self.state_dict[write_item.index.fqn], Box(tuple(chunk.offsets), tuple(chunk.sizes)))


def test_parts_cut_like_sub_groups_load_in_plain_torch(swap_path: Path) -> None:
    tensors = {"a": torch.randn(50, 7, 11), "b": torch.randn(300, 1000), "c": torch.randn(5)}
    cuts = {"a": [1, 76, 78, 700, 3000], "b": [999, 1000, 123_456], "c": []}
    with TagWriter.begin(swap_path, "t") as writer:
        plain_save(tensors, writer.writer, CutPlanner(cuts))
        manifest = writer.publish(fields(1))
    assert equal_bits(load_tag(swap_path / "t"), tensors)
    assert len(manifest.tensors["b"].parts) == 1, "neighbours in tensor and file are one part"


def test_extents_are_written_without_a_copy_and_know_the_order_of_dimensions(swap_path: Path) -> None:
    """Two sub-groups of flat ranges in page-aligned memory."""
    tensors = {
        "last": torch.randn(8, 6, 5, 5).to(memory_format=torch.channels_last),
        "plain": torch.randn(100, 30),
    }
    orders = {"last": (0, 2, 3, 1), "plain": None}
    with TagWriter.begin(swap_path, "t") as writer:
        for key, tensor in tensors.items():
            writer.writer.declare(key, describe(tensor.dtype, tensor.shape, orders[key]))
        writer.writer.write("small", torch.arange(5))
        for low, high in ((0.0, 0.37), (0.37, 1.0)):
            pieces, chunks, at = [], [], 0
            for key, tensor in tensors.items():
                flat = tensor.permute(orders[key] or (0, 1)).reshape(-1)
                start, stop = int(low * flat.numel()), int(high * flat.numel())
                pieces.append(Piece(key, start, stop, at))
                chunks.append(flat[start:stop].view(torch.uint8))
                at += chunks[-1].numel()
            memory = map_memory(align_up(at, PAGE_NBYTES))
            memory[:at] = torch.cat(chunks).numpy().tobytes()
            writer.writer.append(memoryview(memory), pieces).transfer.wait()
        manifest = writer.publish(fields(1))
    assert manifest.tensors["last"].order == (0, 2, 3, 1)
    assert [part.start for part in manifest.tensors["plain"].parts] == [0, 1110]
    assert equal_bits(load_tag(swap_path / "t"), {**tensors, "small": torch.arange(5)})
    into = {"last": torch.zeros(8, 6, 5, 5).to(memory_format=torch.channels_last)}
    with FileReader(swap_path / "t") as reader:
        plain_load(into, reader)
    assert into["last"].equal(tensors["last"]) and into["last"].is_contiguous(memory_format=torch.channels_last)


@st.composite
def cut_and_box(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], Box, int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    numel = math.prod(shape)
    cuts = sorted(draw(st.sets(st.integers(1, max(numel - 1, 1)), max_size=5)) - {numel})
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True))
    return shape, cuts, Box(offsets, sizes), draw(st.integers(0, 10**6))


@settings(max_examples=60)
@given(cut_and_box())
def test_any_box_of_any_cut_is_read(tmp_path_factory: pytest.TempPathFactory, case: object) -> None:
    shape, cuts, box, seed = case  # type: ignore[misc]
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
    directory = tmp_path_factory.mktemp("tags")
    with TagWriter.begin(directory, "t") as writer:
        plain_save({"x": tensor}, writer.writer, CutPlanner({"x": cuts}))
        writer.publish(fields(1))
    with FileReader(directory / "t") as reader:
        stored = reader.read_metadata().state_dict_metadata["x"]
        assert math.prod(stored.size) == sum(math.prod(chunk.sizes) for chunk in stored.chunks)
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        items = create_read_items_for_chunk_list("x", stored, [chunk])
        Random(seed).shuffle(items)
        if seed % 2:  # hints are no more than that
            items = [replace(item, storage_index=MetadataIndex("x", item.storage_index.offset)) for item in items]
        planner = BoxPlanner(torch.zeros(box.sizes, dtype=torch.float64))
        reader.read_data(LoadPlan(items), planner)
    assert planner.tensor.equal(window(tensor, box))
    assert sorted(planner.committed) == sorted(tuple(item.dest_offsets) for item in items)


class BoxPlanner(DefaultLoadPlanner):
    """Loads one box of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.committed: list[tuple[int, ...]] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return window(self.tensor, Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(tuple(read_item.dest_offsets))


class GroupsPlanner(DefaultLoadPlanner):
    """Has the tensors of one key at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.current: set[str] = set()
        self.left: set[MetadataIndex] = set()
        self.order: list[str] = []

    def groups(self, plan: LoadPlan) -> Iterable[Sequence[ReadItem]]:
        for key in sorted({item.dest_index.fqn for item in plan.items}, reverse=True):
            items = [item for item in plan.items if item.dest_index.fqn == key]
            self.current, self.left = {key}, {item.storage_index for item in items}
            yield items
            yield []
            assert not self.left, "each item is committed before what follows a group without items is asked for"

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.dest_index.fqn in self.current
        self.order.append(read_item.dest_index.fqn)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.left.remove(read_item.storage_index)


def test_items_are_read_group_by_group(swap_path: Path) -> None:
    tensors = {key: torch.randn(40, 50) for key in "abc"}
    with TagWriter.begin(swap_path, "t") as writer:
        plain_save(tensors, writer.writer, CutPlanner({key: [3, 1234] for key in tensors}))
        writer.publish(fields(1))
    into = {key: torch.zeros(40, 50) for key in tensors}
    planner = GroupsPlanner()
    with FileReader(swap_path / "t") as reader:
        plain_load(into, reader, planner)
    assert equal_bits(into, tensors)
    assert sorted(planner.order, reverse=True) == planner.order


def test_files_are_cut_where_they_would_become_too_large(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "_MOST_FILE_NBYTES", 3 * MIB)
    tensors = {"x": torch.randn(3_000_000), "y": torch.randn(9)}
    manifest = save_tag(swap_path, "t", tensors, step=1)
    assert [file.nbytes <= 3 * MIB for file in manifest.files] == [True] * 6
    assert [path.stat().st_size for path in sorted((swap_path / "t").glob("*.bin"))] == [
        file.nbytes for file in manifest.files
    ]
    assert equal_bits(load_tag(swap_path / "t"), tensors)


def test_values_that_are_no_tensors_are_refused_not_pickled(swap_path: Path) -> None:
    with TagWriter.begin(swap_path, "t") as writer:
        with pytest.raises(StoreError, match=r"epoch\.nested is no tensor: .* client_state"):
            plain_save({"epoch": {"nested": 3}}, writer.writer)
        with pytest.raises(StoreError, match=r"cannot hold a tensor of torch\.bits8"):
            writer.writer.declare("q", describe(torch.bits8, (3,)))
        for tensor in (torch.eye(3).to_sparse(), torch.zeros(3, 3, device="meta")):
            with pytest.raises(StoreError, match=r"expected .* in memory; found"):
                plain_save({"x": tensor}, writer.writer)
    assert not (swap_path / "t").exists()


def test_elements_that_are_missing_or_written_twice_are_refused(swap_path: Path) -> None:
    memory = memoryview(map_memory(PAGE_NBYTES))
    for pieces, message in (
        ([Piece("x", 0, 10, 0)], "10 of its 12 elements"),
        ([Piece("x", 0, 10, 0), Piece("x", 9, 12, 400)], "elements 9 to 10 are missing or doubled"),
        ([Piece("x", 3, 12, 0)], "elements 0 to 3 are missing"),
    ):
        with TagWriter.begin(swap_path, "t") as writer:
            writer.writer.declare("x", describe(torch.float32, (12,)))
            writer.writer.append(memory, pieces)
            with pytest.raises(StoreError, match=message):
                writer.publish(fields(1))
        assert not (swap_path / "t").exists()


def test_memory_that_is_no_whole_page_is_refused(swap_path: Path) -> None:
    memory = memoryview(map_memory(2 * PAGE_NBYTES))
    with TagWriter.begin(swap_path, "t") as writer:
        for wrong in (memory[:5000], memory[8 : 8 + PAGE_NBYTES], memory[:0]):
            with pytest.raises(InternalError, match="whole pages"):
                writer.writer.append(wrong)


def test_the_writer_keeps_within_its_buffers(swap_path: Path) -> None:
    """48 MiB through 24 MiB of staging: the memory is reused, and bytes on their way stay as they are."""
    tensors = {f"t{index}": torch.full((1_000_003,), float(index)) for index in range(12)}
    writer = FileWriter(swap_path)
    for key, tensor in tensors.items():
        writer.write(key, tensor)
        assert len(writer._free or ()) + len(writer._in_flight) == data_files.NUM_BUFFERS
    written = writer.finish_files()
    writer.wait_durable()
    assert sum(file.nbytes for file in written.files) < sum(tensor.nbytes for tensor in tensors.values()) + MIB
    assert written.tensors.keys() == tensors.keys()
