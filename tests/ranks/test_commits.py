"""In-place commits of many ranks: each adopts its own part, or any number of ranks reads them all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.ranks.pool import RankPool
from tests.ranks.saving import Place, build, train, warnings_noted, weights_of
from tests.ranks.training import differences
from tests.support.inspection.insides import DATA_NAME, list_runs, list_tags, look_at
from tests.support.tags import equal_bits, load_commit, load_tag
from tiered_zero.cli.main import main
from tiered_zero.errors import CorruptionError

HALVES: dict[str, Any] = {"config": {"bf16": {"enabled": True}}, "runtime": {"state_format": "bf16_remainder"}}
PLACES = {
    "2 ranks, stage 0": Place(world=2, stage=0, device="nvme"),
    "2 ranks, stage 1": Place(world=2, stage=1, device="nvme"),
    "4 ranks, stage 2": Place(world=4, stage=2, device="nvme"),
    "2 ranks, stage 3": Place(world=2, stage=3, device="nvme"),
    "4 ranks, stage 3, halves": Place(world=4, stage=3, device="nvme", **HALVES),
    "2 ranks, stage 3, halves in host memory": Place(world=2, stage=3, device="nvme", params="cpu", **HALVES),
    "2 ranks, stage 3, delayed": Place(
        world=2, stage=3, device="nvme", runtime={"update": "delayed", "delay_start_step": 1}
    ),
}
THOROUGH = ("4 ranks, stage 2", "2 ranks, stage 3")
"""Of stage 2 the commit is that of stage 1, and of stage 3 that of the delayed update, which has more to commit."""


def commit(place: Place, swap_path: str, save_dir: str, steps: int = 2, more: int = 2) -> dict[str, Any]:
    """Train and commit, and go on without."""
    engine = build(place, swap_path, checkpoint={"in_place": True})
    train(engine, 0, 1)
    engine.save_checkpoint(save_dir)
    train(engine, 1, steps)
    engine.save_checkpoint(save_dir, client_state={"of rank": engine.global_rank})
    saved = weights_of(engine)
    losses = train(engine, steps, steps + more)
    found = {"saved": saved, "weights": weights_of(engine), "losses": losses}
    engine.close()
    return found


def go_on(
    place: Place, swap_path: str, load_dir: str, in_place: bool = True, more: int = 2, save_dir: str | None = None
) -> dict[str, Any]:
    """Begin a run at a commit; save the whole of it where asked, and go on."""
    with warnings_noted() as lines:
        engine = build(place, swap_path, checkpoint={"in_place": in_place, "resume": load_dir})
    assert engine.resumed is not None
    loaded, first = weights_of(engine), engine.global_steps
    if save_dir is not None:
        engine.save_checkpoint(save_dir)
    losses = train(engine, first, first + more)
    found = {"loaded": loaded, "first": first, "losses": losses, "weights": weights_of(engine), "lines": lines}
    engine.close()
    return {**found, "client_state": engine.resumed[1]}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.thorough) if case in THOROUGH else case for case in PLACES],
)
def test_the_same_ranks_adopt_their_parts_and_go_on_with_equal_bits(
    ranks: RankPool, tmp_path: Path, swap_path: Path, case: str
) -> None:
    place = PLACES[case]
    undisturbed = ranks.run(commit, place.world, place, str(swap_path), str(tmp_path))
    before = {run.path for run in list_runs(swap_path)}
    assert len(before) == place.world
    resumed = ranks.run(go_on, place.world, place, str(swap_path), str(tmp_path))
    for own, after in zip(undisturbed, resumed, strict=True):
        assert not any("adopted" in line for line in after["lines"])
        assert after["first"] == 2 and after["client_state"] == {"of rank": 0}
        assert differences(after["loaded"], own["saved"]) == []
        assert after["losses"] == own["losses"]
        assert differences(after["weights"], own["weights"]) == []
    assert {run.path for run in list_runs(swap_path)} == before, "nothing was copied"


@pytest.mark.parametrize(
    ("case", "other"),
    [
        ("2 ranks, stage 0", Place(world=4, stage=1, device="nvme")),
        pytest.param("2 ranks, stage 1", Place(world=1, stage=3, device="nvme"), marks=pytest.mark.thorough),
        pytest.param("4 ranks, stage 2", Place(world=2, stage=2, device="nvme"), marks=pytest.mark.thorough),
        ("4 ranks, stage 3, halves", Place(world=2, stage=3, device="nvme", **HALVES)),
        ("2 ranks, stage 3, halves in host memory", Place(world=2, stage=3, device="nvme", **HALVES)),
    ],
)
def test_other_ranks_read_all_parts_and_leave_them(
    ranks: RankPool, tmp_path: Path, swap_path: Path, case: str, other: Place
) -> None:
    place, one, two = PLACES[case], tmp_path / "one", tmp_path / "two"
    saved = ranks.run(commit, place.world, place, str(swap_path), str(one), more=0)
    committed = [load_commit(run.path) for run in list_runs(swap_path)]
    assert len(committed) == place.world and all(equal_bits(each, committed[0]) for each in committed)
    before = {path: path.read_bytes() for path in swap_path.glob("*/*") if path.is_file()}
    loaded = ranks.run(go_on, other.world, other, str(swap_path), str(one), False, more=1, save_dir=str(two))
    assert any("loaded, not adopted" in line for line in loaded[0]["lines"])
    for each in loaded:
        assert differences(each["loaded"], saved[0]["saved"]) == []
    assert {path: path.read_bytes() for path in swap_path.glob("*/*") if path.is_file()} == before
    assert equal_bits(committed[0], load_tag(two / "global_step2"))


def go_back(place: Place, swap_path: str, save_dir: str) -> dict[str, Any]:
    """Load the run's own commit, after a step that is to be undone, and go on."""
    engine = build(place, swap_path, checkpoint={"in_place": True})
    train(engine, 0, 1)
    engine.save_checkpoint(save_dir)
    saved = weights_of(engine)
    train(engine, 1, 2)
    expected = weights_of(engine)
    engine.load_checkpoint(save_dir)
    loaded = weights_of(engine)
    train(engine, 1, 2)
    found = {"saved": saved, "loaded": loaded, "expected": expected, "weights": weights_of(engine)}
    engine.close()
    return found


