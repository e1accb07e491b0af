"""Every collective between processes, and what the others hear of a rank that fails, ends, or is stopped."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.memory.child import resident_nbytes
from tests.ranks.pool import RankPool, open_collectives
from tiered_zero.concurrency.transfer import wait_all
from tiered_zero.errors import RankError, TransferError
from tiered_zero.hardware.device.accelerator import Lane
from tiered_zero.hardware.ranks import process_groups
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.hardware.ranks.process_groups import make_collectives

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def collect(dtype: torch.dtype, numel: int) -> dict[str, Any]:
    """Each collective once, with numbers that every rank can predict."""
    group = open_collectives(30.0)
    rank, world = group.rank, group.world_size
    flat = torch.full((world * numel,), -1.0, dtype=dtype)
    shard = flat[rank * numel : (rank + 1) * numel]
    shard.fill_(rank + 1)
    in_place = group.all_gather(flat, shard)
    apart = torch.zeros(world * numel, dtype=dtype)
    other = group.all_gather(apart, torch.full((numel,), rank + 1.0, dtype=dtype))
    bucket = torch.arange(world, dtype=dtype).repeat_interleave(numel) * (rank + 1)
    reduced = group.reduce_scatter(bucket, torch.empty(max(world - 1, numel), dtype=dtype))  # beside the gathers
    wait_all([in_place, other, reduced])
    values = torch.full((3, 2), float(rank), dtype=dtype)
    group.broadcast(values)
    last = torch.full((5,), rank, dtype=torch.uint8)
    group.broadcast(last, source=world - 1)
    texts = [group.exchange(bytes([rank]) * (size + rank)) for size in (0, 1, 246, 247, 248, 70_000)]
    group.close()
    group.close()
    return {
        "gathered": flat.tolist(),
        "apart": apart.tolist(),
        "reduced": bucket[rank * numel : (rank + 1) * numel].tolist(),
        "values": values.flatten().tolist(),
        "last": last.tolist(),
        "texts": [[len(text) for text in found] for found in texts],
        "bytes": [all(text == bytes([r]) * len(text) for r, text in enumerate(found)) for found in texts],
    }


def warn() -> list[str]:
    """Log a warning and an error before two runs, in both, in the second, and after them; return what is heard."""
    logger, heard = logging.getLogger("tiered_zero"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)

    def say(when: str) -> None:
        logger.warning("warning %s", when)
        logger.error("error %s", when)

    try:
        say("before")
        first, second = open_collectives(30.0), open_collectives(30.0)
        say("in both")
        first.close()
        say("in the second")
        second.close()
        say("after")
    finally:
        logger.removeHandler(handler)
    return heard


def test_warnings_come_from_rank_0_alone_while_a_run_is_open(ranks: RankPool) -> None:
    first, second = ranks.run(warn, 2)
    times = ["before", "in both", "in the second", "after"]
    assert first == [f"{what} {when}" for when in times for what in ("warning", "error")]
    assert second == [line for line in first if line not in ("warning in both", "warning in the second")]


@pytest.mark.parametrize(("world", "numel"), [(1, 2048), (2, 2048), (4, 1)])
def test_every_collective_gives_what_it_says(ranks: RankPool, world: int, numel: int) -> None:
    for dtype in DTYPES:
        for rank, found in enumerate(ranks.run(collect, world, dtype, numel)):
            each = [float(r + 1) for r in range(world) for _ in range(numel)]
            assert found["gathered"] == found["apart"] == each
            assert found["reduced"] == [rank * world * (world + 1) / 2] * numel
            assert found["values"] == [0.0] * 6
            assert found["last"] == [world - 1] * 5
            assert found["texts"] == [[size + r for r in range(world)] for size in (0, 1, 246, 247, 248, 70_000)]
            assert all(found["bytes"])


def exchange_apart(calls: list[str]) -> str:
    """Each rank makes its own call, after one in which a program sends the words of the end of a run."""
    group = open_collectives(30.0)
    assert group.exchange(b"closed", "words") == [b"closed"] * group.world_size
    try:
        group.exchange(b"12", calls[group.rank])
    except RankError as error:
        return str(error)
    finally:
        group.fail("done")
        group.close()
    return ""


def test_no_call_receives_the_bytes_of_another(ranks: RankPool) -> None:
    calls = ["a message of the program", "step 3"]
    text = "Every rank was expected to make the same call; found rank 0: a message of the program, rank 1: step 3."
    assert ranks.run(exchange_apart, 2, calls) == [text, text]


def collect_uneven(dtype: torch.dtype) -> dict[str, Any]:
    """Parts of any sizes, one of them empty."""
    group = open_collectives(30.0)
    rank, world = group.rank, group.world_size
    bounds = [0, *(sum(r * r for r in range(stop + 1)) for stop in range(world))]
    flat = torch.full((bounds[-1],), -1.0, dtype=dtype)
    shard = flat[bounds[rank] : bounds[rank + 1]]
    shard.fill_(rank + 1)
    gathered = group.all_gather(flat, shard, bounds=bounds)
    bucket = torch.arange(bounds[-1], dtype=dtype) * (rank + 1)
    wait_all([gathered, group.reduce_scatter(bucket, torch.empty(4, dtype=dtype), bounds=bounds)])
    group.close()
    own = bucket[bounds[rank] : bounds[rank + 1]]
    return {"bounds": bounds, "gathered": flat.tolist(), "reduced": own.tolist()}


@pytest.mark.parametrize("world", [2, 4])
def test_parts_of_any_sizes(ranks: RankPool, world: int) -> None:
    for dtype in DTYPES:
        for rank, found in enumerate(ranks.run(collect_uneven, world, dtype)):
            bounds = found["bounds"]
            assert found["gathered"] == [r + 1.0 for r in range(world) for _ in range(bounds[r], bounds[r + 1])]
            factor = world * (world + 1) / 2
            assert found["reduced"] == [factor * place for place in range(bounds[rank], bounds[rank + 1])]


def reduce_in_order(dtype: torch.dtype, room_numel: int) -> list[bool]:
    """Parts of 100 elements and of 1003: whether each rank has the sum that a loop over ranks has, for several cuts."""
    group = open_collectives(30.0)
    own, world = group.rank, group.world_size
    numel = 1003 * (world - 1) + 100
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(world)]
    expected = values[0]
    for other in values[1:]:
        expected = expected + other
    found = []
    for cut in range(world):
        bounds = [max(0, 1003 * rank - 903 * (rank > cut)) for rank in range(world + 1)]
        bucket = values[own].clone()
        group.reduce_scatter(bucket, torch.empty(room_numel, dtype=dtype), bounds=bounds).wait()
        part = slice(bounds[own], bounds[own + 1])
        found.append(torch.equal(bucket[part], expected[part]))
    group.close()
    return found


@pytest.mark.parametrize(("world", "room_numel"), [(2, 1), (3, 500), (4, 3009)])
def test_sums_are_in_rank_order_wherever_a_part_is_cut(ranks: RankPool, world: int, room_numel: int) -> None:
    for dtype in DTYPES:
        for found in ranks.run(reduce_in_order, world, dtype, room_numel):
            assert found == [True] * world


def gather_measured(numel: int) -> dict[str, Any]:
    """Gather `numel` elements of 16 bits. Returns the sums, and the memory that it took next to flat and shard."""
    group = open_collectives(30.0)
    flat = torch.full((numel,), -1.0, dtype=torch.bfloat16)
    shard = flat.view(group.world_size, -1)[group.rank].fill_(group.rank + 1)
    group.exchange(b"both are here")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_nbytes(peak=True)
    group.all_gather(flat, shard).wait()
    beside = resident_nbytes(peak=True) - before
    group.close()
    return {"beside": beside, "sums": flat.view(group.world_size, -1).float().mean(1).tolist()}


def test_a_gather_takes_no_memory(ranks: RankPool) -> None:
    """64 MiB, of which gloo's own all_gather would hold a copy."""
    for found in ranks.run(gather_measured, 2, 1 << 25):
        assert found["sums"] == [1.0, 2.0]
        assert found["beside"] < 4 << 20


