"""`tiered-zero swap capacity` against real runs: `du` of their files, and the bytes that their stores count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tiered_zero
from tiered_zero.cli.main import main
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.plan.gpt_shape import GPTConfig
from tiered_zero.store.stripes import DATA_NAME
from tiered_zero.store.swap_dir import PREFIX
from tiered_zero.store.swap_store import SwapStore

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


def test_words(swap_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of([swap_path], [swap_path])))
    options = ["--params", "1e7", "--tbw", "600", "--step-seconds", "2"]
    result = CliRunner().invoke(main, ["swap", "capacity", str(tmp_path / "config.json"), *options])
    assert result.exit_code == 0
    for words in ("needed on NVMe", "fits, ", "written per step", "600 TB written after", "TB per day"):
        assert words in result.stdout
