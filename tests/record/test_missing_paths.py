"""Swap paths that are missing are made, also by several ranks at the same time."""

import logging
from pathlib import Path

import pytest

from tiered_zero.record import directory
from tiered_zero.record.directory import make_missing


def test_a_directory_that_another_rank_makes_meanwhile_is_taken(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def make_after_another(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        mkdir(self, mode)
        mkdir(self, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", make_after_another)
    make_missing({(str(swap_path / "a" / "b"),): "nvme_path"})
    assert (swap_path / "a" / "b").is_dir()


def test_a_placeholder_on_the_root_file_system_is_said(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A config's path of another machine's disk; not one beside the script, nor below a directory that exists."""
    monkeypatch.chdir(swap_path)
    monkeypatch.setattr(directory, "_ROOT", swap_path)
    caplog.set_level(logging.INFO, "tiered_zero")
    for path, is_said in (("local_nvme", True), ("mnt/disk/swap", True), ("home", True), ("home/swap", False)):
        caplog.clear()
        make_missing({(str(swap_path / path),): "nvme_path"})
        first = swap_path / path.partition("/")[0]
        assert (f"on the root file system, for {first} did not exist" in caplog.text) == is_said
    caplog.clear()
    make_missing({("out/swap",): "nvme_path"})
    assert {record.levelno for record in caplog.records} == {logging.INFO}, "what is as asked is no warning"
    assert "Made the swap directory" in caplog.text and "root file system" not in caplog.text
    caplog.clear()
    monkeypatch.setattr(directory, "_ROOT", Path("/proc"))  # another file system
    make_missing({(str(swap_path / "disk" / "swap"),): "nvme_path"})
    assert "Made the swap directory" in caplog.text and "root file system" not in caplog.text
