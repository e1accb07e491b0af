"""Run as a program under LD_PRELOAD of tests/io/faulty_libc.c: training on a real engine whose system calls fail.

    python run_faulty_libc.py SWAP_PATH ENGINE...

Forks a process for each engine after its imports, which run side by side. Prints a line of JSON for each engine, case
and policy: what came of it. Anything unexpected raises.
"""

import ctypes
import errno
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

from tests.support.faulty_runs import (
    POLICIES,
    Failure,
    build,
    check_aftermath,
    differing,
    reference,
    train,
    weights_after,
)
from tests.support.imports import freeze_imports
from tests.support.inspection import store_of

LIBC = ctypes.CDLL(None)
Fault = tuple[str, int, str, int]
"""Which call, its number (0: every one), effect, argument; see faulty_libc.c."""

MENDED: dict[str, Fault] = {
    "every read is short": ("read", 0, "short", 7000),
    "every write is short": ("write", 0, "short", 5000),
    "EINTR on a read": ("read", 7, "fail", errno.EINTR),
    "EAGAIN on a write": ("write", 7, "fail", errno.EAGAIN),
}
RAISED: dict[str, Fault] = {
    "EIO on a read": ("read", 9, "fail", errno.EIO),
    "EIO on a write": ("write", 9, "fail", errno.EIO),
    "ENOSPC on a write": ("write", 9, "fail", errno.ENOSPC),
    "a bit flipped by a read": ("read", 9, "flip", 70),
    "a bit flipped by every write": ("write", 0, "flip", 70),  # one may be of values that are replaced unread
    "every read hangs": ("read", 0, "stall", 2500),
    "every write hangs": ("write", 0, "stall", 2500),
}
TIMEOUT_S = 1.0
"""Of a run whose requests hang, from when they do: a busy disk may be slower before."""
MENDED_STEPS, RAISED_STEPS = 3, 6


def policies_of(engine: str, case: str) -> list[str]:
    """One policy, by turns: an engine meets them all, and a case meets another one on another engine."""
    turn = [*MENDED, *RAISED].index(case) + 2 * (engine == "aiofiles")
    return [list(POLICIES)[turn % len(POLICIES)]]


def arm(fault: Fault) -> None:
    call, nth, effect, argument = fault
    LIBC.faulty_libc_set(b"data.bin", call.encode(), ctypes.c_long(nth), effect.encode(), ctypes.c_long(argument))


def disarm() -> None:
    arm(("", 0, "", 0))


class Watch:
    """How long ago the first call was struck."""

    def __init__(self) -> None:
        self._struck_s: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.002) and not LIBC.faulty_libc_count():
            continue
        self._struck_s = time.monotonic()

    def stop(self) -> float:
        """Seconds."""
        ended_s = time.monotonic()
        self._over.set()
        self._thread.join()
        return ended_s - (self._struck_s or ended_s)


def run(swap_path: Path, name: str, policy: str, fault: Fault, num_steps: int) -> str:
    hangs = fault[2] == "stall"
    engine = build(swap_path, policy, runtime={"io_engine": name})
    try:
        first = train(engine, 2)
        if hangs:
            store_of(engine).engine.io_timeout_s = TIMEOUT_S
        arm(fault)
        watch = Watch()
        failure = first or train(engine, num_steps, first=2)
        raised_s = watch.stop()
        weights = weights_after(engine) if failure is None else None  # the last update may still run: it is struck too
        struck = LIBC.faulty_libc_count()
        if failure is None:
            same = isinstance(weights, dict) and not differing(reference(policy, num_steps), weights)
            came = "same weights" if same else "OTHER WEIGHTS"
        else:
            came = outcome(policy, engine, failure, swap_path)
        if hangs and raised_s > TIMEOUT_S + 60.0:
            came = f"TOO LATE: {raised_s:.1f} s; {came}"
        begun_s = time.monotonic()
        engine.close()
        if hangs and time.monotonic() - begun_s > 60.0:
            came = f"CLOSED SLOWLY: {time.monotonic() - begun_s:.1f} s; {came}"
    finally:
        disarm()
    if not struck or list(swap_path.iterdir()):
        raise RuntimeError(f"{struck} calls were struck; left: {list(swap_path.iterdir())}")
    return came


def outcome(policy: str, engine: object, failure: Failure, swap_path: Path) -> str:
    cause: BaseException | None = failure.error
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    return f"{type(cause).__name__}, {check_aftermath(policy, engine, failure, swap_path)}"  # type: ignore[arg-type]


def say(**fields: object) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())  # one write a line: the processes share the pipe


def run_engine(swap_path: Path, name: str) -> None:
    swap_path.mkdir(mode=0o700)
    for policy in POLICIES:
        reference(policy, MENDED_STEPS)
        for case, fault in {**MENDED, **RAISED}.items():
            if policy not in policies_of(name, case):
                continue
            num_steps = MENDED_STEPS if case in MENDED else RAISED_STEPS
            came = run(swap_path, name, policy, fault, num_steps)
            say(engine=name, case=case, policy=policy, came=came)


def main() -> int:
    torch.set_num_threads(1)
    freeze_imports()
    swap_path, *engines = sys.argv[1:]
    children = []
    for name in engines:
        child = os.fork()
        if not child:
            run_engine(Path(swap_path) / name, name)
            return 0
        children.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


if __name__ == "__main__":
    sys.exit(main())
