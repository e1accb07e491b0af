"""A first signal is seen after a step, a second one ends the call, and workers leave both to their parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tiered_zero
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
