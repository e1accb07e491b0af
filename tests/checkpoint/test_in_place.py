"""In-place commits: a run that is adopted continues with the same bits, and one that is read stays as it is."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint import load as dcp_load

import tiered_zero
from tests.fakes.sync_io import SyncEngine
from tests.support.configs import SMALL_DEVICE
from tests.support.forked import run_forked
from tests.support.inspection.insides import (
    DATA_NAME,
    RunInfo,
    SwapStore,
    collect_garbage,
    list_runs,
    swap_dir,
    swap_store,
)
from tests.support.models import LENGTH, VOCAB, ParityGPT, two_layers
from tests.support.tags import save_tag
from tests.support.trainers import tiered
from tiered_zero.checkpoint.dcp import DcpReader
from tiered_zero.checkpoint.tag import find_damage, list_tags
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.cli.main import main
from tiered_zero.errors import CorruptionError, EngineFailedError, StoreError, TieredZeroError

Settings = dict[str, Any]


def config(swap_path: Path, checkpoint: Settings, *, params: Settings | None = None, **settings: Any) -> Settings:
    """`params`: the section offload_param; by default everything rests on nvme. `sub_group_size`, `dtype`, `states`
    (swap path of the state), `max_in_cpu` and keys of tiered_zero besides."""
    nvme = {"device": "nvme", "nvme_path": str(swap_path)}
    dtype, size = settings.pop("dtype", "bf16"), settings.pop("sub_group_size", 5000)
    states, in_memory = settings.pop("states", swap_path), settings.pop("max_in_cpu", 0)
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": settings.pop("accumulation", 1),
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        "optimizer": settings.pop("optimizer", {"type": "AdamW", "params": {"lr": 3e-3}}),
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 3e-3}},
        "zero_optimization": {
            "stage": 3 if params != {"device": "none"} else 2,
            "offload_param": {**nvme, "max_in_cpu": in_memory} if params is None else params,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(states)},
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": size,
        },
        "tiered_zero": {**SMALL_DEVICE, "device": "cpu", "checkpoint": checkpoint, **settings},
    }


def start(settings: Settings, seed: int = 0) -> tiered_zero.Engine:
    torch.manual_seed(seed)
    return tiered_zero.initialize(model=ParityGPT(), config=settings)[0]


def train(engine: tiered_zero.Engine, num_steps: int, save_dir: Path | None = None) -> None:
    """Batches come from torch's generator, which is a part of the checkpoint."""
    for _ in range(num_steps):
        for _ in range(engine.config.gradient_accumulation_steps):
            tokens = torch.randint(VOCAB, (2, LENGTH))
            engine.backward(engine(tokens, tokens, detour=engine.global_steps % 3 == 0))
            engine.step()
        if save_dir is not None:
            engine.save_checkpoint(save_dir, client_state={"at": engine.global_steps})


