"""A device that answers no more: an error in time, with what is in flight; and the same table on a signal."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import tiered_zero
from tests.support.faulty_runs import (
    NVME,
    POLICIES,
    build,
    check_aftermath,
    check_closed,
    differing,
    extent,
    faulty_disks,
    reference,
    train,
)
from tests.support.inspection import policy as policy_of
from tests.support.inspection import prefetched
from tests.support.pairwise import by_turns

pytestmark = [pytest.mark.usefixtures("no_leaks")]

TIMEOUT_S = 0.4
STALLS = {
    "a parameter's read": ("param", "read", "forward"),
    "the state's read": ("state", "read", "step"),
    "the state's write": ("state", "write", "step"),
    "a parameter's write": ("param", "write", "step"),
}


@pytest.mark.parametrize(("stall", "policy"), by_turns(list(STALLS), list(POLICIES)[::-1]))
def test_a_stalled_request(stall: str, policy: str, swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    what, kind, armed = STALLS[stall]
    began_s: list[float] = []
    with faulty_disks(io_timeout_s=TIMEOUT_S) as disks:
        engine = build(swap_path, policy)

        def arm(step: int, call: str) -> None:
            if (step, call) == (2, armed if policy != "overlapped in backward" or armed == "forward" else "backward"):
                disks[0].add(extent(engine, what).fault(kind, 1, "stall"))
            if disks[0].stalled and not began_s:
                began_s.append(min(transfer.submitted_s for transfer in disks[0].stalled))

        failure = train(engine, 6, before=arm)
        ended_s = time.monotonic()
        assert failure is not None
        begin_s = began_s[0] if began_s else min(transfer.submitted_s for transfer in disks[0].stalled)
        text = str(failure.error)
        assert "made no progress for 0.4 s" in text and f"{kind}  " in text.partition("in flight")[2], text
        assert TIMEOUT_S <= ended_s - begin_s < TIMEOUT_S + 60.0, "raised, not waited for"
        check_aftermath(policy, engine, failure, swap_path)
        check_closed(engine, swap_path, caplog)
        assert time.monotonic() - ended_s < 60.0, "closing waited for what is stalled again and again"


@pytest.mark.parametrize(("policy", "stall"), by_turns(list(POLICIES), ["a parameter's read", "the state's write"]))
def test_dump_on_shows_a_stalled_step(
    stall: str,
    policy: str,
    swap_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The main thread waits deep in a step; the table comes nevertheless, and the step goes on."""
    what, kind, armed = STALLS[stall]
    handled = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())
    tiered_zero.dump_on(signal.SIGUSR1)
    with faulty_disks() as disks, build(swap_path, policy) as engine:
        place = extent(engine, what)

        def watch() -> None:
            deadline_s = time.monotonic() + 100
            while not disks[0].stalled and time.monotonic() < deadline_s:
                time.sleep(0.005)
            time.sleep(0.2)  # the main thread waits by then
            os.kill(os.getpid(), signal.SIGUSR1)
            handled.wait(60)
            disks[0].release()

        def arm(step: int, call: str) -> None:
            nonlocal place
            if (step, call) == (2, "backward" if armed == "step" else armed):
                place = extent(engine, what)
                disks[0].add(place.fault(kind, 1, "stall"))

        watcher = threading.Thread(target=watch)
        watcher.start()
        failure = train(engine, 4, before=arm)
        watcher.join()
        assert failure is None
        table = capfd.readouterr().err
        assert "requests in flight" in table and place.path in table, table
        row = next(
            line for line in table.splitlines() if f"bytes at {place.offsets.start} " in line or place.path in line
        )
        assert kind in table and float(row.split()[0]) >= 0.0
        assert not differing(reference(policy, 4), dict(engine.module.state_dict()))
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("delays", [None, 4, 5])
@pytest.mark.parametrize("placement", [NVME, ("cpu", "nvme")])
def test_a_step_does_not_wait_for_the_last_ones_writes(
    placement: tuple[str, str], delays: int | None, swap_path: Path
) -> None:
    """The state that is updated last is held up on its way to the disk. Forward takes the parameters that are not home
    yet from the update, backward needs no state, and the update that it starts stands behind the one that still writes.
    """
    policy = "overlapped in backward"
    runtime = {"debug_delay_seed": delays}
    with faulty_disks() as disks, build(swap_path, policy, placement=placement, runtime=runtime) as engine:
        assert train(engine, 2) is None
        engine.flush()
        disks[0].add(extent(engine, "last state").fault("write", 1, "stall"))
        assert train(engine, 4, first=2) is None
        assert disks[0].stalled, "steps 2 and 3 were taken beside it"
        disks[0].release()
        assert train(engine, 6, first=4) is None
        assert not differing(reference(policy, 6), dict(engine.module.state_dict()))


def test_a_write_that_fails_after_the_next_backward_began_latches(
    swap_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = "overlapped in backward"
    with faulty_disks() as disks, build(swap_path, policy) as engine:
        assert train(engine, 2) is None
        engine.flush()
        disks[0].add(extent(engine, "last state").fault("write", 1, "stall"))
        failure = train(engine, 5, first=2, before=lambda *at: disks[0].expire() if at == (4, "forward") else None)
        assert failure is not None and (failure.step, failure.call) == (4, "forward"), failure
        check_aftermath(policy, engine, failure, swap_path)
    assert not [text for text in caplog.messages if "nobody waited" in text]


def test_what_was_read_ahead_is_left_to_an_exact_update_that_still_runs(swap_path: Path) -> None:
    """Updates are late from the fifth step on; one before that is held up while the driver forgets what was read."""
    runtime = {"update": "delayed", "delay_start_step": 4}
    with faulty_disks() as disks, build(swap_path, "delayed", runtime=runtime) as engine:
        policy = policy_of(engine)
        assert train(engine, 2) is None
        engine.flush()
        disks[0].add(extent(engine, "state").fault("write", 1, "stall"))
        assert train(engine, 3, first=2) is None
        deadline_s = time.monotonic() + 100
        while not (stalled := list(disks[0].stalled)) and time.monotonic() < deadline_s:
            time.sleep(0.002)
        assert stalled[0].waited_for.wait(100)  # what there is room for is read
        ahead = prefetched(engine)
        policy._cancel_prefetch()
        assert ahead and prefetched(engine) == ahead, "an update runs"
        disks[0].release()
        engine.flush()
        policy._cancel_prefetch()
        assert not prefetched(engine)
        assert train(engine, 7, first=3) is None
