"""Run as a program: kill processes that save checkpoints, at random moments, and load what they left.

    python run_save_kills.py DIRECTORY NUMBER SEED

Each child goes on from the step that is there, and saves one step after another: every second one over the tag "same",
the others under new tags, of which it keeps two. Prints a line of JSON for each child: the last step that was known to
be whole (from which it began, or whose save has returned), the step that was found, how many temporary names were left,
and how long the child lived, up to three times what the first save took. `latest` names a step that returned, or a
later one that is complete.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tests.support.inspection.insides import prune
from tests.support.tags import equal_bits, load_tag, newest_complete, save_tag, tag_to_load, unfinished


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(400_000, generator=generator), "y": torch.full((7,), step)}


def save_on(path: Path, step: int, pipe: int) -> None:
    """Never returns."""
    while True:
        step += 1
        save_tag(path, "same" if step % 2 else f"step{step}", tensors_of(step), step)
        os.write(pipe, step.to_bytes(4, "little"))
        prune(path, keep=2)


def main() -> None:
    path, number, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(sys.argv[3])
    torch.set_num_threads(1)
    found = returned = 0
    save_s = 0.0
    for _ in range(number):
        begun = found
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            save_on(path, found, writer)
        os.close(writer)
        begun_s = time.monotonic()
        if not save_s:
            found = returned = int.from_bytes(os.read(reader, 4), "little")
            save_s = time.monotonic() - begun_s
        life_s = 3.0 * save_s * chance.random()
        time.sleep(life_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while word := os.read(reader, 4):
            returned = int.from_bytes(word, "little")
        os.close(reader)
        newest = newest_complete(path)
        assert newest is not None and newest.step is not None
        found = newest.step
        assert equal_bits(load_tag(newest.path), tensors_of(found)), found
        named = tag_to_load(path).step
        assert returned <= named <= found, (returned, named, found)
        left = len(unfinished(path))
        print(json.dumps({"known": max(begun, returned), "found": found, "left": left, "life_s": life_s}), flush=True)


if __name__ == "__main__":
    main()
