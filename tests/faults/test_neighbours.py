"""Several engines in one process, on one path; and a process whose table of file descriptors is full."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.faulty_runs import (
    POLICIES,
    build,
    check_aftermath,
    differing,
    extent,
    faulty_disks,
    reference,
    train,
    weights_after,
)
from tests.support.inspection.insides import list_runs
from tiered_zero.errors import ConfigError, StoreError, TransferError

pytestmark = [pytest.mark.usefixtures("no_leaks")]

every_policy = pytest.mark.parametrize("policy", POLICIES)


@every_policy
def test_two_models_in_one_process_on_one_path(policy: str, swap_path: Path) -> None:
    """They train in turns; the first is closed while the second goes on."""
    first, second = build(swap_path, policy), build(swap_path, policy)
    assert [run.state for run in list_runs(swap_path)] == ["alive", "alive"]
    for step in range(3):
        for engine in (first, second):
            assert train(engine, step + 1, first=step) is None
    weights = weights_after(first)
    assert isinstance(weights, dict) and not differing(reference(policy, 3), weights)
    first.close()
    assert len(list_runs(swap_path)) == 1
    assert train(second, 5, first=3) is None
    weights = weights_after(second)
    assert isinstance(weights, dict) and not differing(reference(policy, 5), weights)
    second.close()
    assert list(swap_path.iterdir()) == []


@every_policy
def test_a_failure_stays_with_its_engine(policy: str, swap_path: Path) -> None:
    with faulty_disks() as disks:
        broken, sound = build(swap_path, policy), build(swap_path, policy)
        assert train(broken, 2) is None
        disks[0].add(extent(broken, "param").fault("read"))
        failure = train(broken, 5, first=2)
        assert failure is not None
        check_aftermath(policy, broken, failure, swap_path)
        assert train(sound, 3) is None
        broken.close()
        assert train(sound, 5, first=3) is None
        weights = weights_after(sound)
        assert isinstance(weights, dict) and not differing(reference(policy, 5), weights)
        sound.close()
    assert list(swap_path.iterdir()) == []


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """While this is open only so many more files can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    free = [fd for fd in range(max(taken) + number + 2) if fd not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[number], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_full_table_of_descriptors_at_the_start(swap_path: Path) -> None:
    """At whichever open it is full: an error of ours that says so, and nothing is left."""
    reference("overlapped", 1)  # what is imported late is imported
    raised: set[str] = set()
    for number in range(12):
        with descriptors_left(number):
            try:
                engine = build(swap_path, "overlapped")
            except (ConfigError, StoreError, TransferError) as error:
                raised.add(type(error).__name__)
                assert "Too many open files" in str(error), error
                assert list_after(swap_path) == []
                continue
        engine.close()
        break
    else:
        pytest.fail("twelve descriptors are not enough for one engine")
    assert number >= 2 and raised
    assert list_after(swap_path) == []


def list_after(swap_path: Path) -> list[str]:
    """Its entries, read with the room that a limit leaves no descriptor for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return os.listdir(swap_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@every_policy
def test_a_full_table_of_descriptors_in_mid_run(policy: str, swap_path: Path) -> None:
    """Training opens nothing; and closing removes its files nevertheless."""
    engine = build(swap_path, policy)
    assert train(engine, 2) is None
    expected = reference(policy, 4)
    with descriptors_left(0):
        assert train(engine, 4, first=2) is None
        weights = weights_after(engine)
        assert isinstance(weights, dict) and not differing(expected, weights)
        engine.close()
    assert list(swap_path.iterdir()) == []
