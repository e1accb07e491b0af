"""Programs under the real torchrun: started as a user starts them, and looked at when they have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.ranks import launcher
from tests.support.forked import ForkedProcess

SCRIPTS = Path(__file__).parent
DEADLINE_S = 500.0
"""What has not ended by then is killed, and the test fails with its output."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A torchrun that runs, in a session of its own. `stdout`, `stderr`: files."""

    process: subprocess.Popen[bytes] | ForkedProcess
    stdout: Path
    stderr: Path

    @property
    def output(self) -> str:
        return f"{self.stdout.read_text(errors='replace')}\n{self.stderr.read_text(errors='replace')}"

    def wait(self) -> int:
        """Return the exit code, or fail with the output."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun has not ended in {DEADLINE_S:g} s\n{self.output[-8000:]}") from None

    def wait_for(self, met: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not met():
            assert self.process.poll() is None, f"it ended before {what}\n{self.output[-8000:]}"
            assert time.monotonic() < deadline_s, f"no {what}\n{self.output[-8000:]}"
            time.sleep(0.05)


@contextmanager
def launched(arguments: Sequence[str], scratch: Path, num_ranks: int = 2) -> Iterator[Launch]:
    """Start `torchrun --nproc-per-node N arguments` in `scratch`; no process of it is left when the block ends."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), *arguments]
    stdout, stderr = scratch / "stdout.txt", scratch / "stderr.txt"
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, cwd=scratch, env=launcher_environment(), start_new_session=True
        )
    launch = Launch(process=process, stdout=stdout, stderr=stderr)
    children: list[psutil.Process] = []
    try:
        yield launch
    finally:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
        for child in children:
            if child.is_running():
                child.kill()
        psutil.wait_procs(children, timeout=30)


@contextmanager
def forked(
    arguments: Sequence[str], scratch: Path, num_ranks: int = 2, host: Sequence[object] = ()
) -> Iterator[Launch]:
    """As `launched` does, where only what torchrun and its ranks do after their imports is tested. `host`: of two, what
    tests/ranks/launcher.py needs to know."""
    stdout, stderr = scratch / "stdout.txt", scratch / "stderr.txt"
    for file in (stdout, stderr):
        file.touch()  # both may be read from now on
    command = ["-m", launcher.__name__, scratch, num_ranks, *(host or (-1, "", 0, "")), *arguments]
    process = ForkedProcess(*command, stdout=stdout, stderr=stderr, env=launcher_environment(), cwd=scratch)
    launch = Launch(process=process, stdout=stdout, stderr=stderr)
    try:
        yield launch
    finally:
        process.kill()
        process.wait()
        left = ranks_of(launch)
        for rank in left:
            rank.kill()
        psutil.wait_procs(left, timeout=30)


def launcher_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, without what another launcher may have set, and with signals as at a terminal."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in names} | {**(more or {})}


def run(arguments: Sequence[str], scratch: Path, num_ranks: int = 2) -> Launch:
    """Run to the end, which has to be a good one, and leave nothing."""
    with launched(arguments, scratch, num_ranks) as launch:
        assert launch.wait() == 0, launch.output[-8000:]
    return launch


def ranks_of(launch: Launch) -> list[psutil.Process]:
    """The processes that run the program, by their RANK."""
    found = {}
    if isinstance(launch.process, ForkedProcess):
        for file in launch.stdout.parent.glob("rank*.pid"):
            if psutil.pid_exists(pid := int(file.read_text() or 0)):
                found[int(file.stem.removeprefix("rank"))] = psutil.Process(pid)
        return [found[number] for number in sorted(found)]
    for child in psutil.Process(launch.process.pid).children(recursive=True):
        try:
            number = child.environ().get("RANK")
        except psutil.Error:
            continue
        if number is not None and child.ppid() == launch.process.pid:
            found[int(number)] = child
    return [found[number] for number in sorted(found)]


def still_running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended within some seconds."""
    return psutil.wait_procs(processes, timeout=60)[1]


def interrupt(launch: Launch) -> None:
    """What Ctrl-C does: torchrun gets SIGINT, and its ranks, which have sessions of their own, what it sends them."""
    launch.process.send_signal(signal.SIGINT)
