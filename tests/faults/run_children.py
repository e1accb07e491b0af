"""Run as a program: real training runs, each in a process of its own, side by side on one swap directory.

    python run_children.py SWAP_PATH POLICY:NUM_STEPS ...

Each child prints a line of JSON for each step ({"child", "pid", "step"}) and, if it comes to its end, the digest of its
weights; the parent prints {"child", "ended"} with each exit status. Children are forked after the imports.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from tests.fakes.faulty_runs import build, train
from tests.parity.models import named_weights


def say(**fields: object) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())  # one write a line: children share the pipe


def digest(weights: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name, value in weights.items():
        whole.update(name.encode() + value.numpy().tobytes())
    return whole.hexdigest()


def child(index: int, swap_path: Path, policy: str, num_steps: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (a KeyboardInterrupt's traceback)
    torch.set_num_threads(1)
    with build(swap_path, policy) as engine:
        for step in range(num_steps):
            failure = train(engine, step + 1, first=step)
            if failure is not None:
                raise failure.error
            say(child=index, pid=os.getpid(), step=step)
            time.sleep(0.01)
        say(child=index, pid=os.getpid(), digest=digest(dict(named_weights(engine.module))))


def main() -> None:
    swap_path = Path(sys.argv[1])
    children: dict[int, int] = {}
    for index, spec in enumerate(sys.argv[2:]):
        policy, num_steps = spec.split(":")
        pid = os.fork()
        if pid == 0:
            child(index, swap_path, policy, int(num_steps))
            return
        children[pid] = index
    while children:
        pid, status = os.wait()
        say(child=children.pop(pid), ended=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