def held_by(engine: tiered_zero.Engine) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state."""
    found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for index, state in engine.optimizer.state_dict()["state"].items():
        found |= {f"{index}/{name}": torch.as_tensor(value).clone() for name, value in state.items()}
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


CASES: dict[str, Settings] = {
    "overlapped": {},
    "in backward": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "dtype": "fp32"},
    "delayed": {"update": "delayed", "delay_start_step": 1},
    "remainder": {"state_format": "bf16_remainder"},
    "second home": {"state_format": "bf16_remainder", "update": "delayed", "delay_start_step": 1},
    "delayed remainder, parameters in host memory": {
        **{"state_format": "bf16_remainder", "params": {"device": "cpu"}},
        **{"update": "delayed", "delay_start_step": 1},
    },
    "remainder, parameters on two tiers": {"state_format": "bf16_remainder", "max_in_cpu": 2000},
    "8 bit": {"state_format": "lossy_8bit_moments"},
    "fp16, accumulated": {"dtype": "fp16", "accumulation": 2},
    "parameters on the device": {"params": {"device": "none"}, "update": "barrier"},
    "late copies": {"debug_delay_seed": 1, "debug_poison": True},
    "whole parameters": {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "fused": True}}, "dtype": "fp32"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("no_leaks")
def test_a_run_that_ended_goes_on_in_its_directory_with_the_same_bits(
    swap_path: Path, tmp_path: Path, case: str
) -> None:
    with start(config(swap_path, {"in_place": True}, **dict(CASES[case]))) as engine:
        train(engine, 4, tmp_path / "undisturbed")
        expected = held_by(engine)
    for item in collect_garbage(swap_path, committed=True, unknown=True):
        assert item.removed
    saved, in_second_home = tmp_path / "saved", case.startswith("second home")
    first = 2 if in_second_home else 3
    with start(config(swap_path, {"in_place": True}, **dict(CASES[case]))) as engine:
        train(engine, first, saved)
    (before,) = list_runs(swap_path)
    assert (before.state, before.step, before.resumable) == ("dead", first, True)  # its process has let go
    resume = {"in_place": True, "resume": str(saved)}
    with start(config(swap_path, resume, **dict(CASES[case])), seed=7) as engine:
        assert engine.global_steps == first
        assert engine.resumed is not None and engine.resumed[1] == {"at": first}
        (now,) = (run for run in list_runs(swap_path) if run.state == "alive")
        assert (now.path == before.path) is not in_second_home
        train(engine, 4 - first, saved)
        assert_equal(held_by(engine), expected)
        assert (now.path / DATA_NAME).stat().st_size == engine.plan.nbytes("nvme"), "nothing took more than planned"


def test_the_run_that_is_gone_on_with_is_no_leftover(
    swap_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told to remove the files that the run takes over."""

    def as_if_ended(parent: Path) -> list[RunInfo]:
        return [replace(run, state="dead") for run in list_runs(parent)]

    monkeypatch.setattr(swap_dir, "list_runs", as_if_ended)
    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 1, tmp_path / "saved")
    with caplog.at_level(logging.WARNING):
        start(config(swap_path, {"in_place": True, "resume": str(tmp_path / "saved")})).close()
        assert "swap gc" not in caplog.text
        start(config(swap_path, {"in_place": True})).close()
        assert "the 1 that can be resumed only with --committed" in caplog.text


def test_a_copy_of_the_directory_is_refused(swap_path: Path, tmp_path: Path) -> None:
    """Its commit names the original, which the run would change."""
    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 1, tmp_path / "saved")
    (run,) = list_runs(swap_path)
    copied = shutil.copytree(run.path, tmp_path / run.path.name)
    with pytest.raises(StoreError, match="copied or moved"):
        start(config(swap_path, {"in_place": True, "resume": str(copied)}))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("params", [None, {"device": "cpu"}], ids=["nvme", "host"])
@pytest.mark.parametrize("state_format", ["fp32", "bf16_remainder"])
def test_a_commit_is_read_by_plain_distributed_checkpoint(
    swap_path: Path, tmp_path: Path, state_format: str, params: Settings | None
) -> None:
    with start(config(swap_path, {"in_place": True}, params=params, state_format=state_format)) as engine:
        train(engine, 2, tmp_path)
        engine.flush()
        named = dict(engine.module.named_parameters())
        (run,) = (run for run in list_runs(swap_path) if run.state == "alive")
        with DcpReader(run.path) as reader:  # of this process
            entries = reader.reader.manifest.tensors
            values = {
                key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for key, entry in entries.items()
            }
            dcp_load(values, storage_reader=reader, no_dist=True)
        for name, param in named.items():
            key = f"master/{name}" if param.requires_grad else f"param/{name}"
            with tiered_zero.gathered(param):
                assert torch.equal(values[key].to(param.dtype), param.detach())
            if f"exp_avg/{name}" in values:
                own = engine.optimizer.read_state(param)
                assert torch.equal(values[f"exp_avg/{name}"], own["exp_avg"])
                assert torch.equal(values[f"exp_avg_sq/{name}"], own["exp_avg_sq"])
        assert sum(key.startswith("exp_avg/") for key in values) > 10
        assert torch.equal(values["buffer/offset"], engine.module.offset)


