"""Shares of processors, from made-up machines; no rank has those of another."""

import os
from pathlib import Path

import pytest
import torch

from tiered_zero.hardware import probe
from tiered_zero.hardware.probe import gpu_node, near_cpus, pci_node, place_of
from tiered_zero.hardware.runtime import bind_to_share, share_of


def two_sockets(num_cores: int) -> dict[int, tuple[int, int, int]]:
    """Two nodes; the second threads of all cores are numbered behind the first ones, as Linux numbers them."""
    return {
        cpu: (core // (num_cores // 2), core // (num_cores // 2), core)
        for cpu in range(2 * num_cores)
        for core in [cpu % num_cores]
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8, 16])
def test_every_processor_goes_to_one_rank(num_ranks: int) -> None:
    places = two_sockets(8)
    shares = [share_of(places, [None] * num_ranks, rank) for rank in range(num_ranks)]
    assert sorted(cpu for share in shares for cpu in share) == sorted(places)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    if 8 % num_ranks == 0:
        cores = [{places[cpu] for cpu in share} for share in shares]
        assert all(len(own) == len(share) / 2 for own, share in zip(cores, shares, strict=True)), "whole cores"
    if num_ranks in (2, 4, 8):
        assert all(len({places[cpu][0] for cpu in share}) == 1 for share in shares), "of one node"


def test_fewer_processors_than_ranks_are_not_divided() -> None:
    assert share_of({0: (0, 0, 0), 1: (0, 0, 1)}, [None] * 3, 0) == []


def test_a_rank_runs_on_the_node_of_its_gpu() -> None:
    places = two_sockets(8)
    nodes = [1, 0, 1, 1]
    shares = [share_of(places, nodes, rank) for rank in range(4)]
    assert [{places[cpu][0] for cpu in share} for share in shares] == [{1}, {0}, {1}, {1}]
    assert len(shares[1]) == 8 and sum(len(shares[rank]) for rank in (0, 2, 3)) == 8
    assert share_of(places, [1, None], 0) == share_of(places, [None, None], 0), "one that is not known: none counts"


def test_places_and_nodes_are_what_the_system_says(tmp_path: Path) -> None:
    folder = tmp_path / "devices/system/cpu/cpu5"
    (folder / "topology").mkdir(parents=True)
    (folder / "node1").mkdir()
    (folder / "topology/physical_package_id").write_text("1\n")
    (folder / "topology/core_id").write_text("12\n")
    assert place_of(5, tmp_path) == (1, 1, 12)
    assert place_of(6, tmp_path) == (0, 0, 0)
    for address, text in {"0000:3b:00.0": "1\n", "0000:3c:00.0": "-1\n"}.items():
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(text)
    assert [pci_node(f"0000:{bus}:00.0", tmp_path) for bus in ("3b", "3c", "3d")] == [1, None, None]
    assert gpu_node(torch.device("cpu"), tmp_path) is None


def test_processors_near_a_gpu_are_those_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    for cpu, node in enumerate((0, 0, 1, 1)):
        (tmp_path / f"devices/system/cpu/cpu{cpu}/node{node}").mkdir(parents=True)
    for own, node, expected in (
        ({0, 1, 2, 3}, 1, {2, 3}),
        ({2, 3}, 1, set()),
        ({0, 1}, 1, set()),
        ({0, 2}, None, set()),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, own=own: own, raising=False)
        monkeypatch.setattr(probe, "gpu_node", lambda device, system, node=node: node)
        assert near_cpus(cuda, tmp_path) == expected


class OtherRanks:
    """Rank `rank` of several, which all answer the same, or as `answers` say."""

    def __init__(self, rank: int, answers: dict[int, bytes] | None = None, world_size: int = 2) -> None:
        self.rank, self.world_size = rank, world_size
        self._answers = answers or {}

    def exchange(self, data: bytes, what: str = "") -> list[bytes]:
        return [self._answers.get(rank, data) for rank in range(self.world_size)]


def test_ranks_that_have_the_same_processors_are_bound_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bound: dict[int, list[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 6, 7}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: bound.update({thread: cpus}), raising=False)
    cpu = torch.device("cpu")
    for rank, expected in enumerate(([2, 3], [6, 7])):
        bind_to_share(OtherRanks(rank), cpu, tmp_path)  # type: ignore[arg-type]
        assert bound.pop(os.getpid()) == expected
        assert set(map(tuple, bound.values())) <= {tuple(expected)}, "threads that run already are bound too"
        bound.clear()
    bind_to_share(OtherRanks(0, {1: b'{"host": "other", "cpus": [2, 3, 6, 7], "node": null}'}), cpu, tmp_path)  # type: ignore[arg-type]
    bind_to_share(OtherRanks(0, world_size=5), cpu, tmp_path)  # type: ignore[arg-type]
    bind_to_share(OtherRanks(0, world_size=1), cpu, tmp_path)  # type: ignore[arg-type]
    assert bound == {}, "another host, too few processors, one rank"
