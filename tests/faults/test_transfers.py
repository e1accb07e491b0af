"""Reads and writes that fail under a training run: the step that they befall says so; nothing is silent."""

import errno
import gc
import random
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.io_faults import Fault, FaultyEngine
from tests.support.faulty_runs import (
    CALLS,
    NVME,
    POLICIES,
    build,
    check_aftermath,
    check_closed,
    extent,
    faulty_disks,
    train,
)
from tests.support.inspection.insides import SwapDir, SwapStore
from tests.support.models import batch
from tests.support.pairwise import by_turns
from tiered_zero.errors import EngineFailedError, TransferError
from tiered_zero.io.select import select_engine

pytestmark = [pytest.mark.usefixtures("no_leaks")]

STEP = 2
"""The step (from 0) in which a fault is armed."""

LATEST = {
    "barrier": (STEP, "step"),
    "overlapped": (STEP + 1, "forward"),
    "overlapped in backward": (STEP + 1, "forward"),
    "delayed": (STEP + 1, "step"),
}
"""When a failed update of that step must have come to light."""

READS = {
    "EIO on a parameter's read in forward": ("param", "read", "forward", errno.EIO),
    "EIO on a parameter's read in backward": ("param", "read", "backward", errno.EIO),
    "short read of a parameter, then EIO": ("param", "read", "forward", "short"),
}
UPDATES = {
    "EIO on the state's read in the update": ("state", "read", "backward", errno.EIO),
    "EIO on the state's write": ("state", "write", "backward", errno.EIO),
    "EIO on a parameter's write": ("param", "write", "backward", errno.EIO),
    "short write of the state, then EIO": ("state", "write", "backward", "short"),
    "ENOSPC on the state's write": ("state", "write", "backward", errno.ENOSPC),
    "ENOSPC on a parameter's write": ("param", "write", "backward", errno.ENOSPC),
}
ELSEWHERE = [
    (("nvme", "cpu"), "EIO on a parameter's read in backward"),
    (("nvme", "cpu"), "EIO on a parameter's write"),
    (("cpu", "nvme"), "EIO on the state's read in the update"),
    (("cpu", "nvme"), "EIO on the state's write"),
]
CASES = [(NVME, fault) for fault in {**READS, **UPDATES}] + ELSEWHERE


