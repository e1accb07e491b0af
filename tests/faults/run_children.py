"""Run as a program: real training runs, each in a process of its own, side by side on one swap directory.

    python run_children.py SWAP_PATH < lines of "POLICY:NUM_STEPS"

Each line starts a child, forked after the imports. It prints a line of JSON for each step ({"child", "pid", "step"})
and, if it comes to its end, the digest of its weights; the parent prints {"child", "ended"} with its exit status.
"""

import hashlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

import torch

from tests.support.faulty_runs import build, train
from tests.support.imports import freeze_imports
from tests.support.models import named_weights


def say(**fields: object) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())  # one write a line: the children share the pipe


def digest(weights: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name, value in weights.items():
        whole.update(name.encode() + value.numpy().tobytes())
    return whole.hexdigest()


def run_child(index: int, swap_path: Path, policy: str, num_steps: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the traceback of a KeyboardInterrupt
    torch.set_num_threads(1)
    engine = build(swap_path, policy)  # a child that a signal ends closes nothing itself
    for step in range(num_steps):
        failure = train(engine, step + 1, first=step)
        if failure is not None:
            raise failure.error
        say(child=index, pid=os.getpid(), step=step)
        time.sleep(0.1)  # the processor is for those that begin and end
    say(child=index, pid=os.getpid(), digest=digest(dict(named_weights(engine.module))))
    engine.close()


def main() -> None:
    freeze_imports()  # each child would import them anew, and walk them at its end
    swap_path = Path(sys.argv[1])
    children: dict[int, int] = {}
    num_started = 0
    while True:
        if select.select([0], [], [], 0.02)[0]:
            line = os.read(0, 4096).decode()
            if not line:
                return
            for order in line.splitlines():
                policy, num_steps = order.split(":")
                pid = os.fork()
                if pid == 0:
                    return run_child(num_started, swap_path, policy, int(num_steps))
                children[pid] = num_started
                num_started += 1
        while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            say(child=children.pop(ended[0]), ended=os.waitstatus_to_exitcode(ended[1]))


if __name__ == "__main__":
    main()
