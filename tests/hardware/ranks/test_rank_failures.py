"""What ranks post for each other: who waits in vain, one text for all of them, and a store that has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tiered_zero.errors import RankError
from tiered_zero.hardware.ranks.rank_failures import CollectiveCall, RankFailures, RankTraffic, RankWaits, find_blocked
from tiered_zero.telemetry.spans import Recorder

GROUPS = ("collectives", "control")


def call(group: str, number: int, kind: str = "") -> CollectiveCall:
    return CollectiveCall(group=group, number=number, kind=kind)


def waits(blocking: CollectiveCall | None = None, **num_calls: int) -> RankWaits:
    return RankWaits(call=blocking, num_calls=num_calls)


@pytest.mark.parametrize(
    ("ranks", "blocked"),
    [
        ([waits(call("control", 2), control=2), waits(call("collectives", 5), control=1, collectives=5)], {0, 1}),
        ([waits(call("control", 2), control=2, collectives=5), waits(call("collectives", 5), collectives=5)], set()),
        ([waits(call("control", 2), control=2), waits(control=1)], set()),
        ([waits(call("control", 2, "broadcast"), control=2), waits(call("control", 2), control=2)], {0, 1}),
        ([waits(call("control", 2), control=2), waits(call("control", 2), control=2)], set()),
        (
            [
                waits(call("control", 2), control=2),
                waits(call("collectives", 5), control=1, collectives=5),
                waits(call("collectives", 5), control=1, collectives=5),
                waits(control=1),
            ],
            {0, 1, 2},
        ),
    ],
    ids=["apart", "one has made it", "one computes", "another kind", "meets", "of four"],
)
def test_ranks_that_wait_for_each_other_are_found(ranks: list[RankWaits], blocked: set[int]) -> None:
    assert find_blocked(ranks) == blocked


@given(programs=st.lists(st.lists(st.sampled_from(GROUPS), max_size=5), min_size=2, max_size=4), data=st.data())
def test_no_rank_that_can_go_on_is_found(programs: list[list[str]], data: st.DataObject) -> None:
    """Ranks that make their calls one after another, and post what they wait for: where all of them stop, those are
    found that have calls left; before, none that goes on. Posts may be older than what a rank waits for."""
    made: list[int] = [0] * len(programs)
    entered = [False] * len(programs)
    posts = [RankWaits(num_calls={}) for _ in programs]

    def numbered(rank: int, place: int) -> CollectiveCall:
        group = programs[rank][place]
        return call(group, programs[rank][: place + 1].count(group))

    def has_entered(rank: int, wanted: CollectiveCall) -> bool:
        return any(numbered(rank, place) == wanted for place in range(made[rank] + entered[rank]))

    def can_move(rank: int) -> bool:
        if made[rank] == len(programs[rank]):
            return False
        wanted = numbered(rank, made[rank])
        return not entered[rank] or all(has_entered(other, wanted) for other in range(len(programs)))

    accused: set[int] = set()
    while movable := [rank for rank in range(len(programs)) if can_move(rank)]:
        rank = data.draw(st.sampled_from(movable))
        assert rank not in accused, "it was said to be blocked, and goes on"
        if entered[rank]:
            entered[rank], made[rank] = False, made[rank] + 1
            if data.draw(st.booleans()):  # else the post is late
                posts[rank] = RankWaits(num_calls=posts[rank].num_calls)
        else:
            entered[rank] = True
            counts = {group: programs[rank][: made[rank] + 1].count(group) for group in GROUPS}
            posts[rank] = RankWaits(call=numbered(rank, made[rank]), num_calls=counts)
        accused |= find_blocked(posts)
    stuck = {rank for rank in range(len(programs)) if entered[rank]}
    if len(stuck) == len(programs):
        assert find_blocked(posts) == stuck


def on_each(world_size: int, act: Callable[[int], None]) -> list[str]:
    """What `act` of each rank raises."""
    texts = [""] * world_size

    def run(rank: int) -> None:
        try:
            act(rank)
        except RankError as error:
            texts[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


def test_every_rank_raises_the_same_text() -> None:
    store = dist.HashStore()
    ranks = [RankFailures(store, rank, 2, 60.0, RankTraffic(), Recorder()) for rank in range(2)]
    barrier = threading.Barrier(2)

    def wait(rank: int) -> None:
        calls: Mapping[int, tuple[str, CollectiveCall]] = {
            0: ("control of save_checkpoint", call("control", 1)),
            1: ("all_gather of unit 3", call("collectives", 1)),
        }
        text, wanted = calls[rank]
        ranks[rank].num_calls[wanted.group] += 1
        ranks[rank].post_wait(text, wanted)
        barrier.wait(300)
        ranks[rank].check_blocked()

    first, second = on_each(2, wait)
    assert first == second
    assert "found rank 0: control of save_checkpoint; rank 1: all_gather of unit 3." in first


def test_a_timeout_has_one_text_on_all_ranks() -> None:
    store = dist.HashStore()
    ranks = [RankFailures(store, rank, 2, 7.0, RankTraffic(), Recorder()) for rank in range(2)]

    def end(rank: int) -> None:
        raise ranks[rank].explain(RuntimeError("Timed out waiting 7000ms"), f"control of step {rank}")

    first, second = on_each(2, end)
    assert first == second
    assert (
        "no answer of another rank within 7 s (tiered_zero.comm_timeout_s). rank 0: control of step 0; rank 1:" in first
    )


def test_a_rank_that_has_closed_is_named_to_those_that_go_on() -> None:
    store = dist.HashStore()
    first, second = (RankFailures(store, rank, 2, 60.0, RankTraffic(), Recorder()) for rank in range(2))
    second.post_closed()
    text = str(first.explain(RuntimeError("Connection closed by peer"), "control of step 3"))
    assert text.startswith("Rank 1 has closed its engine, or ended, while others go on with control of step 3.")
    assert "every rank makes the same number of steps" in text


def test_a_store_that_has_ended_hides_no_lost_connection() -> None:
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    failures = RankFailures(dist.PrefixStore("run", client), 1, 2, 5.0, RankTraffic(), Recorder())
    del server
    failures.post("ValueError: no data")
    lost = RuntimeError("[/build/gloo/pair.cc:537] Connection closed by peer. GLHF!")
    error = failures.explain(lost, "control of step 3")
    failures.post_wait("", None)
    assert str(error).startswith(
        "control of step 3: the connection to another rank was lost, which has posted no error"
    )
    assert "GLHF" not in str(error) and error.__cause__ is lost
