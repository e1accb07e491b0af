"""`tiered-zero swap capacity` against real runs: `du` of their files, and the bytes that their stores count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tiered_zero
from tests.support.inspection.insides import DATA_NAME, PREFIX, SwapStore
from tiered_zero.cli.main import main
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.plan.gpt_shape import GPTConfig

MODEL = GPTConfig(layers=3, hidden=256, vocab=512, context=16)
STEPS = 3


def config_of(param_paths: list[Path], state_paths: list[Path], **own: Any) -> dict[str, Any]:
    names = [",".join(map(str, paths)) for paths in (param_paths, state_paths)]
    return {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": names[0], "max_in_cpu": 200_000},
            "offload_optimizer": {"device": "nvme", "nvme_path": names[1]},
            "stage3_param_persistence_threshold": 300,
            "sub_group_size": 300_000,
        },
        "tiered_zero": {"device": "cpu", **own},
    }


def capacity(path: Path, config: dict[str, Any], *options: str) -> dict[str, Any]:
    path.write_text(json.dumps(config))
    result = CliRunner().invoke(main, ["swap", "capacity", str(path), "--model", str(MODEL), "--json", *options])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


EXTENT_TREE_NBYTES = 64 << 10
"""`du` counts, beside a file's bytes, the blocks in which ext4 notes where they lie."""


def data_nbytes(parent: Path) -> int:
    """Of the data files; lock and manifest are left out. Raises AssertionError where `du` shows something else."""
    statuses = [file.stat() for file in parent.glob(f"{PREFIX}*/{DATA_NAME}")]
    for status in statuses:
        assert 0 <= status.st_blocks * 512 - status.st_size <= EXTENT_TREE_NBYTES
    return sum(status.st_size for status in statuses)


@pytest.mark.parametrize("update", ["barrier", "overlapped", "delayed"])
@pytest.mark.parametrize("split", ["together", "apart", "crossed"])
def test_it_is_what_a_run_takes_and_writes(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str, split: str
) -> None:
    a, b, c = paths = [swap_path / name for name in "abc"]
    for path in paths:
        path.mkdir(mode=0o700)
    param, state = {"together": ([a, b, c], [a, b, c]), "apart": ([a], [b, c]), "crossed": ([a, b], [b, a])}[split]
    config = config_of(param, state, update=update, delay_start_step=0)
    report = capacity(tmp_path / "config.json", config)
    stores: list[SwapStore] = []
    make = SwapStore.__init__
    monkeypatch.setattr(SwapStore, "__init__", lambda self, *a, **k: (stores.append(self), make(self, *a, **k))[1])
    with tiered_zero.initialize(model=build_gpt(MODEL), config=config)[0] as engine:
        rows = {row["path"]: row["nbytes"] for row in report["directories"]}
        assert {str(path): data_nbytes(path) for path in paths if data_nbytes(path)} == rows
        assert report["nbytes"] == engine.plan.nbytes("nvme") == sum(rows.values())
        assert report["drives"][0]["free_nbytes"] > 0 and report["fits"]
        tokens = torch.randint(MODEL.vocab, (2, MODEL.context), generator=torch.Generator().manual_seed(0))

        def step() -> None:
            engine.backward(engine(tokens, tokens))
            engine.step()

        def written() -> int:
            return sum(sum(store.nbytes("write").values()) for store in stores)

        step()
        engine.flush()
        before = written()
        for _ in range(STEPS):
            step()
        engine.flush()
        assert written() - before == STEPS * report["written_nbytes_per_step"]


