"""`tiered-zero swap` over real runs: one live, one dead with a commit, one dead without."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.fakes.sync_io import SyncEngine
from tests.support.inspection.insides import DATA_NAME, SwapDir, SwapStore
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
    removed = [item["run"]["path"] for item in answer("gc", swap_path, "--committed")["runs"] if item["removed"]]
    assert removed == [str(runs["committed"])]
    assert left() == {"live"}


def test_verify_names_what_is_broken(swap_path: Path, runs: dict[str, Path]) -> None:
    results = answer("verify", swap_path)
    assert results["num_broken"] == 0
    assert sorted(result["nbytes"] for result in results["runs"].values() if result) == [2 * PAGE]
    with open(runs["committed"] / DATA_NAME, "r+b") as file:
        file.seek(PAGE)
        file.write(b"?")
    result = run("verify", swap_path, "--json")
    assert result.exit_code == 1
    (broken,) = (item for one in json.loads(result.stdout)["runs"].values() if one for item in one["broken"])
    assert (broken["record"], broken["offset"], broken["nbytes"]) == ("master/w", 0, 2 * PAGE)
    text = run("verify", swap_path)
    assert text.exit_code == 1 and f"master/w: 8192 bytes at offset 0 of {runs['committed'] / DATA_NAME}" in text.output


def test_verify_says_missing_and_truncated_files(swap_path: Path, runs: dict[str, Path]) -> None:
    data = runs["committed"] / DATA_NAME
    with open(data, "r+b") as file:
        file.truncate(PAGE)
    assert "is cut off at 4096 bytes" in run("verify", swap_path).output
    data.unlink()
    assert "is missing" in run("verify", swap_path).output


def test_verify_of_a_damaged_manifest_is_one_clear_error(swap_path: Path, runs: dict[str, Path]) -> None:
    path = runs["committed"] / "manifest"
    path.write_bytes(path.read_bytes().replace(b"master", b"mASTER"))
    result = run("verify", swap_path)
    assert result.exit_code == 1 and "is damaged" in result.output and "Traceback" not in result.output
    assert run("gc", swap_path).exit_code == 0 and runs["committed"].exists()


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
