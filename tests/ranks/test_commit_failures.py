"""In-place commits that fail, or are killed, at any point on any rank: one step on all ranks, and the same bits."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.pool import RankPool
from tests.ranks.saving import Place, build, train, weights_of
from tests.ranks.training import differences
from tests.support.inspection.insides import Commits, SwapStore, TagWriter, swap_store
from tiered_zero.errors import EngineFailedError, RankError, StoreError
from tiered_zero.hardware.ranks.process_groups import ProcessGroups

PLACE = Place(world=2, stage=3, device="nvme")


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def then_kill(act: Callable[..., None]) -> Callable[..., None]:
    def acting(*arguments: Any) -> None:
        act(*arguments)
        kill()

    return acting


class Preempted(Exception):
    """Raised by a signal handler."""


def fail_once_answered(swap_path: str, save_dir: str) -> str:
    """Commit step 1; as step 2 is committed, an error of rank 1 comes out of the exchange in which it has said that it
    is prepared."""
    engine = start(swap_path)
    train(engine, 0, 1)
    engine.save_checkpoint(save_dir)
    train(engine, 1, 2)
    plain, decide, decided = ProcessGroups.exchange, Commits.decide, Path(f"{save_dir}.decided")

    def exchange(groups: ProcessGroups, data: bytes, what: str = "messages", *, kind: str = "") -> list[bytes]:
        answers = plain(groups, data, what, kind=kind)
        if what != "save_checkpoint: the commit":
            return answers
        deadline_s = time.monotonic() + 60
        while not decided.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        raise Preempted

    def deciding(commits: Commits) -> None:
        decide(commits)
        decided.touch()

    with pytest.MonkeyPatch.context() as patch:
        if engine.global_rank == 1:
            patch.setattr(ProcessGroups, "exchange", exchange)
        else:
            patch.setattr(Commits, "decide", deciding)
        with pytest.raises((RankError, Preempted)) as raised:
            engine.save_checkpoint(save_dir)
    engine.close()
    return type(raised.value).__name__


def commit_a_step_twice(swap_path: str, save_dir: str) -> dict[str, Any]:
    """Commit step 1, and step 1 again with other weights; rank 0 is killed once it has decided."""
    engine = start(swap_path)
    train(engine, 0, 1)
    engine.save_checkpoint(save_dir)
    engine.load_state_dict({key: value * 2 for key, value in weights_of(engine).items()})
    weights = weights_of(engine)
    with pytest.MonkeyPatch.context() as patch:
        if engine.global_rank == 0:
            patch.setattr(Commits, "decide", then_kill(Commits.decide))
        with pytest.raises(RankError):
            engine.save_checkpoint(save_dir)
    engine.close()
    return weights


def fail_to_share(swap_path: str, save_dir: str) -> list[str]:
    """What each of two saves raises, where rank 1 cannot write what the first commits."""
    engine = start(swap_path)
    train(engine, 0, 1)
    plain, raised = Commits.share, []

    def share(*_: Any) -> None:
        time.sleep(0.5)  # the driver waits for it by then
        raise StoreError("no share")

    if engine.global_rank == 1:
        Commits.share = share  # type: ignore[method-assign, assignment]
    for _ in range(2):
        try:
            engine.save_checkpoint(save_dir)
            raised.append("")
        except StoreError as error:
            raised.append(str(error))
        Commits.share = plain  # type: ignore[method-assign]
    engine.close()
    return raised


def two_stores(swap_path: str) -> Place:
    """Parameters that are half of their masters, in a store beside that of the state."""
    paths = [f"{swap_path}/{name}" for name in ("states", "params")]
    for path in paths:
        os.makedirs(path, 0o700, exist_ok=True)
    section = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "nvme", "nvme_path": paths[0]},
        "offload_param": {"device": "nvme", "nvme_path": paths[1], "max_in_cpu": 0},
    }
    config = {"bf16": {"enabled": True}, "zero_optimization": section}
    return Place(world=2, stage=3, config=config, runtime={"state_format": "bf16_remainder"})


def interrupt_between_stores(swap_path: str, save_dir: str, failing: int) -> dict[str, Any]:
    """Commit step 1; one rank is interrupted as it confirms its second store of step 2."""
    engine = build(two_stores(swap_path), swap_path, checkpoint={"in_place": True})
    train(engine, 0, 1)
    engine.save_checkpoint(save_dir)
    train(engine, 1, 2)
    weights = weights_of(engine)
    plain, confirmed = SwapStore.confirm, list[SwapStore]()

    def confirm(store: SwapStore) -> None:
        if confirmed and engine.global_rank == failing:
            raise KeyboardInterrupt
        confirmed.append(store)
        plain(store)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwapStore, "confirm", confirm)
        with pytest.raises(KeyboardInterrupt if engine.global_rank == failing else RankError):
            engine.save_checkpoint(save_dir)
    with suppress(EngineFailedError):  # an interrupt ends it
        engine.close()
    assert len(confirmed) == (1 if engine.global_rank == failing else 2)
    return weights


def resume_two_stores(swap_path: str, save_dir: str) -> dict[str, Any]:
    engine = build(two_stores(swap_path), swap_path, checkpoint={"in_place": True, "resume": save_dir})
    found = {"first": engine.global_steps, "weights": weights_of(engine)}
    train(engine, 2, 3)
    engine.save_checkpoint(save_dir)
    engine.close()
    return found


FAULTS: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "cannot prepare": (swap_store, "prepare_file", full_disk),
    "cannot decide": (swap_store, "confirm_file", full_disk),
    "cannot tag": (TagWriter, "publish_prepared", full_disk),
    "killed before it prepares": (Commits, "prepare", kill),
    "killed once prepared": (Commits, "prepare", then_kill(Commits.prepare)),
    "killed before it decides": (Commits, "decide", kill),
    "killed once it has decided": (Commits, "decide", then_kill(Commits.decide)),
    "killed before it follows": (Commits, "confirm", kill),
    "killed once it has followed": (Commits, "confirm", then_kill(Commits.confirm)),
}


def start(swap_path: str, **checkpoint: Any) -> Any:
    return build(PLACE, swap_path, checkpoint={"in_place": True, **checkpoint})


def fail_in_commit(swap_path: str, save_dir: str, fault: str, failing: int, goes_on: bool) -> dict[str, Any]:
    """Commit step 1; a rank fails as step 2 is committed. What is raised."""
    engine = start(swap_path)
    train(engine, 0, 1)
    engine.save_checkpoint(save_dir)
    train(engine, 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        if engine.global_rank == failing:
            patch.setattr(*FAULTS[fault])
        with pytest.raises((StoreError, RankError)) as raised:
            engine.save_checkpoint(save_dir)
    if goes_on:
        train(engine, 2, 3)
        engine.save_checkpoint(save_dir)
    else:
        with pytest.raises((RankError, EngineFailedError, StoreError)):
            train(engine, 2, 3)
    engine.close()
    return {"text": f"{type(raised.value).__name__}: {raised.value}"}


def resume(swap_path: str, save_dir: str, stop: int = 4) -> dict[str, Any]:
    engine = start(swap_path, resume=save_dir)
    first = engine.global_steps
    train(engine, first, stop)
    weights = weights_of(engine)
    engine.save_checkpoint(save_dir)
    engine.close()
    return {"first": first, "weights": weights}


def undisturbed(swap_path: str, stop: int = 4) -> dict[str, Any]:
    engine = build(PLACE, swap_path)
    train(engine, 0, stop)
    weights = weights_of(engine)
    engine.close()
    return weights


@pytest.fixture(scope="module")
def expected(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    path = tmp_path_factory.mktemp("swap")
    path.chmod(0o700)
    return ranks.run(undisturbed, 2, str(path))


def check_resumed(ranks: RankPool, expected: list[Any], swap_path: Path, saved: Path, step: int) -> None:
    for own, found in zip(expected, ranks.run(resume, 2, str(swap_path), str(saved)), strict=True):
        assert found["first"] == step
        assert differences(found["weights"], own) == []


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_training_goes_on_after_one_rank_could_not_prepare(
    ranks: RankPool, expected: list[Any], tmp_path: Path, swap_path: Path, failing: int
) -> None:
    saved = tmp_path / "saved"
    found = ranks.run(fail_in_commit, 2, str(swap_path), str(saved), "cannot prepare", failing, True)
    assert found[failing]["text"].startswith("StoreError: The manifest of step 2 cannot be written")
    assert found[1 - failing]["text"].startswith(f"StoreError: Rank {failing}: The manifest of step 2")
    assert not (saved / "global_step2").exists()
    check_resumed(ranks, expected, swap_path, saved, 3)


@pytest.mark.parametrize(
    ("fault", "text", "goes_on", "step"),
    [
        ("cannot tag", "Step 2 is committed in", True, 3),
        ("cannot decide", "The commit of step 2 failed", False, 1),
    ],
)
def test_a_failure_of_rank_0_is_known_on_all_ranks(
    ranks: RankPool,
    expected: list[Any],
    tmp_path: Path,
    swap_path: Path,
    fault: str,
    text: str,
    goes_on: bool,
    step: int,
) -> None:
    saved = tmp_path / "saved"
    for found in ranks.run(fail_in_commit, 2, str(swap_path), str(saved), fault, 0, goes_on):
        assert text in found["text"]
    check_resumed(ranks, expected, swap_path, saved, step)


@pytest.mark.parametrize(
    ("fault", "failing", "step"),
    [
        pytest.param("killed before it prepares", 1, 1, marks=pytest.mark.thorough),
        ("killed once prepared", 1, 1),
        pytest.param("killed once prepared", 0, 1, marks=pytest.mark.thorough),
        pytest.param("killed before it decides", 0, 1, marks=pytest.mark.thorough),
        ("killed once it has decided", 0, 2),
        ("killed before it follows", 1, 2),
        pytest.param("killed once it has followed", 1, 2, marks=pytest.mark.thorough),
    ],
)
def test_a_rank_killed_in_a_commit_leaves_one_step_on_all(
    ranks: RankPool, expected: list[Any], tmp_path: Path, swap_path: Path, fault: str, failing: int, step: int
) -> None:
    saved = tmp_path / "saved"
    outcomes = ranks.outcomes(fail_in_commit, 2, str(swap_path), str(saved), fault, failing, False)
    other = outcomes[1 - failing]
    assert outcomes[failing].error == "ProcessEnded"
    assert other.error == "" and other.value["text"].startswith("RankError"), other.traceback
    check_resumed(ranks, expected, swap_path, saved, step)


def test_an_error_after_a_rank_has_answered_leaves_what_it_prepared(
    ranks: RankPool, expected: list[Any], tmp_path: Path, swap_path: Path
) -> None:
    saved = tmp_path / "saved"
    assert ranks.run(fail_once_answered, 2, str(swap_path), str(saved)) == ["RankError", "Preempted"]
    check_resumed(ranks, expected, swap_path, saved, 2)


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_an_interrupt_between_two_stores_of_a_rank_leaves_what_was_decided(
    ranks: RankPool, tmp_path: Path, swap_path: Path, failing: int
) -> None:
    saved = tmp_path / "saved"
    expected = ranks.run(interrupt_between_stores, 2, str(swap_path), str(saved), failing)
    for own, found in zip(expected, ranks.run(resume_two_stores, 2, str(swap_path), str(saved)), strict=True):
        assert found["first"] == 2
        assert differences(found["weights"], own) == []


def test_a_share_that_fails_is_raised_once(ranks: RankPool, tmp_path: Path, swap_path: Path) -> None:
    found = ranks.run(fail_to_share, 2, str(swap_path), str(tmp_path / "saved"))
    assert found == [["Rank 1: no share", ""], ["no share", ""]]


def test_ranks_resume_parts_of_one_of_two_commits_of_a_step(ranks: RankPool, tmp_path: Path, swap_path: Path) -> None:
    saved = tmp_path / "saved"
    killed, second = ranks.outcomes(commit_a_step_twice, 2, str(swap_path), str(saved))
    assert killed.error == "ProcessEnded" and second.error == "", second.traceback
    for found in ranks.run(resume, 2, str(swap_path), str(saved), 1):
        assert found["first"] == 1
        assert differences(found["weights"], second.value) == []