def fail_in_mid_run(which: int, act: str) -> tuple[str, float]:
    """All but one rank wait in a collective when that one fails: what they raise, and how long it took."""
    group = open_collectives(120.0)
    group.exchange(b"all here")
    begin = time.monotonic()
    try:
        if group.rank == which:
            time.sleep(0.3)
            if act == "exit":
                os._exit(7)
            raise ValueError("the disk of this rank is full")
        if act == "gather":
            group.all_gather(torch.zeros(group.world_size), torch.zeros(1), "unit 5").wait()
        else:
            group.exchange(b"step 3")
    except Exception as error:
        group.fail(str(error))
        with pytest.raises(RankError, match=r"closed|failed|lost"):
            group.exchange(b"after the end")
        group.close()
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("world", "which", "act"), [(2, 0, "exchange"), (2, 1, "gather"), (4, 2, "gather")])
def test_a_failing_rank_ends_the_others_with_its_message(ranks: RankPool, world: int, which: int, act: str) -> None:
    found = ranks.run(fail_in_mid_run, world, which, act)
    for rank, (text, _) in enumerate(found):
        if rank == which:
            assert text == "ValueError: the disk of this rank is full"
        else:
            assert text.startswith(f"RankError: Rank {which} failed, which ends the run on all {world} ranks")
            assert "the disk of this rank is full" in text


