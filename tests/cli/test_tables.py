"""The table at the end of a run has every number of its report."""

from __future__ import annotations

import contextlib
import io

from tiered_zero.cli.training import print_report
from tiered_zero.telemetry.report import RunTotals, StepReport


def show(totals: RunTotals) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        print_report(totals.report(), 757_000_000)
    return shown.getvalue()


def test_every_number_is_there() -> None:
    totals = RunTotals({"nvme": 1 << 30, "device": 1 << 20})
    for step in range(1, 5):
        totals.add(
            StepReport(
                step=step,
                start_s=22.0 if step == 1 else 0.0,
                wall_s=2.0,
                seconds={"forward": 0.5, "wait_state": 1.2, "other": 0.3},
                loss=6.0 - step,
                tokens=1000,
                skipped=step == 2,
                link_nbytes={"disk read": 1 << 20},
                busy_s={"compute": 0.8, "disk read": 1.0},
                peak_nbytes={"device": 1 << 19, "nvme": 1 << 30},
            )
        )
    text = show(totals)
    rows = [row.strip("│").replace("│", " ").split() for row in text.splitlines() if "│" in row]
    assert ["device", "1.0", "MiB", "512.0", "KiB"] in rows
    assert ["nvme", "1.0", "GiB", "1.0", "GiB"] in rows
    assert ["wait_state", "1.200", "60%"] in rows
    assert ["wall", "time", "2.000"] in rows
    assert ["disk", "read", "4.0", "MiB", "1.0", "MiB/s", "50%"] in rows
    assert ["compute", "-", "-", "40%"] in rows
    assert "start: 22.0 s, values of 757,000,000 parameters" in text
    assert "4 steps (1 skipped) in 8.0 s, 500 tokens/s, loss 5.000 -> 2.000" in text
    assert "bound by: disk read (50% busy); overlap 0%" in text


def test_one_step_is_one_and_an_idle_lane_binds_nothing() -> None:
    totals = RunTotals()
    totals.add(StepReport(step=1, wall_s=1.0, seconds={"forward": 0.2, "other": 0.8}, busy_s={"compute": 0.17}))
    text = show(totals)
    assert "1 step in 1.0 s" in text and "bound by: no resource (compute is busiest, 17%); " in text


def test_a_run_without_steps_has_a_table() -> None:
    assert "0 steps in 0.0 s" in show(RunTotals())
