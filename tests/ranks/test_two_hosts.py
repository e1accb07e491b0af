"""One agent of torchrun on each of two hosts: network namespaces of this machine, or its loopback where it has none."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.ranks.torchrun import SCRIPTS, forked, ranks_of, still_running
from tests.support.hosts import free_port

LOOP = str(SCRIPTS / "run_loop.py")
NAMES = ("tz_test_0", "tz_test_1")
ADDRESSES = ("10.213.77.1", "10.213.77.2")


@dataclass(frozen=True)
class Host:
    """Where an agent runs: a network namespace, "" for this process's, and the address by which others reach it."""

    namespace: str
    address: str


def ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0


def connect() -> bool:
    """Two namespaces and a cable between them; False where this user may not make them."""
    made = shutil.which("ip") is not None and all(ip("netns", "add", name) for name in NAMES)
    made = made and ip("link", "add", "tz0", "netns", NAMES[0], "type", "veth", "peer", "tz1", "netns", NAMES[1])
    for number, name in enumerate(NAMES):
        made = made and ip("-n", name, "address", "add", f"{ADDRESSES[number]}/24", "dev", f"tz{number}")
        made = made and ip("-n", name, "link", "set", f"tz{number}", "up") and ip("-n", name, "link", "set", "lo", "up")
    return made


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        if connect():
            first, second = (Host(name, address) for name, address in zip(NAMES, ADDRESSES, strict=True))
            yield first, second
        else:
            yield Host("", "127.0.0.1"), Host("", "127.0.0.1")
    finally:
        for name in NAMES:
            ip("netns", "delete", name)


def folders(scratch: Path) -> list[Path]:
    """One for each host."""
    made = [scratch / f"host{number}" for number in (0, 1)]
    for folder in made:
        folder.mkdir()
    return made


@pytest.mark.slow
def test_two_hosts_train_together(hosts: tuple[Host, Host], swap_path: Path, tmp_path: Path) -> None:
    """One rank on each host, under an agent of its own."""
    place = hosts[0].address, free_port()
    with ExitStack() as stack:
        launches = [
            stack.enter_context(forked([LOOP, str(own), str(swap_path)], own, 1, (number, *place, host.namespace)))
            for number, (host, own) in enumerate(zip(hosts, folders(tmp_path), strict=True))
        ]
        for launch in launches:
            assert launch.wait() == 0, launch.output[-8000:]
    first, second = (json.loads((tmp_path / f"host{rank}/rank{rank}.json").read_text()) for rank in (0, 1))
    assert (first["comm"], second["comm"]) == ([0, 2, 0], [1, 2, 0]), "each is the first of its host"
    assert first["1"]["weights"] == second["1"]["weights"] == first["0"]["weights"]
    assert not any(swap_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_the_end_of_one_host_ends_the_other(
    hosts: tuple[Host, Host], swap_path: Path, tmp_path: Path, lost: int
) -> None:
    """Also of the one on which the ranks met."""
    place = hosts[0].address, free_port()
    with ExitStack() as stack:
        launches = [
            stack.enter_context(
                forked([LOOP, str(own), str(swap_path), "wait"], own, 1, (number, *place, host.namespace))
            )
            for number, (host, own) in enumerate(zip(hosts, folders(tmp_path), strict=True))
        ]
        for number, launch in enumerate(launches):
            launch.wait_for(lambda number=number: (tmp_path / f"host{number}/begun{number}").exists(), "third step")  # type: ignore[misc]
        ranks = [rank for launch in launches for rank in ranks_of(launch)]
        assert len(ranks) == 2
        agent = psutil.Process(launches[lost].process.pid)
        for process in (agent, ranks[lost]):
            process.kill()
        other = launches[1 - lost]
        assert other.wait() == 1
        assert still_running(ranks) == []
    assert f"rank {1 - lost}" in other.output or "another rank was lost" in other.output
    assert "RankError" in other.output and "the connection to another rank was lost" in other.output
    assert len(list(swap_path.iterdir())) == 1, "the other has removed its own"
