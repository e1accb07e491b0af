"""Kill real training processes at random moments, and record whether each went on with the bits of an undisturbed run.

    python tools/kills.py --kills 300    appends a record a round, at most 30 kills of one run

Runs commit in place after each step: scripts under several update policies, state formats and placements,
`tiered-zero train --save --save-every 1 --resume`, and several ranks, of which one or all are killed. A round that lost
a step or ended with other bits is recorded as failed, and the exit code is 1. One run trains at a time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.crash.kills import CASES, RANK_CASES, Killed, kill_command, kill_ranks, kill_script
from tools.bench.record import append_record

RECORDS = Path(__file__).resolve().parent / "bench" / "records" / "kills.jsonl"
COMMAND = "tiered-zero train"
RANKS = {str(case): case for case in RANK_CASES}
NAMES = [*map(", ".join, CASES), COMMAND, *RANKS]
ROUND = {COMMAND: 10, **dict.fromkeys(RANKS, 15)}
"""Kills in one round; 30 where nothing is said."""


def rounds(num_kills: int, seed: int) -> Iterator[tuple[str, int, int]]:
    """Yield the case, the kills and the seed of each round, case by case of NAMES in turn."""
    while num_kills > 0:
        name = NAMES[seed % len(NAMES)]
        kills = min(num_kills, ROUND.get(name, 30))
        yield name, kills, seed
        num_kills, seed = num_kills - kills, seed + 1


def kill(name: str, num_kills: int, seed: int, directory: Path) -> Killed:
    """Raises AssertionError where a step was lost, or the bits differ."""
    swap_path, scratch = directory / "swap", directory / "scratch"
    for path in (swap_path, scratch):
        path.mkdir(mode=0o700)
    if name == COMMAND:
        return kill_command(scratch, swap_path, num_kills, seed)
    if name in RANKS:
        return kill_ranks(scratch, swap_path, RANKS[name], num_kills, seed)
    cases = {", ".join(case): case for case in CASES}
    return kill_script(scratch, swap_path, cases[name], num_kills, seed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of the first round, which it chooses")
    parser.add_argument("--dir", type=Path, help="where swap directories and checkpoints are made")
    parser.add_argument("--out", type=Path, default=RECORDS, metavar="RECORDS")
    options = parser.parse_args(arguments)
    failed = 0
    for name, num_kills, seed in rounds(options.kills, options.seed):
        begun_s, killed, failure = time.monotonic(), None, ""
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:
            try:
                killed = kill(name, num_kills, seed, Path(directory))
            except AssertionError as error:
                failed, failure = failed + 1, str(error)
        append_record(
            options.out,
            "kills",
            {"case": name, "kills": num_kills, "seed": seed},
            [time.monotonic() - begun_s],
            None,
            killed=None if killed is None else vars(killed),
            failure=failure,
        )
        print(f"{name}: {killed or failure}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
