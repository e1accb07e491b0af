"""Directories and drives of `tiered-zero plan` against real runs: `du` of files, and bytes that stores count."""

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


def plan(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    path.write_text(json.dumps(config))
    result = CliRunner().invoke(main, ["plan", str(path), "--model", str(MODEL), "--json"])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def sum_of(rows: list[dict[str, Any]], name: str, **chosen: str) -> int:
    return sum(row[name] for row in rows if chosen.items() <= row.items())


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
    report = plan(tmp_path / "config.json", config)
    stores: list[SwapStore] = []
    make = SwapStore.__init__
    monkeypatch.setattr(SwapStore, "__init__", lambda self, *a, **k: (stores.append(self), make(self, *a, **k))[1])
    with tiered_zero.initialize(model=build_gpt(MODEL), config=config)[0] as engine:
        rows = {row["path"]: row["nbytes"] for row in report["directories"]}
        assert {str(path): data_nbytes(path) for path in paths if data_nbytes(path)} == rows
        assert engine.plan.nbytes("nvme") == sum(rows.values()) == report["drives"][0]["nbytes"]
        assert report["drives"][0]["free_nbytes"] > 0 and report["drives"][0]["fits"]
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
        assert written() - before == STEPS * sum_of(report["directories"], "written_nbytes_per_step")


def test_copies_of_commits_wear_the_drive(swap_path: Path, tmp_path: Path) -> None:
    """Halves of masters in host memory: 2 bytes a parameter at each commit, to one of two places."""
    config = config_of([], [swap_path], checkpoint={"in_place": True}, state_format="bf16_remainder")
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    report = plan(tmp_path / "config.json", config)
    copied, state = (sum_of(report["rows"], "nbytes", tier="nvme", kind=kind) for kind in ("commit_copy", "state"))
    assert copied >= 4 * report["num_parameters"]
    (drive,) = report["drives"]
    assert 0 <= drive["written_nbytes_per_step"] - state - copied // 2 < 4096


def test_directories_of_one_file_system_share_its_space(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (swap_path / "a").mkdir(mode=0o700)
    paths = [swap_path / name for name in "ab"]
    config = config_of([paths[0]], [paths[1]])
    report = plan(tmp_path / "config.json", config)
    (drive,) = report["drives"]
    assert drive["directories"] == [str(path) for path in paths]
    assert drive["nbytes"] == sum_of(report["rows"], "nbytes", tier="nvme") == sum_of(report["directories"], "nbytes")
    assert [row["exists"] for row in report["directories"]] == [True, False]
    full = shutil.disk_usage(swap_path)._replace(free=drive["nbytes"] - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    result = CliRunner().invoke(main, ["plan", str(tmp_path / "config.json"), "--model", str(MODEL)])
    assert result.exit_code == 1 and f"in {paths[0]}, {paths[1]}; " in result.stderr
    assert "(it does not exist yet)" in result.stdout
