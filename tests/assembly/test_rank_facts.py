"""What ranks bring is compared by hashes, and the first difference is named with both values."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tiered_zero.assembly.spec import compare_facts
from tiered_zero.errors import RankError


def heard(*ranks: dict[str, Any]) -> list[str]:
    """What each rank raises; "" where it goes on."""
    barrier, texts = threading.Barrier(len(ranks)), [""] * len(ranks)
    messages = [b""] * len(ranks)

    def run(rank: int) -> None:
        def exchange(data: bytes, what: str) -> list[bytes]:
            messages[rank] = data
            barrier.wait(300)
            found = list(messages)
            barrier.wait(300)
            return found

        try:
            compare_facts(ranks[rank], exchange)
        except RankError as error:
            texts[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


def test_equal_facts_pass_in_any_order() -> None:
    assert heard({"a": {"x": 1, "y": [2]}, "b": None}, {"b": None, "a": {"y": [2], "x": 1}}) == ["", ""]


@pytest.mark.parametrize(
    ("third", "text"),
    [
        ({"lr": 2}, "the same lr; found 1 on rank 0, 2 on rank 2."),
        ({"p": {"b": {"shape": [2], "place": 1}, "a": {"place": 0}}}, "same p; found shape of b [1] on rank 0, [2] on"),
        ({"p": {"a": {"place": 1}, "new": {}}}, "the same p; found b {"),
        ({"more": True}, "the same more; found nothing on rank 0, true on rank 2."),
    ],
)
def test_the_first_difference_is_named_on_every_rank(third: dict[str, Any], text: str) -> None:
    own = {"lr": 1, "p": {"a": {"place": 0}, "b": {"shape": [1], "place": 1}}}
    first, *others = heard(own, own, own | third)
    assert text in first and others == [first, first]