@pytest.mark.parametrize(
    ("placement", "fault", "policy"), [(*case, policy) for case, policy in by_turns(CASES, list(POLICIES), 2)]
)
def test_a_failed_transfer(
    policy: str,
    placement: tuple[str, str],
    fault: str,
    swap_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fault meets two policies: both halves of an update that is late, and of one that is not."""
    what, kind, armed, effect = {**READS, **UPDATES}[fault]
    with faulty_disks() as disks:
        engine = build(swap_path, policy, placement=placement)

        def arm(step: int, call: str) -> None:
            if (step, call) == (STEP, armed):
                if (what, armed) == ("param", "forward"):
                    engine.flush()  # what an update still makes is handed over, not read
                disks[0].add(extent(engine, what).fault(kind, 1, effect))

        failure = train(engine, STEP + 3, before=arm)
        assert failure is not None and disks[0].num_waiting == 0
        step, call = (STEP, armed) if fault in READS else LATEST[policy]
        if what == "state" and (kind == "read" or policy != "barrier"):
            # this update's read may have ended ahead of it, and then that of the next update fails; its write is waited
            # for by the next update, which runs behind it
            step += 1
        assert (failure.step, CALLS.index(failure.call)) <= (step, CALLS.index(call)), failure
        code = effect if isinstance(effect, int) else errno.EIO
        assert f"{kind} of " in str(failure.error) and errno.errorcode[code] in str(failure.error), failure
        came = check_aftermath(policy, engine, failure, swap_path)
        if came.endswith("the weights are those before"):  # read ahead, before any update
            assert failure.call == "backward" and (what, kind) == ("state", "read") and placement[0] == "cpu"
            again = train(engine, STEP + 4, first=STEP + 1)
            assert again is not None and isinstance(again.error, EngineFailedError), again
        else:
            assert came.endswith("from then on EngineFailedError")
        check_closed(engine, swap_path, caplog)


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_nth_request_fails_whichever_it_is(
    policy: str, kind: str, swap_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With late lanes and freed memory full of NaN. A write that fails before training begins fails the start."""
    runtime = {"debug_delay_seed": 1, "debug_poison": True}
    with faulty_disks() as disks, build(swap_path, policy, runtime=runtime) as engine:
        assert train(engine, 3) is None
        engine.flush()
        num_requests = disks[0].count(kind)
    draw = random.Random(policy + kind)
    chosen = sorted({1, *draw.sample(range(2, num_requests), 2), num_requests})
    for nth in chosen:
        with faulty_disks(Fault(kind, nth)) as disks:
            try:
                engine = build(swap_path, policy, runtime={**runtime, "debug_delay_seed": nth})
            except TransferError as error:
                assert kind == "write" and str(swap_path) in str(error)
                continue
            failure = train(engine, 4)
            assert failure is not None, f"{kind} {nth} of {num_requests} failed, and nobody was told"
            check_aftermath(policy, engine, failure, swap_path)
            check_closed(engine, swap_path, caplog)
    assert list(swap_path.iterdir()) == []


@pytest.mark.parametrize("nth", [1, 20, 39])
def test_a_write_fails_before_training_begins(nth: int, swap_path: Path) -> None:
    with (
        faulty_disks(Fault("write", nth)),
        pytest.raises(TransferError, match=rf"write of \d+ bytes .*{swap_path}.*EIO"),
    ):
        build(swap_path, "overlapped")
    assert list(swap_path.iterdir()) == []


@pytest.mark.parametrize("effect", [errno.EIO, "short"])
def test_a_commit_whose_fsync_fails(effect: int | str, swap_path: Path) -> None:
    """Training keeps scratch, which is never synced; what commits is the store."""
    disk = FaultyEngine(select_engine(swap_path).engine)
    store = SwapStore(SwapDir.create([swap_path]), disk, capacity_nbytes=1 << 20)
    store.commit(1, {})
    disk.add(Fault("sync", disk.count("sync") + 1, effect))
    with pytest.raises(TransferError, match=r"sync of .* EIO .*resume from the last checkpoint"):
        store.commit(2, {})
    with pytest.raises(EngineFailedError, match="Resume from step 1"):
        store.commit(3, {})
    store.close()
    disk.close()
    assert list(swap_path.iterdir()) == []


@pytest.mark.parametrize("policy", ["overlapped", "overlapped in backward", "delayed"])
@pytest.mark.parametrize("how", ["close", "read"])
def test_the_last_update_fails_and_nothing_follows(
    how: str, policy: str, swap_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Parameters on the device outlive the engine: close() says where they are not those of the last step."""
    with faulty_disks() as disks:
        engine = build(swap_path, policy, placement=("none", "nvme"))

        def arm(step: int, call: str) -> None:
            if (step, call) == (STEP, "step" if policy != "overlapped in backward" else "backward"):
                engine.flush() if call == "step" else None
                disks[0].add(extent(engine, "state").fault("write"))

        failure = train(engine, STEP + 1, before=arm)
        if failure is None:
            with pytest.raises(
                (TransferError, EngineFailedError), match=rf"write of \d+ bytes at offset \d+ of {swap_path}"
            ):
                engine.close() if how == "close" else engine.module.state_dict()
        with suppress(EngineFailedError):  # said again, where a look at the module was told and no call of the engine
            engine.close()
        check_closed(engine, swap_path, caplog)


def test_a_program_that_tries_again_keeps_nothing_of_the_failed_engine(swap_path: Path) -> None:
    """Neither the engine, nor the graph of the step that failed: autograd's nodes hold what the collector cannot see.
    Each graph leads to the engine, which remembers its error, whose traceback leads to the loss."""
    alive = [_failed_run(swap_path) for _ in range(3)]
    gc.collect()  # which also ends tensors that a finalizer has freed
    gc.collect()
    assert [reference() for run in alive for reference in run] == [None] * 9


def _failed_run(swap_path: Path) -> list[weakref.ref[Any]]:
    with faulty_disks() as disks:
        engine = build(swap_path, "overlapped")
        loss = engine(*batch(0))
        disks[0].add(Fault("read", disks[0].count("read") + 1))
        with pytest.raises(TransferError, match="failed"):
            engine.backward(loss)
        engine.close()
    return [weakref.ref(each) for each in (engine, engine.module, loss)]
