"""Checksums beside training: in the order of the file, at a low priority, and at the usual one once something waits."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import xxhash

from tests.checkpoint.test_async import BESIDE, RUNS, make, train
from tests.support.inspection import differences, everything
from tiered_zero.checkpoint import hashing
from tiered_zero.checkpoint.directory import list_tags
from tiered_zero.checkpoint.hashing import FileHash, Hasher
from tiered_zero.checkpoint.tag_manifest import CHUNK_NBYTES
from tiered_zero.sizes import PAGE_NBYTES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The patient threads get no turn until the event is set; a test in which nothing goes on without them fails."""
    turn, was_needed = threading.Event(), threading.Event()
    monkeypatch.setattr(hashing, "_lower_priority", lambda: turn.wait(20) or was_needed.set())
    yield turn
    turn.set()
    assert not was_needed.is_set()


@contextmanager
def closing_once(hasher: Hasher, turn: threading.Event | None = None) -> Iterator[Hasher]:
    try:
        yield hasher
    finally:
        if turn is not None:
            turn.set()
        hasher.close()


def parts() -> list[bytes]:
    """Of odd sizes, so that most chunks have bytes of several."""
    random = Random(0)
    return [random.randbytes(PAGE_NBYTES * random.randrange(1, 600)) for _ in range(20)]


def expected(contents: list[bytes]) -> list[int]:
    whole = b"".join(contents)
    return [xxhash.xxh3_64_intdigest(whole[at : at + CHUNK_NBYTES]) for at in range(0, len(whole), CHUNK_NBYTES)]


@pytest.mark.parametrize("num_before", [None, 0, 7, 20])
def test_checksums_are_of_the_file_whenever_something_begins_to_wait(num_before: int | None) -> None:
    """`num_before`: what was submitted before `hurry`; None: it is never called."""
    contents, file = parts(), FileHash()
    with closing_once(Hasher(is_patient=True)) as hasher:
        transfers = []
        for number, content in enumerate(contents):
            if number == num_before:
                hasher.hurry()
            transfers.append(hasher.submit(file, memoryview(content)))
        if num_before == len(contents):
            hasher.hurry()
        for transfer in transfers:
            transfer.wait()
        file.end()
    assert file.digests == expected(contents)


def test_what_gets_no_turn_is_done_once_something_waits(starved: threading.Event) -> None:
    contents, file = parts(), FileHash()
    with closing_once(Hasher(is_patient=True), starved) as hasher:
        before = [hasher.submit(file, memoryview(content)) for content in contents[:12]]
        assert not any(transfer.done() for transfer in before)
        hasher.hurry()
        for transfer in before:
            transfer.wait()
        for content in contents[12:]:
            hasher.submit(file, memoryview(content)).wait()
        assert not starved.is_set()
        file.end()
    assert file.digests == expected(contents)


def test_closing_waits_for_no_turn_of_what_is_left(starved: threading.Event) -> None:
    contents, file = parts(), FileHash()
    hasher = Hasher(is_patient=True)
    transfers = [hasher.submit(file, memoryview(content)) for content in contents]
    timer = threading.Timer(0.2, starved.set)  # the thread itself ends with its turn
    timer.start()
    hasher.close()
    timer.join()
    assert all(transfer.done() for transfer in transfers)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_only_the_patient_thread_has_a_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, int] = {}
    add = FileHash.add

    def look_and_add(self: FileHash, memory: memoryview) -> None:
        found[threading.current_thread().name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        add(self, memory)

    monkeypatch.setattr(FileHash, "add", look_and_add)
    usual, content = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), memoryview(bytes(PAGE_NBYTES))
    with closing_once(Hasher(is_patient=True)) as hasher:
        hasher.submit(FileHash(), content).wait()
        hasher.hurry()
        hasher.submit(FileHash(), content).wait()
    assert found == {"tiered-zero-checkpoint-hash-beside": 19, "tiered-zero-checkpoint-hash": usual}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == usual


@pytest.mark.parametrize("run", RUNS[:3], ids=lambda run: "-".join(map(str, run.values())))
def test_an_update_that_waits_for_its_bytes_needs_no_turn_of_the_patient_thread(
    run: dict[str, object], starved: threading.Event, swap_path: Path, tmp_path: Path
) -> None:
    """Where other programs leave nothing of the processors, training and save go on all the same."""
    with make(swap_path, run) as engine:
        train(engine, 0, 3)
        expected = everything(engine)
    with make(swap_path, run, **BESIDE) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        train(engine, 2, 3)  # whose update changes what is saved
        engine.peek("norm.weight", "master")  # waits for that update
        assert not starved.is_set()
        starved.set()
        assert differences(expected, everything(engine)) == []
    assert [info.complete for info in list_tags(tmp_path)] == [True]