def gather_behind_a_failure(order: bool) -> tuple[str, list[float]]:
    """What comes before the first of two gathers fails on rank 1, which makes the second as well."""
    group = open_collectives(120.0)
    before = Lane("fetch", lambda work: work.job())

    def read() -> None:
        if group.rank == 1:
            raise TransferError("the disk of this rank is broken")

    units = [torch.full((4,), -1.0) for _ in range(2)]
    gathers = []
    for number, flat in enumerate(units):
        after = [before.submit(read)] if number == 0 else []
        shard = torch.full((2,), float(number))
        gathers.append(group.all_gather(flat, shard, after=after, order=f"unit {number}" if order else None))
    try:
        wait_all(gathers[::-1] if group.rank == 1 else gathers)
    except Exception as error:
        group.fail(str(error))
        group.close()
        before.close()
        return str(error), units[0].tolist()
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("order", [False, True])
def test_a_gather_that_fails_on_one_rank_never_meets_the_next(ranks: RankPool, order: bool) -> None:
    (first, unit), (second, _) = ranks.run(gather_behind_a_failure, 2, order)
    assert "the disk of this rank is broken" in second, "the second gather is not made where the first has failed"
    assert first.startswith("Rank 1 failed") and "the disk of this rank is broken" in first, first
    assert 1.0 not in unit, "bytes of the second"


def test_a_rank_that_ends_without_a_word_is_a_lost_connection(ranks: RankPool) -> None:
    first, second = ranks.outcomes(fail_in_mid_run, 2, 1, "exit")
    assert second.error == "ProcessEnded" and "7" in second.text
    assert first.error == "" and "connection to another rank was lost" in first.value[0]


def stop_one() -> str:
    """Rank 1 is stopped by a signal, and goes on when rank 0 has given up on it."""
    group = open_collectives(6.0)
    (_, data) = group.exchange(str(os.getpid()).encode())
    if group.rank == 0:
        time.sleep(1.0)  # rank 1 posts that it waits
    group.exchange(b"step 3", "step 3")
    try:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        group.exchange(b"step 4", "step 4")
    except RankError as error:
        return str(error)
    finally:
        if group.rank == 0:
            os.kill(int(data), signal.SIGCONT)
        group.fail("done")
        group.close()
    return ""


def test_a_stopped_rank_is_found_by_the_timeout(ranks: RankPool) -> None:
    first, second = ranks.run(stop_one, 2)
    assert "no answer of another rank within 6 s (tiered_zero.comm_timeout_s)" in first
    assert "rank 0: control of step 4" in first
    assert "rank 1: no call that waits" in first, "its wait for the slow rank 0 has ended"
    assert second, "the stopped one finds the run ended when it goes on"


def run_twice() -> list[int]:
    """Two runs of one process, one after another, each with its own keys in the store."""
    counts = []
    for _ in range(2):
        group = open_collectives(60.0)
        counts.append(len(group.exchange(b"x")))
        if group.rank == 0:
            group.fail("the end of this run")
        group.close()
    return counts


def test_the_failure_of_one_run_is_not_the_next_ones(ranks: RankPool) -> None:
    assert ranks.run(run_twice, 2) == [[2, 2], [2, 2]]


def interrupt_as_it_opens() -> tuple[list[int], int]:
    """How many groups this process has before, after an opening that an interrupt ends, and after its close; and how
    many ranks answer in the next."""
    next_run, found = process_groups._next_run, []
    ranks = make_collectives(60.0)

    def interrupted(group: Any) -> int:
        raise KeyboardInterrupt

    for act in (None, ranks.open, ranks.close):
        process_groups._next_run = interrupted
        with suppress(KeyboardInterrupt):
            act() if act else None
        process_groups._next_run = next_run
        found.append(len(torch.distributed.distributed_c10d._world.pg_map))
    group = open_collectives(60.0)
    answers = len(group.exchange(b"x"))
    group.close()
    return found, answers


def test_an_opening_that_is_interrupted_leaves_no_group(ranks: RankPool) -> None:
    assert ranks.run(interrupt_as_it_opens, 2) == [([1, 3, 1], 2)] * 2


def test_one_rank_changes_no_bit() -> None:
    group: Collectives = Collectives()
    values = torch.randn(100)
    flat = values.clone()
    group.all_gather(flat, flat).wait()
    group.reduce_scatter(flat, flat).wait()
    group.broadcast(flat)
    group.fail("not heard by any rank")
    assert torch.equal(flat, values)
    assert group.exchange(b"own") == [b"own"]
