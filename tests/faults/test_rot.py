"""Bytes that changed at rest or on the way, files cut short, directories removed: found before anything is used."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.fakes.io_faults import flip_in_file
from tests.support.faulty_runs import (
    POLICIES,
    build,
    check_aftermath,
    check_closed,
    data_files,
    differing,
    extent,
    faulty_disks,
    reference,
    train,
    weights_after,
)
from tests.support.inspection import policy as policy_of
from tests.support.pairwise import by_turns
from tiered_zero.errors import CorruptionError, TieredZeroError

pytestmark = [pytest.mark.usefixtures("no_leaks")]

every_policy = pytest.mark.parametrize("policy", POLICIES)
NO_LIBC = ctypes.CDLL(None, use_errno=True)
KEEP_SIZE, PUNCH_HOLE = 1, 2


def punch(path: Path, offset: int, nbytes: int) -> None:
    """Give a part of a file back to the disk, as another program with the right to could."""
    fd = os.open(path, os.O_RDWR)
    try:
        failed = NO_LIBC.fallocate(fd, KEEP_SIZE | PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(nbytes))
        if failed:
            raise OSError(ctypes.get_errno(), "fallocate")
    finally:
        os.close(fd)


def is_corruption(error: TieredZeroError) -> bool:
    """Itself, or the cause of a latch."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CorruptionError):
        cause = cause.__cause__
    return cause is not None


@pytest.mark.parametrize(("what", "policy"), by_turns(["param", "frozen", "state"], list(POLICIES), 2))
def test_a_bit_flipped_at_rest(what: str, policy: str, swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = build(swap_path, policy)
    assert train(engine, 2) is None
    engine.flush()
    policy_of(engine).finish(before_write=True)  # what is read already is not at rest
    place = extent(engine, what)
    flip_in_file(place.path, place.offsets[100])
    failure = train(engine, 5, first=2)
    assert failure is not None and failure.step <= 3 and is_corruption(failure.error), failure
    assert str(place.offsets.start) in str(failure.error)
    check_aftermath(policy, engine, failure, swap_path)
    check_closed(engine, swap_path, caplog)


@pytest.mark.parametrize(
    ("what", "kind", "effect", "policy"),
    [
        (*change, policy)
        for change, policy in by_turns(
            [("param", "read", "flip"), ("state", "read", "flip"), ("param", "write", "torn")], list(POLICIES), 2
        )
    ],
)
def test_bytes_changed_on_the_way(
    what: str,
    kind: str,
    effect: str,
    policy: str,
    swap_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with faulty_disks() as disks:
        engine = build(swap_path, policy)

        def arm(step: int, call: str) -> None:
            if (step, call) == (2, "backward"):
                disks[0].add(extent(engine, what).fault(kind, 1, effect, at=9))

        failure = train(engine, 6, before=arm)
        assert failure is not None and is_corruption(failure.error), failure
        check_aftermath(policy, engine, failure, swap_path)
        check_closed(engine, swap_path, caplog)


def test_a_transient_flip_costs_one_try(swap_path: Path) -> None:
    """A parameter is only read in forward, so the step may be tried again, and ends with the right bits."""
    with faulty_disks() as disks, build(swap_path, "barrier") as engine:
        assert train(engine, 2) is None
        disks[0].add(extent(engine, "param").fault("read", 1, "flip", at=9))
        for _ in range(2):
            disks[0].add(extent(engine, "param").fault("read", 1, "flip", at=9))
            failure = train(engine, 3, first=2)
            assert failure is not None and isinstance(failure.error, CorruptionError)
        assert train(engine, 4, first=2) is None, "what a failed step held is still held"
        assert not differing(reference("barrier", 4), dict(engine.module.state_dict()))


@every_policy
def test_a_truncated_file(policy: str, swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = build(swap_path, policy)
    assert train(engine, 2) is None
    engine.flush()
    cut = extent(engine, "param").offsets.start
    os.truncate(data_files(swap_path)[0], cut)
    failure = train(engine, 5, first=2)
    assert failure is not None and failure.step == 2
    assert "met the end of the file" in str(failure.error) and "cut it short" in str(failure.error)
    check_aftermath(policy, engine, failure, swap_path)
    check_closed(engine, swap_path, caplog)


@every_policy
def test_a_punched_file(policy: str, swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = build(swap_path, policy)
    assert train(engine, 2) is None
    engine.flush()
    policy_of(engine).finish(before_write=True)
    offsets = extent(engine, "state").offsets
    try:
        punch(data_files(swap_path)[0], offsets.start, len(offsets))
    except OSError as error:
        engine.close()
        assert error.errno == errno.EOPNOTSUPP
        pytest.skip("this file system punches no holes")
    failure = train(engine, 5, first=2)
    assert failure is not None and is_corruption(failure.error), failure
    check_aftermath(policy, engine, failure, swap_path)
    check_closed(engine, swap_path, caplog)


@every_policy
def test_the_directory_is_removed_in_mid_run(policy: str, swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = build(swap_path, policy)
    assert train(engine, 2) is None
    shutil.rmtree(data_files(swap_path)[0].parent)
    assert train(engine, 5, first=2) is None
    weights = weights_after(engine)
    assert isinstance(weights, dict) and not differing(reference(policy, 5), weights)
    check_closed(engine, swap_path, caplog)


@pytest.mark.parametrize("policy", ["barrier", "overlapped"])
def test_a_state_dict_that_fails_leaves_nothing_half_done(policy: str, swap_path: Path) -> None:
    """The one after it waits for updates again, and is not made of what the failed one had copied."""
    with build(swap_path, policy) as engine:
        assert train(engine, 2) is None
        engine.flush()
        place = extent(engine, "param")
        flip_in_file(place.path, place.offsets[100])
        with pytest.raises(CorruptionError):
            engine.module.state_dict()
        flip_in_file(place.path, place.offsets[100])
        assert not differing(reference(policy, 2), dict(engine.module.state_dict()))
        assert train(engine, 3, first=2) is None
        assert not differing(reference(policy, 3), dict(engine.module.state_dict()))
