"""Monitors: DeepSpeed's files of a run's numbers, and what is said where one cannot be written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiered_zero
from tests.support.models import rows, two_layers
from tests.support.trainers import tiered
from tiered_zero.errors import ConfigError
from tiered_zero.telemetry.monitors import Monitors, csv_in
from tiered_zero.telemetry.report import StepReport

NAMES = {"train_loss", "lr", "loss_scale", "grad_norm", "step_s", "host_nbytes", "nvme_nbytes", "device_nbytes"}


def train(engine: tiered_zero.Engine, steps: int = 2) -> None:
    with engine:
        for number in range(steps):
            engine.backward(engine(rows(number)).square().mean())
            engine.step()


def read(folder: Path) -> dict[str, list[list[str]]]:
    return {path.name: [line.split(",") for line in path.read_text().splitlines()] for path in folder.iterdir()}


def test_csv_has_a_file_for_each_number(swap_path: Path, tmp_path: Path) -> None:
    """At the samples so far, as DeepSpeed's; a second run adds rows."""
    chosen = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}
    for _ in range(2):
        train(tiered(two_layers(), swap_path, csv_monitor=chosen))
    found = read(tmp_path / "csv" / "job")
    assert set(found) == {f"Train_Samples_{name}.csv" for name in NAMES}
    header, *lines = found["Train_Samples_lr.csv"]
    assert header == ["step", "lr"] and lines == [["1", "0.003"], ["2", "0.003"]] * 2
    assert float(found["Train_Samples_nvme_nbytes.csv"][1][1]) > 0


@pytest.mark.parametrize(("section", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_package_that_is_not_there_costs_one_line(
    section: str, module: str, swap_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    train(tiered(two_layers(), swap_path, **{section: {"enabled": True}}))
    said = [record.message for record in caplog.records if section in record.message]
    assert len(said) == 1 and said[0].startswith(f"{section}: nothing is written, for its package is missing")


def test_wandb_and_tensorboard_get_the_numbers(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[Any] = []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("end"))
    wandb = SimpleNamespace(init=lambda **names: logged.append(names) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    writer = SimpleNamespace(
        add_scalar=lambda name, value, step: logged.append((name, step)), close=lambda: logged.append("closed")
    )
    board = SimpleNamespace(SummaryWriter=lambda log_dir: logged.append(log_dir) or writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    train(
        tiered(
            two_layers(), swap_path, wandb={"enabled": True, "team": "t"},
            tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
        ),
        1,
    )  # fmt: skip
    assert logged[:2] == [str(tmp_path / "job"), {"project": "deepspeed", "group": None, "entity": "t"}]
    assert {next(iter(row[1])) for row in logged if isinstance(row, tuple) and isinstance(row[1], dict)} == {
        f"Train/Samples/{name}" for name in NAMES
    }
    assert ("Train/Samples/train_loss", 1) in logged and logged[-2:] == ["end", "closed"]


def test_a_folder_that_cannot_be_made_is_refused(swap_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="csv_monitor: expected to start"):
        tiered(two_layers(), swap_path, csv_monitor={"enabled": True, "output_path": str(tmp_path / "file")})
    assert not list(swap_path.iterdir())


def test_a_writer_that_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def open_broken(_: ExitStack) -> Callable[[str, float, int], object]:
        def write(*_: Any) -> None:
            raise OSError("no room")

        return write

    monitors = Monitors({"wandb": open_broken, "csv_monitor": csv_in(tmp_path)}, [], 4)
    for step in (1, 2):
        monitors(StepReport(step=step, wall_s=0.5, seconds={}))
    monitors.close()
    assert read(tmp_path)["Train_Samples_step_s.csv"] == [["step", "step_s"], ["4", "0.5"], ["8", "0.5"]]
    assert [record.message for record in caplog.records] == [
        "wandb: it ends here, and training goes on: OSError: no room"
    ]


def test_wall_clock_breakdown_adds_a_line(swap_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiered(two_layers(), swap_path, wall_clock_breakdown=True), 10)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 10: loss")
    assert second.startswith("step 10: ") and "forward 0." in second and "bound by" in second and "nvme" in second
