"""`tiered-zero train` over a stand-in for the engine that trains in plain PyTorch: words, numbers, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from tests.support.inspection.insides import specify_run
from tiered_zero.cli import training as command
from tiered_zero.cli.console import DEMO_MODEL, DEMO_STEPS
from tiered_zero.cli.main import main
from tiered_zero.config.load import load, read_json
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.errors import EngineFailedError
from tiered_zero.plan.gpt_shape import GPTConfig, num_parameters
from tiered_zero.sizes import format_nbytes
from tiered_zero.telemetry.report import StepReport, build_step_report
from tiered_zero.telemetry.spans import Recorder

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = ["--model", "gpt:layers=1,hidden=32,context=16", "--steps", "6"]


class PlainEngine:
    """What the command needs of an engine. `at_step`: called before each optimizer step with its number."""

    device = torch.device("cpu")
    world_size, global_rank = 1, 0

    def __init__(self, settings: Mapping[str, Any], model: GPTConfig, at_step: Callable[[int], None]) -> None:
        self.settings, self.closed, self.num_forwards = settings, False, 0
        self.module, self._at_step = build_gpt(model, "cpu"), at_step
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self._recorder, self._step, self._began_s = Recorder(), 0, time.perf_counter()
        self.config = load(settings)
        self.plan = specify_run(self.config, build_gpt(model)).plan
        self.step_report: StepReport | None = None

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        self.shape = tokens.shape
        with self._recorder.span("compute", "forward"):
            self._loss = self.module(tokens, targets)
        return self._loss

    def backward(self, loss: torch.Tensor) -> None:
        with self._recorder.span("compute", "backward"):
            loss.backward()

    def step(self) -> None:
        if self.num_forwards % self.config.gradient_accumulation_steps:
            return
        self._at_step(self._step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1
        totals = self._recorder.take_totals()
        facts = {"loss": self._loss.item(), "tokens": self.shape.numel()}
        now_s = time.perf_counter()
        self.step_report = build_step_report(self._step, totals, now_s - self._began_s, **facts)
        self._began_s = now_s

    @property
    def global_steps(self) -> int:
        return self._step

    def flush(self) -> None:
        """Every save is durable at once."""

    def save_checkpoint(self, directory: Path, client_state: Mapping[str, Any]) -> bool:
        (directory / f"global_step{self._step}").mkdir(parents=True)
        return True

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> PlainEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """run(*arguments, at_step=...) -> (result, engine); in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def invoke(
        *arguments: str, at_step: Callable[[int], None] = lambda step: None
    ) -> tuple[Result, PlainEngine | None]:
        engines: list[PlainEngine] = []

        def open_engine(settings: Mapping[str, Any], model: GPTConfig, seed: int) -> PlainEngine:
            torch.manual_seed(seed)
            engines.append(PlainEngine(settings, model, at_step))
            return engines[0]

        monkeypatch.setattr(command, "open_engine", open_engine)
        result = CliRunner().invoke(main, ["train", *arguments])
        return result, engines[0] if engines else None

    return invoke


def write_config(path: Path, **settings: Any) -> str:
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, **settings}))
    return str(path)


@pytest.mark.parametrize("name", ["gpt_device.json", "gpt_cpu.json", "gpt_nvme.json", "gpt_nvme_fp32.json"])
def test_it_trains_and_ends_with_a_table(run, name: str) -> None:  # type: ignore[no-untyped-def]
    result, engine = run(str(CONFIGS / name), *SMALL)
    assert result.exit_code == 0, result.output
    assert engine.closed
    for expected in ("Bytes by tier", "A typical step", "forward", "6 steps in ", "bound by: "):
        assert expected in result.stdout
    assert "parameters, gpt:layers=1,hidden=32" in result.stderr
    assert format_nbytes(engine.plan.nbytes("device")) in result.stdout


def test_json_is_alone_on_stdout_and_the_loss_falls(run) -> None:  # type: ignore[no-untyped-def]
    config = write_config(Path("config.json"))
    result, _ = run(config, "--model", "gpt:layers=1,hidden=64,context=32", "--steps", "40", "--json")
    values = json.loads(result.stdout)
    assert values["steps"] == 40 and not values["interrupted"]
    assert values["model"] == "gpt:layers=1,hidden=64,heads=1,vocab=256,context=32,tied=1"
    assert values["last_loss"] < values["first_loss"] - 1
    assert values["tokens"] == 40 * 2 * 32
    assert sum(values["seconds"].values()) == pytest.approx(values["step_s"])


def test_the_same_seed_gives_the_same_run(run) -> None:  # type: ignore[no-untyped-def]
    config = write_config(Path("config.json"))
    losses = [json.loads(run(config, *SMALL, "--json", "--seed", seed)[0].stdout)["last_loss"] for seed in "556"]
    assert losses[0] == losses[1] != losses[2]


def test_options_lie_over_the_config(run) -> None:  # type: ignore[no-untyped-def]
    config = write_config(Path("config.json"), train_batch_size=4, tiered_zero={"device": "cpu"})
    _, engine = run(config, *SMALL, "--batch", "3", "--context", "8", "--trace", "t.json", "--report", "r.jsonl")
    assert engine.shape == (3, 8)
    assert engine.settings["tiered_zero"] == {"device": "cpu", "trace": "t.json", "report": "r.jsonl"}
    assert "train_batch_size" not in engine.settings


