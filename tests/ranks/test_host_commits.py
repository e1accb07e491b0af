"""In-place commits on two hosts, each with a disk of its own: all go on with equal bits, or say what is to be done."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.run_hosts import Start, answer
from tests.support.forked import call_in_fork

Starter = Callable[..., list[dict[str, Any]]]
"""Starts all ranks, with fields of `Start`, and returns what each came to."""


@pytest.fixture
def start(swap_path: Path) -> Starter:
    def starting(**asked: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = call_in_fork(answer, Start(directory=str(swap_path), **asked))
        return found

    return starting


def replace(path: Path, copy: Path) -> None:
    shutil.rmtree(path)
    copy.rename(path)


def copy_of(path: Path, name: str) -> Path:
    """A disk as it is."""
    copy = path.with_name(name)
    subprocess.run(["cp", "-a", str(path), str(copy)], check=True)
    return copy


def check(found: list[dict[str, Any]], first: int, expected: list[dict[str, Any]]) -> None:
    """Every rank went on from step `first`, and ended with equal bits."""
    assert [(own["status"], own["first"]) for own in found] == [(0, first)] * len(found), found
    assert {(own["last"], own["digest"]) for own in found} == {(own["last"], own["digest"]) for own in expected}
    assert len({own["digest"] for own in expected}) == 1


@pytest.mark.parametrize(
    ("world_size", "stage", "state_format"),
    [
        (2, 3, "fp32"),
        pytest.param(4, 1, "fp32", marks=pytest.mark.thorough),
        pytest.param(4, 3, "bf16_remainder", marks=pytest.mark.thorough),
    ],
)
def test_hosts_go_on_with_equal_bits(start: Starter, world_size: int, stage: int, state_format: str) -> None:
    place = {"world_size": world_size, "stage": stage, "state_format": state_format}
    expected = start(disks=[2, 3], stop=3, saves=False, **place)
    start(disks=[0, 1], stop=2, **place)
    check(start(disks=[0, 1], stop=3, **place), 2, expected)


def test_what_a_host_has_lost_is_said_and_nothing_is_changed(start: Starter, swap_path: Path) -> None:
    """The hosts exchanged, one of them alone, a new disk, a run without in_place; then as it should be."""
    expected = start(disks=[2, 3], stop=3, saves=False)
    start(disks=[0, 1], stop=2)
    part = r"A part of the commit (of step 2 )?rests in .* it is gone, or on another host"
    for disks, in_place, text in (
        ([1, 0], True, "its state rested in .*, which is gone, or on another host"),
        ([0], True, part),
        ([0, 5], True, part),
        ([0, 1], False, part),
    ):
        for own in start(disks=disks, stop=3, in_place=in_place):
            assert own["status"] != 0 and own["error"].startswith("StoreError") and re.search(text, own["error"])
            assert "each on the host that has its part (torchrun --node-rank)" in own["error"]
    check(start(disks=[0, 1], stop=3), 2, expected)


@pytest.mark.parametrize("behind", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_disk_of_an_earlier_commit_is_refused(start: Starter, swap_path: Path, behind: int) -> None:
    start(disks=[0, 1], stop=1)
    disk = swap_path / f"disk{behind}"
    old = copy_of(disk, "old")
    start(disks=[0, 1], stop=2)
    new = copy_of(disk, "new")
    replace(disk, old)
    for own in start(disks=[0, 1], stop=3):
        there, wanted = (2, 1) if behind == 0 else (1, 2)
        assert f"does not hold the state of step {wanted}; it has the steps [{there}]" in own["error"]
        assert "put the directory that is behind back as the commit left it" in own["error"]
    replace(disk, new)
    assert {own["first"] for own in start(disks=[0, 1], stop=3)} == {2}


@pytest.mark.parametrize("in_place", [True, False])
def test_a_save_directory_of_one_host_is_refused(start: Starter, swap_path: Path, in_place: bool) -> None:
    for own in start(disks=[0, 1], stop=1, in_place=in_place, has_one_save_dir=False):
        assert "is not the directory in which rank 0 has begun checkpoint global_step1" in own["error"]
        assert "Name a directory that all hosts share" in own["error"]
    start(disks=[0, 1], stop=1, in_place=in_place)
    (swap_path / "saved").rename(swap_path / "saved1")
    for own in start(disks=[0, 1], stop=2, in_place=in_place, has_one_save_dir=False):
        assert "same tiered_zero.checkpoint.resume, a directory that all hosts share, or null" in own["error"]
