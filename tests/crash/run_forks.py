"""Run as a program: fork children from a process that trains, each of which uses or drops the engine and ends.

    python run_forks.py SWAP_PATH POLICY...

For each policy it prints a line of JSON for each child: the policy, how it used the engine, what it met, and its exit
status; then one of the parent. Children of the first policy use the engine in every way.
"""

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tiered_zero
from tests.support.faulty_runs import build, differing, reference, train
from tests.support.imports import freeze_imports
from tests.support.models import batch, named_weights
from tiered_zero.errors import TieredZeroError

OWNS_NOTHING = ("end", "drop", "close", "leave the block", "SIGTERM")
"""Ways to end; the others use the engine, which is refused."""
PATIENCE_S = 30.0


def use(act: Callable[[], object]) -> str:
    try:
        act()
    except TieredZeroError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    torch.set_num_threads(1)
    freeze_imports()  # a child that ends would walk them all
    for number, policy in enumerate(sys.argv[2:]):
        run(Path(sys.argv[1]), policy, refusals=number == 0)


def run(swap_path: Path, policy: str, refusals: bool) -> None:
    """`refusals`: use the engine too in each way that is refused, before anything that has a policy is asked."""
    engines = [build(swap_path, policy)]
    assert train(engines[0], 1) is None

    def drop() -> str:
        engines.clear()
        gc.collect()
        return ""

    ways: dict[str, Callable[[], str]] = {
        "end": lambda: "",
        "drop": drop,
        "close": lambda: use(engines[0].close),
        "leave the block": lambda: use(lambda: engines[0].__exit__(None, None, None)),
        "forward": lambda: use(lambda: engines[0](*batch(1))),
        "call the module": lambda: use(lambda: engines[0].module(*batch(1))),
        "backward": lambda: use(lambda: engines[0].backward(torch.zeros((), requires_grad=True))),
        "step": lambda: use(engines[0].step),
        "optimizer.step": lambda: use(engines[0].optimizer.step),
        "flush": lambda: use(engines[0].flush),
        "zero_grad": lambda: use(engines[0].zero_grad),
        "abort_step": lambda: use(engines[0].abort_step),
        "state_dict": lambda: use(engines[0].module.state_dict),
        "gathered": lambda: use(lambda: tiered_zero.gathered(engines[0].module).__enter__()),
        "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM) or "",
    }
    if not refusals:
        ways = {way: ways[way] for way in OWNS_NOTHING}
    for way, act in ways.items():
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writing, act().encode())
            if way not in OWNS_NOTHING:
                os._exit(0)  # how Python ends is seen with those that own nothing
            raise SystemExit(0)
        os.close(writing)
        status = wait_for(pid)
        with os.fdopen(reading, "rb") as reader:
            print(
                json.dumps({"policy": policy, "way": way, "met": reader.read().decode(), "status": status}), flush=True
            )
    failure = train(engines[0], 3, first=1)
    wrong = differing(reference(policy, 3), dict(named_weights(engines[0].module)))
    engines[0].close()
    print(
        json.dumps({"policy": policy, "failure": str(failure), "wrong": wrong, "left": os.listdir(swap_path)}),
        flush=True,
    )


def wait_for(pid: int) -> int | None:
    """The exit status; None of a child that hung."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    main()
