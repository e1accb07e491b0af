"""A run moves from DeepSpeed in mid-training. The archives hold what tools/from_deepspeed.py made of checkpoints that
DeepSpeed 0.19.8 saved on two ranks, and what DeepSpeed had after the next steps. The last test makes the same where
DeepSpeed is installed: `pytest -m clients tests/tools/test_from_deepspeed.py`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR

import tiered_zero
from tests.ranks import torchrun
from tests.support.configs import SMALL_DEVICE, zero_section
from tests.support.trainers import Plain
from tests.tools.from_deepspeed import migrant

FOLDER = Path(__file__).parent / "from_deepspeed"
SCRIPT = Path(__file__).parents[2] / "tools" / "from_deepspeed.py"
FIRST, END = migrant.STEPS_BEFORE, migrant.STEPS_BEFORE + migrant.STEPS_AFTER


@pytest.fixture
def moved(case: str, tmp_path: Path) -> Path:
    with tarfile.open(FOLDER / f"{case}.tar.xz") as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return tmp_path


def make_engine(case: str, swap_path: Path, tier: str, **top: Any) -> tiered_zero.Engine:
    """One process that accumulates what were the batches of two ranks. Its weights begin with other values."""
    model, optimizer = migrant.build()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()
    config = {
        **migrant.config(*migrant.CASES[case]),
        "gradient_accumulation_steps": migrant.NUM_RANKS,
        "zero_optimization": zero_section(tier, tier, swap_path),
        "tiered_zero": {"device": "cpu", **SMALL_DEVICE},
        **top,
    }
    return tiered_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(trainer: Any, first: int, end: int) -> list[list[float]]:
    """Return rank 0's losses, and the learning rate and loss scale after each step."""
    rows = []
    for step in range(first, end):
        losses = []
        for rank in range(migrant.NUM_RANKS):
            loss = trainer(migrant.batch(step, rank))
            trainer.backward(loss)
            trainer.step()
            losses.append(loss.item())
        rows.append([losses[0], trainer.get_lr()[0], getattr(trainer, "loss_scale", 1.0)])
    return rows


@pytest.mark.parametrize("tier", ["none", "nvme"])
@pytest.mark.parametrize("case", ["stage_3_fp32"])
def test_fp32_goes_on_with_the_bits_of_plain_pytorch(case: str, tier: str, moved: Path, swap_path: Path) -> None:
    """From what DeepSpeed had saved. What it had at the end is near: it ran on a processor that may round otherwise."""
    check_fp32(case, moved, swap_path, tier, same_processor=False)


def check_fp32(case: str, moved: Path, swap_path: Path, tier: str, *, same_processor: bool) -> None:
    """Compare with plain PyTorch that goes on from the checkpoint, and with DeepSpeed's end. `same_processor`:
    DeepSpeed ran on this one, so that it has the bits of plain PyTorch that was never stopped."""
    expected, rows = load_file(moved / "end.safetensors"), json.loads((moved / "end.json").read_text())["rows"]
    with make_engine(case, swap_path, tier) as engine:
        _, client_state = engine.load_checkpoint(moved / "tag")
        assert client_state == {"epoch": 3}
        assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (FIRST, FIRST, 0)
        plain = make_plain(0 if same_processor else FIRST, engine)
        train(plain, 0 if same_processor else FIRST, END)
        found = train(engine, FIRST, END)
        for name, value in plain.module.state_dict().items():
            assert torch.equal(engine.module.state_dict()[name], value), name
        for name, value in expected.items():
            torch.testing.assert_close(engine.peek(name), value, rtol=0, atol=0 if same_processor else 1e-6)
    assert [row[1] for row in found] == [row[1] for row in rows]
    near = 0 if same_processor else 1e-6
    assert [row[0] for row in found] == pytest.approx([row[0] for row in rows], rel=near, abs=0)


def make_plain(step: int, engine: tiered_zero.Engine) -> Plain:
    """Plain PyTorch with what the engine has after `step` steps; 0: with its first values."""
    model, optimizer = migrant.build()
    if step:
        rates = [group["lr"] for group in optimizer.param_groups]
        model.load_state_dict(engine.module.state_dict())
        optimizer.load_state_dict(engine.optimizer.state_dict())
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate
    warmup = LambdaLR(optimizer, lambda step: (1 / math.log(8)) * math.log(max(step, 1)), last_epoch=step - 1)
    return Plain(model, lambda _: optimizer, accumulation=migrant.NUM_RANKS, make_scheduler=lambda _: warmup)


@pytest.mark.parametrize("case", ["stage_2_fp16"])
def test_scale_schedule_and_counts_come_in(case: str, moved: Path, swap_path: Path) -> None:
    """Weights differ in their last bits: DeepSpeed adds fp16 gradients of ranks in fp16, and here they are summed in
    fp32. The scale doubles within the steps that follow, as its window began before the move."""
    check_fp16(case, moved, swap_path)


def check_fp16(case: str, moved: Path, swap_path: Path) -> None:
    expected, rows = load_file(moved / "end.safetensors"), json.loads((moved / "end.json").read_text())["rows"]
    with make_engine(case, swap_path, "nvme") as engine:
        engine.load_checkpoint(moved / "tag")
        assert (engine.global_steps, engine.skipped_steps) == (FIRST, 2)
        assert all(value["step"] == FIRST - 2 for value in engine.optimizer.state_dict()["state"].values())
        found = train(engine, FIRST, END)
        assert [row[1:] for row in found] == [row[1:] for row in rows]
        assert rows[-1][2] == 2 * rows[0][2]
        assert [row[0] for row in found] == pytest.approx([row[0] for row in rows], rel=2e-3)
        for name, value in expected.items():
            torch.testing.assert_close(engine.peek(name), value, rtol=0, atol=5e-3)  # half of a step at this rate


@pytest.mark.parametrize("case", ["stage_3_fp32"])
def test_a_load_begins_a_whole_step_with_another_number_of_micro_batches(
    case: str, moved: Path, swap_path: Path
) -> None:
    """Six micro-batches were saved; four make a step now."""
    with make_engine(case, swap_path, "none", gradient_accumulation_steps=4) as engine:
        engine.load_checkpoint(moved / "tag")
        engine.backward(engine(migrant.batch(0, 0)))
        engine.step()
        engine.backward(engine(migrant.batch(0, 1)))
        engine.step()
        assert engine.global_steps == FIRST
        for rank in (2, 3):
            engine.backward(engine(migrant.batch(0, rank)))
            engine.step()
        assert engine.global_steps == FIRST + 1


@pytest.mark.clients
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [*migrant.CASES])
def test_deepspeed_is_converted(case: str, swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save with DeepSpeed, convert, and go on."""
    deepspeed = pytest.importorskip("deepspeed")
    assert deepspeed.__version__ == "0.19.8"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    torchrun.run([str(FOLDER / "train.py"), case, str(tmp_path)], tmp_path)
    saved, universal = tmp_path / "deepspeed" / f"global_step{FIRST}", tmp_path / "universal"
    folders = ["--input_folder", str(saved), "--output_folder", str(universal)]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", *folders]
    subprocess.run(command, check=True)
    subprocess.run([sys.executable, str(SCRIPT), str(universal), str(tmp_path / "tag")], check=True)
    if case.endswith("fp32"):
        check_fp32(case, tmp_path, swap_path, "none", same_processor=True)
    else:
        check_fp16(case, tmp_path, swap_path)