OTHER: dict[str, Settings] = {
    "another cut": {"sub_group_size": 9000},
    "another format": {"state_format": "bf16_remainder"},
    "parameters in host memory": {"params": {"device": "cpu"}},
}


@pytest.mark.parametrize("case", OTHER)
@pytest.mark.parametrize("in_place", [True, False])
def test_another_layout_reads_the_old_store_and_leaves_it(
    swap_path: Path, tmp_path: Path, case: str, in_place: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 3, tmp_path)
        engine.flush()
        saved = held_by(engine)
    (before,) = list_runs(swap_path)
    files = {path.name: path.read_bytes() for path in before.path.iterdir()}
    resume = {"in_place": in_place, "resume": str(before.path)}
    with caplog.at_level(logging.WARNING), start(config(swap_path, resume, **dict(OTHER[case])), seed=7) as engine:
        assert "loaded, not adopted" in caplog.text
        assert_equal(held_by(engine), saved)
        train(engine, 1)
    assert {path.name: path.read_bytes() for path in before.path.iterdir()} == files


def test_two_commits_of_one_step_are_two(swap_path: Path, tmp_path: Path) -> None:
    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 1)
        for tag in ("a", "b"):
            engine.save_checkpoint(tmp_path, tag=tag, client_state={"of": tag})
        with pytest.raises(StoreError, match=r"it was superseded: .* has committed step 1 again in place since"):
            engine.load_checkpoint(tmp_path, tag="a")
        assert engine.load_checkpoint(tmp_path, tag="b")[1] == {"of": "b"}
    first, second = list_tags(tmp_path)
    assert first.is_superseded and second.complete


def test_weights_that_were_loaded_beside_their_state_are_committed_with_checksums(
    swap_path: Path, tmp_path: Path
) -> None:
    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 1, tmp_path)
        engine.load_state_dict(
            {
                key: value * 2 if value.is_floating_point() else value
                for key, value in engine.module.state_dict().items()
            }
        )
        engine.save_checkpoint(tmp_path, tag="loaded")
        saved = held_by(engine)
        train(engine, 1)
        engine.load_checkpoint(tmp_path, tag="loaded")
        assert_equal(held_by(engine), saved)


