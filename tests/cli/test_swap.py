"""`tiered-zero swap` over real runs: one live, one dead with a commit, one dead without."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.fakes.sync_io import SyncEngine
from tests.support.inspection.insides import SwapDir, SwapStore
from tiered_zero.cli.main import main

PAGE = 4096


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["swap", *map(str, arguments)])


def answer(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def runs(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Directories by kind. The dead owners have a pid that no process can have."""
    live = SwapDir.create([swap_path], model="live model [bold]")
    found = {"live": live.paths[0]}
    for kind in ("committed", "scratch"):
        directory = SwapDir.create([swap_path], model="gpt2")
        store = SwapStore(directory, SyncEngine(), capacity_nbytes=1 << 20)
        record = store.reserve("master/w", 2 * PAGE, committed=True)
        store.write(record, memoryview(bytearray(b"w" * 2 * PAGE))).wait()
        if kind == "committed":
            store.commit(12, {})
        directory.keep()
        store.close(remove=False)
        found[kind] = directory.paths[0]
    monkeypatch.undo()
    found["owner"] = live  # type: ignore[assignment]  # keeps the live one alive
    return found


def test_ls_tells_live_from_dead(swap_path: Path, runs: dict[str, Path]) -> None:
    listed = {item["path"]: item for item in answer("ls", swap_path)["runs"]}
    states = {kind: listed[str(runs[kind])]["state"] for kind in ("live", "committed", "scratch")}
    assert states == {"live": "alive", "committed": "dead", "scratch": "dead"}
    committed = listed[str(runs["committed"])]
    assert (committed["step"], committed["model"], committed["resumable"]) == (12, "gpt2", True)
    assert committed["nbytes"] >= 1 << 20
    text = run("ls", swap_path).output
    assert "alive" in text and "dead" in text


def test_du_sums_by_state(swap_path: Path, runs: dict[str, Path]) -> None:
    totals = answer("du", swap_path)
    assert (totals["alive"]["runs"], totals["dead"]["runs"], totals["total"]["runs"]) == (1, 2, 3)
    assert totals["total"]["nbytes"] == totals["alive"]["nbytes"] + totals["dead"]["nbytes"] > 2 << 20
    assert "total" in run("du", swap_path).output


def test_gc_removes_the_dead_and_keeps_what_can_be_resumed(swap_path: Path, runs: dict[str, Path]) -> None:
    def left() -> set[str]:
        return {kind for kind in ("live", "committed", "scratch") if runs[kind].exists()}

    assert answer("gc", swap_path, "--dry-run")["freed_nbytes"] >= 1 << 20
    assert left() == {"live", "committed", "scratch"}
    assert "were freed" in run("gc", swap_path).output
    assert left() == {"live", "committed"}
    (removed,) = [item for item in answer("gc", swap_path, "--committed")["runs"] if item["removed"]]
    assert removed["run"]["path"] == str(runs["committed"])
    assert removed["reason"].endswith("; its commit of step 12 is removed with it")
    assert left() == {"live"}


def test_no_runs_and_no_directory(swap_path: Path) -> None:
    assert run("ls", swap_path).output == "No runs.\n"
    assert answer("gc", swap_path) == {"dry_run": False, "freed_nbytes": 0, "runs": []}
    assert run("ls", swap_path / "missing").exit_code == 2


def test_at_80_columns_nothing_is_squeezed(
    swap_path: Path, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasons stand in whole lines below the table, and no command's help ends in "..."."""
    monkeypatch.setenv("COLUMNS", "80")
    text = run("ls", swap_path).output
    for item in answer("ls", swap_path)["runs"]:
        assert f"{item['run_id']}: {item['reason']}" in text.splitlines()
    assert "..." not in run("--help").output.partition("Commands:")[2]
