"""A first signal is seen after a step, a second one ends the call, and workers leave both to their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiered_zero
from tests.support.forked import ForkedProcess, call_in_fork
from tests.support.models import ParityGPT
from tests.support.trainers import tiered
from tiered_zero.stopping import INTERRUPTED, TERMINATED, StopRequest

CODES = {signal.SIGTERM: TERMINATED, signal.SIGINT: INTERRUPTED}


@pytest.mark.parametrize("first", CODES)
@pytest.mark.parametrize("second", CODES)
def test_the_first_asks_and_the_second_ends(
    first: signal.Signals, second: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(number) for number in CODES]
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended, tiered_zero.stop_on_signals() as stop:
        assert not stop and stop.code is None
        os.kill(os.getpid(), first)
        assert stop and stop.code == CODES[first]
        assert "Finishing this step" in capfd.readouterr().err
        os.kill(os.getpid(), second)
    assert isinstance(ended.value, SystemExit if second is signal.SIGTERM else KeyboardInterrupt)
    assert stop.code == CODES[first]
    assert [signal.getsignal(number) for number in CODES] == before


def test_at_once_where_nothing_is_saved(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, tiered_zero.stop_on_signals(at_boundary=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == TERMINATED == stop.code
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_worker_leaves_signals_to_its_parent(number: signal.Signals, ends: bool) -> None:
    script = f"""if True:
        import os, signal, tiered_zero
        with tiered_zero.stop_on_signals() as stop:
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), {int(number)})
                os._exit(7 if not stop else 8)
            status = os.waitpid(child, 0)[1]
            assert not stop
            print(os.waitstatus_to_exitcode(status))
    """
    root = Path(tiered_zero.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (str(-number if ends else 7), "")


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with tiered_zero.stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_request_is_true_once_a_signal_has_come() -> None:
    request = StopRequest(at_boundary=True)
    assert not request
    request.code = TERMINATED
    assert request


SCRIPT = """if True:
    import signal, sys, torch, torch.distributed as dist
    from pathlib import Path
    from tiered_zero.optim import OffloadedOptimizer
    rank, opens, swap = int(sys.argv[1]), sys.argv[2] == "open", Path(sys.argv[3])
    store = dist.FileStore(str(swap / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 0:
        numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        offload = {"device": "nvme", "nvme_path": str(swap)}
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = OffloadedOptimizer([param], torch.optim.AdamW, offload)
        param.sum().backward()
        optimizer.step()
        if not opens:
            optimizer.close()
        print([signal.getsignal(number) for number in numbers] == [signal.SIG_DFL] * 3, flush=True)
        dist.recv(torch.zeros(1), 1)  # which the other rank never sends
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("state", ["open", "closed"])
def test_sigterm_ends_a_process_that_waits_for_a_silent_rank(state: str, swap_path: Path) -> None:
    """In C++, where no Python handler runs; the package has set none."""
    output = swap_path / "output"
    ranks = [
        ForkedProcess("-c", SCRIPT, rank, state, swap_path, stdout=output, stderr=output, env=os.environ)
        for rank in range(2)
    ]
    try:
        while b"\n" not in (output.read_bytes() if output.exists() else b"") and ranks[0].poll() is None:
            time.sleep(0.02)
        ranks[0].send_signal(signal.SIGTERM)
        assert ranks[0].wait(60) == -signal.SIGTERM, output.read_text()
        assert output.read_text() == "True\n"
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def test_initialize_leaves_the_signals_of_a_host_framework_alone(swap_path: Path) -> None:
    """Lightning sets its handler of SIGUSR1 where there is none, and calls what it finds for SIGTERM."""
    before, during, after = call_in_fork(handlers_of_an_engine, str(swap_path))
    assert before == during == after and set(before) <= {signal.SIG_DFL, signal.SIG_IGN}, "nohup ignores SIGHUP"


def handlers_of_an_engine(swap: str) -> list[list[object]]:
    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]

    before = handlers()
    with tiered(ParityGPT(), Path(swap)):
        during = handlers()
    return [before, during, handlers()]