@pytest.mark.parametrize("state_format", ["fp32", "bf16_remainder"])
def test_training_goes_on_after_an_error_between_prepare_and_confirm(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_format: str
) -> None:
    def fail(_: SwapStore) -> None:
        raise MemoryError

    with start(config(swap_path, {"in_place": True}, update="barrier", state_format=state_format)) as engine:
        train(engine, 1, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(SwapStore, "confirm", fail)
            with pytest.raises(MemoryError):
                engine.save_checkpoint(tmp_path)
        train(engine, 1, tmp_path)
        saved = held_by(engine)
    with start(config(swap_path, {"in_place": True, "resume": str(tmp_path)}, state_format=state_format)) as engine:
        assert engine.global_steps == 2
        assert_equal(held_by(engine), saved)


def test_an_interrupt_between_the_confirmations_of_two_stores_leaves_the_commit(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends, and the next one begins at what was decided."""
    plain = SwapStore.confirm
    confirmed: list[SwapStore] = []

    def confirm(store: SwapStore) -> None:
        if confirmed:
            raise KeyboardInterrupt
        confirmed.append(store)
        plain(store)

    (states := swap_path / "states").mkdir(mode=0o700)
    own: Settings = {"update": "barrier", "state_format": "bf16_remainder", "states": states}
    with start(config(swap_path, {"in_place": True}, **dict(own))) as engine:
        train(engine, 1, tmp_path)
        train(engine, 1)
        saved = held_by(engine)
        with monkeypatch.context() as patch:
            patch.setattr(SwapStore, "confirm", confirm)
            with pytest.raises(KeyboardInterrupt):
                engine.save_checkpoint(tmp_path)
        assert len(confirmed) == 1
        with pytest.raises((StoreError, EngineFailedError)):
            train(engine, 1, tmp_path)
    with start(config(swap_path, {"in_place": True, "resume": str(tmp_path)}, **dict(own))) as engine:
        assert engine.global_steps == 2
        assert_equal(held_by(engine), saved)


def test_one_step_is_held_and_older_tags_say_so(
    swap_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 2, tmp_path)
    with start(config(tmp_path, {}, params={"device": "cpu"}, states=swap_path)) as engine:
        with pytest.raises(StoreError, match="superseded"):
            engine.load_checkpoint(tmp_path, tag="global_step1")
        assert engine.load_checkpoint(tmp_path)[1] == {"at": 2}
        assert engine.global_steps == 2
    (tmp_path / "latest").write_text("global_step1")  # killed between the commit and the tag
    resume = {"resume": str(tmp_path)}
    with caplog.at_level(logging.WARNING), start(config(swap_path, resume, params={"device": "cpu"})) as engine:
        assert "has committed step 2 in place since" in caplog.text
        assert engine.global_steps == 2


def test_a_tag_that_was_lost_with_its_name_leads_to_an_older_one(swap_path: Path, tmp_path: Path) -> None:
    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 2, tmp_path)
    (tmp_path / "global_step2").rename(tmp_path / ".lost")
    with start(config(swap_path, {"in_place": True, "resume": str(tmp_path)})) as engine:
        assert engine.global_steps == 2


@pytest.mark.parametrize("failing", ["prepare_file", "confirm_file"])
def test_a_commit_that_fails_leaves_the_last_one_and_says_whether_training_goes_on(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 1, tmp_path)
        engine.flush()
        with monkeypatch.context() as patched:
            patched.setattr(swap_store, failing, fail)
            with pytest.raises(StoreError, match="No space left"):  # at the latest of the two
                engine.save_checkpoint(tmp_path, tag="full")
        assert not (tmp_path / "full").exists()
        if failing == "prepare_file":  # nothing had changed: it can be tried again
            train(engine, 1, tmp_path)
        else:
            with pytest.raises(TieredZeroError, match="cannot be trusted any more"):
                train(engine, 1, tmp_path)
                engine.flush()
    with start(config(swap_path, {"in_place": True, "resume": str(tmp_path)})) as engine:
        assert engine.global_steps == (2 if failing == "prepare_file" else 1)


@pytest.mark.parametrize("update", ["overlapped", "barrier"])
@pytest.mark.parametrize("failing", ["prepare", "publish_prepared"])
def test_a_commit_without_its_tag_is_named_and_resumed_from(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, update: str
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with start(config(swap_path, {"in_place": True}, update=update)) as engine:
        train(engine, 1, tmp_path)
        engine.flush()
        train(engine, 1)
        engine.flush()
        (run,) = list_runs(swap_path)
        with monkeypatch.context() as patched:
            patched.setattr(TagWriter, failing, fail)
            with pytest.raises(StoreError, match=r"Step 2 is committed in .* No space left") as caught:
                engine.save_checkpoint(tmp_path)
        assert str(run.path) in str(caught.value) and "untouched" not in str(caught.value)
        assert not (tmp_path / "global_step2").exists()
    for source in (tmp_path, run.path):
        with start(config(swap_path, {"in_place": True, "resume": str(source)})) as engine:
            assert engine.global_steps == 2


@pytest.mark.parametrize("named", [0, 1])
def test_a_commit_is_resumed_by_any_of_its_directories(swap_path: Path, tmp_path: Path, named: int) -> None:
    paths = [swap_path / "first", swap_path / "second"]
    for path in paths:
        path.mkdir(mode=0o700)

    def settings(**checkpoint: Any) -> Settings:
        own = config(swap_path, {"in_place": True, **checkpoint})
        for kind in ("offload_param", "offload_optimizer"):
            own["zero_optimization"][kind]["nvme_path"] = list(map(str, paths))
        return own

    with start(settings()) as engine:
        train(engine, 1, tmp_path)
    (run,) = list_runs(paths[named])
    with start(settings(resume=str(run.path))) as engine:
        assert engine.global_steps == 1


def test_an_engine_goes_back_to_its_own_commit(swap_path: Path, tmp_path: Path) -> None:
    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 2, tmp_path)
        engine.flush()
        saved = held_by(engine)
        train(engine, 1)
        expected = held_by(engine)
        engine.load_checkpoint(tmp_path)
        assert_equal(held_by(engine), saved)
        train(engine, 1)
        assert_equal(held_by(engine), expected)
        (run,) = list_runs(swap_path)
        assert (run.path / DATA_NAME).stat().st_size == engine.plan.nbytes("nvme"), "frozen values are the same"


def test_a_live_run_is_not_taken(swap_path: Path, tmp_path: Path) -> None:
    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 1, tmp_path)
        engine.flush()
        with pytest.raises(StoreError, match="belongs to a live run"):
            start(config(swap_path, {"in_place": True, "resume": str(tmp_path)}))
        child = "import sys; from tiered_zero.checkpoint.tag import open_commit; open_commit(sys.argv[1])"
        (run,) = list_runs(swap_path)
        done = run_forked("-c", child, run.path)
        assert "belongs to a live run" in done.stderr
        train(engine, 1, tmp_path)


def test_a_live_run_is_not_verified(swap_path: Path, tmp_path: Path) -> None:
    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 1, tmp_path)
        engine.flush()
        (run,) = list_runs(swap_path)
        for directory in (tmp_path, run.path):
            done = run_forked("-m", "tiered_zero", "checkpoint", "verify", directory)
            assert done.returncode == 1 and "whole" not in done.stdout
            assert "not verified" in done.stdout and "belongs to a live run" in done.stdout
            assert "stop that run first" in done.stdout
    parent = CliRunner().invoke(main, ["checkpoint", "verify", str(swap_path)])
    assert f"No checkpoints. It holds swap directories ({run.path.name}): name one of them." in parent.output
    with pytest.raises(StoreError, match=r"holds no checkpoint\. It holds swap directories .*: name one of them"):
        start(config(swap_path, {"resume": str(swap_path)}))
    for directory in (tmp_path, run.path):
        assert find_damage(tmp_path / "global_step1" if directory == tmp_path else directory) == []
    data = run.path / DATA_NAME
    os.truncate(data, data.stat().st_size - 4096)
    for directory in (tmp_path, run.path):
        result = CliRunner().invoke(main, ["checkpoint", "verify", str(directory)])
        assert result.exit_code == 1 and "broken" in result.output and "is cut off at" in result.output


def test_the_latest_commit_is_lost_with_its_swap_directory(swap_path: Path, tmp_path: Path) -> None:
    save_tag(tmp_path, "full", {"x": torch.ones(4)}, 0, SyncEngine())
    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 1, tmp_path)
    (run,) = list_runs(swap_path)
    shutil.rmtree(run.path)
    result = CliRunner().invoke(main, ["checkpoint", "verify", str(tmp_path)])
    assert result.exit_code == 1 and "lost" in result.output and "whole" in result.output
    shutil.rmtree(tmp_path / "full")
    assert "None of them is whole." in CliRunner().invoke(main, ["checkpoint", "verify", str(tmp_path)]).output


def test_a_damaged_commit_is_refused_before_it_is_used(swap_path: Path, tmp_path: Path) -> None:
    with start(config(swap_path, {"in_place": True})) as engine:
        train(engine, 1, tmp_path)
    (run,) = list_runs(swap_path)
    data = run.path / DATA_NAME
    with data.open("r+b") as file:
        for offset in range(0, data.stat().st_size, 4096):
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptionError, match=r"`tiered-zero checkpoint verify .*` finds it whole; else name another"):
        start(config(swap_path, {"in_place": True, "resume": str(tmp_path)}))
    with pytest.raises(CorruptionError), start(config(swap_path, {}, params={"device": "cpu"})) as engine:
        engine.load_checkpoint(tmp_path)


def test_the_plan_has_what_commits_take(swap_path: Path) -> None:
    with start(config(swap_path, {"in_place": True}, params={"device": "cpu"})) as engine:
        planned = {row.kind: row.nbytes for row in engine.plan.rows if row.tier == "nvme"}
        measured = {kind: row["now"] for kind, row in engine.memory_report()["nvme"].items()}
        assert planned == measured
        assert planned["commit"] == planned["state"] and planned["commit_copy"] > 0
        sizes = [path.stat().st_size for path in swap_path.glob(f"*/{DATA_NAME}")]
        assert sum(sizes) == engine.plan.nbytes("nvme") == sum(planned.values())


def test_two_stores_are_committed_by_one_decision(swap_path: Path, tmp_path: Path) -> None:
    states = swap_path / "states"
    states.mkdir(mode=0o700)
    params = swap_path / "params"
    params.mkdir(mode=0o700)
    own: Settings = {"states": states, "state_format": "bf16_remainder"}
    with start(config(params, {"in_place": True}, **dict(own))) as engine:
        train(engine, 6)
        expected = held_by(engine)
    with start(config(params, {"in_place": True}, **dict(own))) as engine:
        train(engine, 3, tmp_path)
    resume = {"in_place": True, "resume": str(tmp_path)}
    (of_states,), (of_params,) = list_runs(states), list_runs(params)
    # killed between the two: the parameters' store has prepared what the state's has decided
    os.rename(of_params.path / "manifest", of_params.path / "manifest.next")
    with start(config(params, resume, **dict(own)), seed=7) as engine:
        assert {run.path for run in (*list_runs(states), *list_runs(params))} == {of_states.path, of_params.path}
        train(engine, 3, tmp_path)
        assert_equal(held_by(engine), expected)


class Normed(nn.Module):
    """Statistics that change in each step, and a frozen layer that is unfrozen by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
        )
        self.layers[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_buffers_and_frozen_weights_changed_by_hand_are_committed(swap_path: Path, tmp_path: Path) -> None:
    def begin(checkpoint: Settings, seed: int) -> tiered_zero.Engine:
        torch.manual_seed(seed)
        return tiered_zero.initialize(model=Normed(), config=config(swap_path, checkpoint, dtype="fp32"))[0]

    def go_on(engine: tiered_zero.Engine, num_steps: int, save_dir: Path | None = None) -> None:
        for _ in range(num_steps):
            engine.backward(engine(torch.randn(4, 8)))
            engine.step()
            if engine.global_steps == 2:
                with tiered_zero.gathered(engine.module.layers[2].weight, modify=True), torch.no_grad():
                    engine.module.layers[2].weight.mul_(2)
            if save_dir is not None:
                engine.save_checkpoint(save_dir)

    with begin({"in_place": True}, 0) as engine:
        go_on(engine, 5)
        expected = held_by(engine)
    with begin({"in_place": True}, 0) as engine:
        go_on(engine, 3, tmp_path)
    with begin({"in_place": True, "resume": str(tmp_path)}, 7) as engine:
        go_on(engine, 2, tmp_path)
        assert_equal(held_by(engine), expected)


def test_masters_of_an_adopted_commit_are_verified(swap_path: Path, tmp_path: Path) -> None:
    """Parameters on the device begin with a part of each record."""
    runtime = {"checkpoint": {"in_place": True}}
    with tiered(two_layers(), swap_path, ("none", "nvme"), runtime=runtime) as engine:
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        engine.save_checkpoint(str(tmp_path / "saved"))
    (data,) = swap_path.glob("*/data.bin")
    changed = bytearray(data.read_bytes())
    changed[100::4096] = bytes(byte ^ 1 for byte in changed[100::4096])
    data.write_bytes(changed)
    resumed = {"checkpoint": {"in_place": True, "resume": str(tmp_path / "saved")}}
    with pytest.raises(CorruptionError, match="are not those written"):
        tiered(two_layers(), swap_path, ("none", "nvme"), runtime=resumed)
