"""What ranks have written of one tag, joined to one manifest, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tiered_zero.checkpoint.file_writer import WrittenFiles, join_files
from tiered_zero.checkpoint.places import Place, PlacedPart, Places, RecordName, Source, join_places
from tiered_zero.checkpoint.shares import CommitShare, RankPart, Share, join_scalars
from tiered_zero.checkpoint.tag_manifest import DataFile, Part, TensorEntry
from tiered_zero.errors import InternalError, StoreError


def written(rank: int, parts: list[tuple[int, int]], **changes: Any) -> WrittenFiles:
    """One file of a rank, with these elements of a tensor of 8, one page behind the other."""
    entry = TensorEntry(
        dtype="float32",
        shape=(2, 4),
        parts=tuple(Part(start, stop, 0, 4096 * place) for place, (start, stop) in enumerate(parts)),
    )
    file = DataFile(name=f"data-{rank:05d}-00000.bin", nbytes=4096 * len(parts), digests=(rank,))
    return WrittenFiles(files=(file,), tensors={"master/a": replace(entry, **changes)})


def test_parts_of_ranks_are_joined_in_order() -> None:
    files, tensors = join_files([written(0, [(6, 8), (0, 3)]), written(1, [(3, 6)])])
    assert [file.name for file in files] == ["data-00000-00000.bin", "data-00001-00000.bin"]
    assert tensors["master/a"].parts == (Part(0, 3, 0, 4096), Part(3, 6, 1, 0), Part(6, 8, 0, 0))


@pytest.mark.parametrize(
    ("parts", "changes", "text"),
    [
        ([(3, 8)], {}, "elements 3 to 4 are missing or doubled"),
        ([(5, 8)], {}, "elements 4 to 5 are missing or doubled"),
        ([(4, 7)], {}, "7 of its 8 elements"),
        ([(0, 4), (4, 8)], {}, "elements 0 to 4 are missing or doubled"),
        ([(4, 8)], {"shape": (4, 2)}, "two different tensors"),
        ([(4, 8)], {"dtype": "int32"}, "two different tensors"),
    ],
)
def test_parts_that_do_not_cover_a_tensor_once_are_refused(
    parts: list[tuple[int, int]], changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(StoreError, match=text):
        join_files([written(0, [(0, 4)]), written(1, parts, **changes)])


def test_shares_travel_as_json() -> None:
    share = Share(written=written(1, [(0, 8)]), scalars={"a": {"step": 3}}, driver={"loader": None})
    assert Share.decode(json.loads(json.dumps(share.encode()))) == share


def test_different_steps_of_one_parameter_are_refused() -> None:
    first, second = (
        Share(written=written(rank, [(0, 8)]), scalars={"a": {"step": 3 + rank}, f"of {rank}": {}}, driver={})
        for rank in range(2)
    )
    assert join_scalars([first, first]).keys() == {"a", "of 0"}
    with pytest.raises(InternalError, match="rank 1 has"):
        join_scalars([first, second])


def places(store: int, *parts: tuple[int, int], form: str = "plain") -> Places:
    """Elements of one key, in record 0 of a rank's store number `store`, each at its first element's byte."""
    placed = tuple(PlacedPart(start, stop, (Source(0, 4 * start),)) for start, stop in parts)
    return Places(records=[RecordName(store, "state/0")], places={"master/a": Place(form=form, parts=placed)})


def test_places_of_ranks_are_joined_in_order() -> None:
    joined = join_places([(places(0, (0, 3), (6, 8)), 2), (places(1, (3, 6)), 2)])
    assert joined.records == [RecordName(0, "state/0"), RecordName(3, "state/0")]
    assert [(part.start, part.stop, part.sources[0].record) for part in joined.places["master/a"].parts] == [
        (0, 3, 0),
        (3, 6, 1),
        (6, 8, 0),
    ]


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (places(0, (5, 8)), "elements 4 to 5 are missing or doubled"),
        (places(0, (3, 8)), "elements 4 to 3 are missing or doubled"),
        (places(0, (4, 8), form="magnitude"), "rests as plain on one rank, and as magnitude on another"),
    ],
)
def test_places_that_do_not_cover_a_key_once_are_refused(second: Places, text: str) -> None:
    with pytest.raises(StoreError, match=text):
        join_places([(places(0, (0, 4)), 1), (second, 1)])


def test_shares_of_commits_travel_as_json() -> None:
    share = CommitShare(
        tensors={"master/a": TensorEntry(dtype="float32", shape=(2, 4), order=(1, 0))},
        places=places(0, (2, 4), (6, 8)),
        scalars={"a": {"step": 3}},
        driver={"loader": None},
        commit_id="c",
        rank=RankPart(stores=[{"run_id": "x", "paths": ["/swap/x"]}], layout="0", initialized=[0, 2]),
    )
    assert CommitShare.decode(json.loads(json.dumps(share.encode()))) == share
