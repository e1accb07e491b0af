"""Real training processes on one swap directory: they do not meet, and however one ends, the others go on."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.faults.conftest import ROOT
from tests.faults.run_children import digest
from tests.support.faulty_runs import POLICIES, reference
from tests.support.inspection.insides import list_runs
from tests.support.pairwise import by_turns
from tiered_zero.cli.main import main

ENDINGS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Children:
    """The program's children: what each has said so far."""

    def __init__(self, swap_path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/faults/run_children.py"), str(swap_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said: list[dict[str, Any]] = []

    def start(self, policy: str, num_steps: int = 100_000) -> int:
        """The child's number."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{policy}:{num_steps}\n")
        self.process.stdin.flush()
        self.said.append({})
        return len(self.said) - 1

    def wait(self, index: int, key: str, least: int = 0) -> Any:
        """Read on until a child has said `key`, at least `least` where it is a number."""
        assert self.process.stdout is not None
        while key not in self.said[index] or (key == "step" and self.said[index][key] < least):
            line = self.process.stdout.readline()
            assert line, f"the children ended: {self.said}"
            fields = json.loads(line)
            self.said[fields["child"]] |= fields
        return self.said[index][key]

    def send(self, index: int, number: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit status."""
        os.kill(self.wait(index, "pid"), number)
        status: int = self.wait(index, "ended")
        return status


@pytest.fixture
def children(swap_path: Path) -> Iterator[Children]:
    started = Children(swap_path)
    yield started
    for said in started.said:
        if "pid" in said and "ended" not in said:
            os.kill(said["pid"], signal.SIGKILL)
    started.process.kill()
    started.process.communicate()


def swap(*arguments: str) -> Any:
    result = CliRunner().invoke(main, ["swap", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.slow
def test_many_runs_on_one_directory_and_every_way_to_end(children: Children, swap_path: Path) -> None:
    stays = children.start("overlapped")
    killed: list[int] = []
    for policy, number in by_turns(list(POLICIES), ENDINGS):
        finishing = children.start(policy, 4)
        index = children.start(policy)
        children.wait(index, "step", least=2)
        pid = children.wait(index, "pid")
        assert pid in [run.pid for run in list_runs(swap_path)]
        assert children.send(index, number) == -number
        if number == signal.SIGINT:
            assert pid not in [run.pid for run in list_runs(swap_path)], f"{number.name} left a swap directory"
        else:
            killed.append(pid)
        assert children.wait(finishing, "digest") == digest(reference(policy, 4)), "runs on one directory have met"
        assert children.wait(finishing, "ended") == 0
    states = {run.pid: run.state for run in list_runs(swap_path)}
    assert states == {**dict.fromkeys(killed, "dead"), children.wait(stays, "pid"): "alive"}
    swap("gc", str(swap_path), "--dry-run")
    assert len(list_runs(swap_path)) == len(states)
    swap("gc", str(swap_path))
    assert [run.pid for run in list_runs(swap_path)] == [children.wait(stays, "pid")]
    children.wait(stays, "step", least=children.wait(stays, "step") + 3)
    assert children.send(stays, signal.SIGINT) == -signal.SIGINT
    assert list(swap_path.iterdir()) == []