def test_one_of_model_and_params(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for options in ([], ["--model", "gpt:", "--params", "1e7"]):
        result = CliRunner().invoke(main, ["swap", "capacity", str(tmp_path / "config.json"), *options])
        assert result.exit_code == 2 and "one of --model and --params" in result.stderr


def test_wrong_values_are_usage_errors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for options, message in (
        (["--model", "gpt:depth=2"], "A GPT has no setting 'depth'"),
        (["--params", "3"], "at least 1e6 parameters"),
        (["--model", "gpt:", "--tbw", "0"], "x>0"),
    ):
        result = CliRunner().invoke(main, ["swap", "capacity", str(tmp_path / "config.json"), *options])
        assert result.exit_code == 2 and message in result.stderr


def test_words_and_numbers_of_wear(swap_path: Path, tmp_path: Path) -> None:
    config, options = config_of([swap_path], [swap_path]), ["--tbw", "600", "--step-seconds", "2"]
    (drive,) = capacity(tmp_path / "config.json", config, *options)["drives"]
    written = drive["written_nbytes_per_step"]
    assert drive["steps_to_tbw"] == 600 * 10**12 // written
    assert drive["tb_per_day"] == pytest.approx(written * 43200 / 1e12)
    assert drive["days_to_tbw"] == pytest.approx(drive["steps_to_tbw"] / 43200, rel=1e-6)
    command = ["swap", "capacity", str(tmp_path / "config.json"), "--params", "1e7", *options]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0
    for words in (
        "needed on NVMe",
        "that are free",
        "written per step",
        "rated for (600 TB) is written after",
        "TB per day",
    ):
        assert words in result.stdout


def test_copies_of_commits_wear_the_drive(swap_path: Path, tmp_path: Path) -> None:
    """Halves of masters in host memory: 2 bytes a parameter at each commit, to one of two places."""
    config = config_of([], [swap_path], checkpoint={"in_place": True}, state_format="bf16_remainder")
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    for every in (1, 4):
        report = capacity(tmp_path / "config.json", config, "--save-every", str(every))
        copied = report["written_nbytes_per_commit"]
        assert copied == report["kinds"]["commit_copy"] // 2 >= 2 * report["num_parameters"]
        (drive,) = report["drives"]
        assert 0 <= drive["written_nbytes_per_step"] - report["kinds"]["state"] - copied / every < 4096
        command = ["swap", "capacity", str(tmp_path / "config.json"), "--params", "1e6", "--save-every", str(every)]
        shown = CliRunner().invoke(main, command).stdout
        assert f"per commit (one after {'each step' if every == 1 else 'every 4 steps'})" in shown


def test_directories_of_one_file_system_share_its_space(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (swap_path / "a").mkdir(mode=0o700)
    paths = [swap_path / name for name in "ab"]
    config = config_of([paths[0]], [paths[1]])
    report = capacity(tmp_path / "config.json", config)
    (drive,) = report["drives"]
    assert drive["directories"] == [str(path) for path in paths]
    assert drive["nbytes"] == report["nbytes"] == sum(row["nbytes"] for row in report["directories"])
    assert [row["exists"] for row in report["directories"]] == [True, False]
    full = shutil.disk_usage(swap_path)._replace(free=report["nbytes"] - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    command = ["swap", "capacity", str(tmp_path / "config.json"), "--model", str(MODEL)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1 and f"in {paths[0]}, {paths[1]}; " in result.stderr
    assert "(it does not exist yet)" in result.stdout


def test_nothing_on_nvme_is_said(tmp_path: Path) -> None:
    config = {key: value for key, value in config_of([], []).items() if key != "zero_optimization"}
    report = capacity(tmp_path / "config.json", config, "--tbw", "1", "--step-seconds", "1")
    assert report["fits"] and report["drives"] == [] and report["nbytes"] == report["written_nbytes_per_step"] == 0
    result = CliRunner().invoke(main, ["swap", "capacity", str(tmp_path / "config.json"), "--model", "gpt:"])
    assert result.stdout.endswith("Nothing rests on NVMe under this config.\n")


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", None])
def test_the_bytes_are_those_of_the_plan(swap_path: Path, tmp_path: Path, name: str | None) -> None:
    """Of any optimizer; AdamW where the config names none."""
    config = config_of([swap_path / "a", swap_path / "b"], [swap_path / "b"], checkpoint={"in_place": True})
    config |= {"gradient_accumulation_steps": 2, "train_batch_size": 4}
    config["tiered_zero"] |= {"gradients": "nvme", "activations": {"device": "nvme", "nvme_path": str(swap_path)}}
    config["optimizer"] = {"type": name} if name else None
    report = capacity(tmp_path / "config.json", config)
    assert bool(report["notes"][0].startswith("the config names no optimizer")) == (name is None)
    command = ["plan", str(tmp_path / "config.json"), "--model", str(MODEL), "--optimizer", name or "AdamW", "--json"]
    plan = json.loads(CliRunner().invoke(main, command).stdout)
    rows = {row["kind"]: row["nbytes"] for row in plan["rows"] if row["tier"] == "nvme"}
    assert report["kinds"] == rows and rows.keys() >= {"param", "state", "commit", "gradient", "activation"}
    assert report["nbytes"] == sum(rows.values()) == sum(row["nbytes"] for row in report["directories"])
    assert (report["directories"], report["num_parameters"]) == (plan["directories"], plan["num_parameters"])