def test_a_run_goes_back_to_its_own_commit(ranks: RankPool, tmp_path: Path, swap_path: Path) -> None:
    for found in ranks.run(go_back, 2, PLACES["2 ranks, stage 3"], str(swap_path), str(tmp_path)):
        assert differences(found["loaded"], found["saved"]) == []
        assert differences(found["weights"], found["expected"]) == []


def test_damage_of_any_part_is_found(ranks: RankPool, tmp_path: Path, swap_path: Path) -> None:
    ranks.run(commit, 2, PLACES["2 ranks, stage 1"], str(swap_path), str(tmp_path), more=0)
    verify = ["checkpoint", "verify", str(tmp_path)]
    assert CliRunner().invoke(main, verify).exit_code == 0
    for run in list_runs(swap_path):
        data = run.path / DATA_NAME
        whole = data.read_bytes()
        data.write_bytes(bytes(byte ^ 1 for byte in whole))
        broken = CliRunner().invoke(main, [*verify, "--json"])
        assert broken.exit_code == 1 and str(data) in broken.stdout
        with pytest.raises(CorruptionError):
            load_commit(run.path)
        data.write_bytes(whole)
    exported = CliRunner().invoke(main, ["checkpoint", "export", str(tmp_path), str(tmp_path / "out")])
    assert exported.exit_code == 0 and any((tmp_path / "out").glob("*.safetensors"))


def test_a_part_that_is_missing_is_named(ranks: RankPool, tmp_path: Path, swap_path: Path) -> None:
    place = PLACES["2 ranks, stage 1"]
    ranks.run(commit, 2, place, str(swap_path), str(tmp_path), more=0)
    (tag,) = (info for info in list_tags(tmp_path) if info.tag == "global_step2")
    assert tag.complete
    declared = look_at(tag.path)[1]
    assert declared is not None
    swap = declared.swap
    assert swap is not None
    (other,) = (run.path for run in list_runs(swap_path) if str(run.path) not in swap.paths)
    shutil.rmtree(other)
    (tag,) = (info for info in list_tags(tmp_path) if info.tag == "global_step2")
    assert not tag.complete and str(other) in tag.reason
    for in_place in (True, False):
        outcomes = ranks.outcomes(go_on, 2, place, str(swap_path), str(tmp_path), in_place)
        assert [each.error for each in outcomes] == ["StoreError", "StoreError"]
        assert all(f"rests in {other}, which cannot be read here" in each.text for each in outcomes)
