"""Swap paths that are missing are made, also by several ranks at the same time."""

from pathlib import Path

import pytest

from tiered_zero.store.new_parents import make_missing


def test_a_directory_that_another_rank_makes_meanwhile_is_taken(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def make_after_another(self: Path, mode: int = 0o777) -> None:
        mkdir(self, mode)
        mkdir(self, mode)

    monkeypatch.setattr(Path, "mkdir", make_after_another)
    with make_missing([(str(swap_path / "a" / "b"),)]):
        assert (swap_path / "a" / "b").is_dir()
    with pytest.raises(ZeroDivisionError), make_missing([(str(swap_path / "c"),)]):
        raise ZeroDivisionError
    assert (swap_path / "c").is_dir(), "the other rank's is left to it"


def test_what_was_made_goes_where_the_run_fails(swap_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), make_missing([(str(swap_path / "a" / "b"),)]):
        raise ZeroDivisionError
    assert not (swap_path / "a").exists()