def test_a_step_has_as_many_forwards_as_the_config_says(run) -> None:  # type: ignore[no-untyped-def]
    config = write_config(Path("config.json"), gradient_accumulation_steps=3)
    result, engine = run(config, *SMALL, "--json")
    assert engine.num_forwards == 18
    assert json.loads(result.stdout)["steps"] == 6


def test_another_text_is_read(run) -> None:  # type: ignore[no-untyped-def]
    Path("text").write_text("abc " * 100)
    result, _ = run(write_config(Path("config.json")), *SMALL, "--data", "text")
    assert result.exit_code == 0 and "text: text" in result.stderr
    Path("short").write_text("abc")
    result, engine = run(write_config(Path("config.json")), *SMALL, "--data", "short")
    assert result.exit_code == 1 and "at least 17 bytes" in result.stderr
    assert engine is None, "the text is checked before anything is laid out"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_with_an_error(run, monkeypatch, bad) -> None:  # type: ignore[no-untyped-def]
    forward = PlainEngine.__call__

    def diverge(self, tokens, targets):  # type: ignore[no-untyped-def]
        loss = forward(self, tokens, targets)
        return loss * bad if self.num_forwards == 3 else loss

    monkeypatch.setattr(PlainEngine, "__call__", diverge)
    result, engine = run(write_config(Path("config.json")), *SMALL)
    assert result.exit_code == 1 and engine.closed
    assert f"The loss is {bad} after step 3 of 6: training has diverged" in result.stderr
    assert "3 steps in " in result.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_cleanly(run, number: signal.Signals, code: int) -> None:  # type: ignore[no-untyped-def]
    def at_step(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), number)
            time.sleep(5)

    handler = signal.getsignal(signal.SIGTERM)
    result, engine = run(write_config(Path("config.json")), *SMALL, "--json", at_step=at_step)
    assert result.exit_code == code
    assert engine.closed
    values = json.loads(result.stdout)
    assert values["interrupted"] and values["steps"] == 2
    assert "Stopped after 2 of 6 steps; loss " in result.stderr
    assert signal.getsignal(signal.SIGTERM) is handler


def test_an_error_in_mid_run_closes_the_engine_and_is_one_message(run) -> None:  # type: ignore[no-untyped-def]
    def at_step(step: int) -> None:
        raise EngineFailedError("The update failed; resume from step 0.")

    result, engine = run(write_config(Path("config.json")), *SMALL, "--json", at_step=at_step)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith("Error: The update failed; resume from step 0.\n")
    assert engine.closed


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["absent.json"], 2, "does not exist"),
        (["bad.json"], 1, "Did you mean"),
        (["none.json"], 1, "optimizer: expected one in none.json, to train with; found none"),
        (["good.json", "--steps", "0"], 2, "--steps"),
        (["good.json", "--model", "gpt:vocab=100"], 2, "vocab must be at least 256"),
        (["good.json", "--model", "gpt:hidden=x"], 2, "whole number"),
        (["good.json", "--data", "absent"], 2, "does not exist"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(run, arguments, code: int, message: str) -> None:  # type: ignore[no-untyped-def]
    write_config(Path("good.json"))
    write_config(Path("bad.json"), zero_optimisation={"stage": 3})
    write_config(Path("none.json"), optimizer=None)
    before = sorted(os.listdir())
    result, engine = run(*arguments)
    assert (result.exit_code, engine) == (code, None)
    assert message in result.stderr
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("name", ["gpt_device.json", "gpt_cpu.json", "gpt_nvme.json", "gpt_nvme_fp32.json"])
def test_the_real_engine_trains_and_leaves_nothing_behind(monkeypatch, swap_path: Path, no_leaks, name: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(swap_path)
    result = CliRunner().invoke(main, ["train", str(CONFIGS / name), *SMALL, "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["steps"] == 6 and values["last_loss"] < values["first_loss"]
    assert sum(values["seconds"].values()) == pytest.approx(values["step_s"], rel=0.05)
    for tier, peak in values["peak_nbytes"].items():
        assert peak <= values["planned_nbytes"][tier]
    assert ("disk write" in values["link_nbytes"]) is name.startswith("gpt_nvme")
    assert [path for path in swap_path.rglob("*") if path.is_file()] == []


def test_ctrl_c_in_a_real_run_leaves_nothing_behind(swap_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tiered_zero",
        "train",
        str(CONFIGS / "gpt_nvme.json"),
        *SMALL[:2],
        "--steps",
        "100000",
    ]
    with subprocess.Popen(command, cwd=swap_path, stdout=-1, stderr=-1, text=True) as process:
        while process.poll() is None and not list(swap_path.rglob("*.*")):
            time.sleep(0.05)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err and ("Stopped after" in err or "Interrupted" in err)
    assert [path for path in swap_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", ["gpt_device.json", "gpt_cpu.json", "gpt_nvme.json", "gpt_nvme_fp32.json"])
def test_the_shipped_configs_load_without_a_notice(name: str) -> None:
    config = load(read_json(CONFIGS / name))
    assert config.notices == ()
    assert config.scheduler is not None
    assert config.scheduler.params["total_num_steps"] == DEMO_STEPS, "the demo's schedule ends with the demo"


def test_the_demo_does_not_fit_the_device_budget_of_its_config() -> None:
    """Compute weights, master weights and two moments: 2 + 3 * 4 bytes a parameter."""
    limit = load(read_json(CONFIGS / "gpt_nvme.json")).tiered_zero.device_memory_limit
    assert limit is not None
    assert num_parameters(DEMO_MODEL) * (2 + 3 * 4) > 4 * limit
