"""The page stands alone, shows what was recorded, and says what was not."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from tests.support.models import ParityGPT, batch
from tests.support.trainers import tiered, train
from tiered_zero.sizes import TIERS
from tiered_zero.telemetry.page import COLOURS, STYLE, render_page, style_of
from tiered_zero.telemetry.report import CAUSES, StepReport
from tiered_zero.telemetry.runlog import RunHeader, RunRecord, read_run

MIB = 1 << 20
VOID = {"meta", "br"}


class Outline(HTMLParser):
    """Checks that tags close in order; gathers text, tags and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: set[str] = set()
        self.words = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def make_run(num_steps: int = 3) -> RunRecord:
    header = RunHeader(
        model="gpt <b>",
        num_parameters=1000,
        planned_nbytes={"device": {"parameters": 2 * MIB}, "nvme": {"state": 6 * MIB}},
        meanings={"device": {"parameters": "paged parameters"}},
        facts={"engine": "&"},
        config={"bf16.enabled": "true", "tiered_zero.report": '"<run>"'},
    )
    steps = [
        StepReport(
            step=step,
            wall_s=0.5,
            seconds={"forward": 0.3, "wait_param": 0.1, "other": 0.1},
            loss=5.0 / step,
            tokens=100,
            lr=step * 1e-3,
            grad_norm=2.0,
            busy_s={"compute": 0.3, "disk read": 0.4},
            tier_nbytes={"device": MIB},
            peak_nbytes={"device": MIB},
            kind_nbytes={"device": {"parameters": MIB}},
        )
        for step in range(1, num_steps + 1)
    ]
    return RunRecord(header=header, steps=steps)


def test_it_is_whole_html_without_anything_from_outside() -> None:
    page = render_page(make_run(), "run.jsonl")
    outline = Outline(page)
    assert not {"script", "link", "img", "iframe", "object"} & outline.tags
    assert not {"src", "href", "action", "data"} & {name for name, _ in outline.attributes}
    assert not re.search(r"https?://|//\w|url\(|@import", page)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in outline.attributes


def test_it_shows_what_was_recorded() -> None:
    words = Outline(render_page(make_run(), "run.jsonl")).words
    for expected in ("run.jsonl", "gpt <b>", "5.000 → 1.667", "disk read (80% busy)"):
        assert expected in words
    for expected in (
        "wait_param (compute waits for parameters to arrive) 100",
        "paged parameters2.0 MiB1.0 MiB",
        "nvmein all6.0 MiB-",
        "run was interrupted",
    ):
        assert expected in words
    assert "Not recorded" not in words


def test_it_shows_the_config_the_checkpoints_and_the_wear() -> None:
    run = make_run(5)
    run.steps[2] = replace(run.steps[2], seconds={"forward": 0.3, "save": 0.2})
    run.steps[4] = replace(run.steps[4], loss_scale=512.0, skipped=True)
    run.steps = [replace(step, cpu_share=0.75, link_nbytes={"disk write": 10**9}) for step in run.steps]
    run.end_save_s = 0.4
    words = Outline(render_page(run, "run")).words
    for expected in (
        "bf16.enabledtrue", 'tiered_zero.report"<run>"', "saved, after step 2, 52 in 0.60 s", "process got75%",
        "TB written)953.7 MiB; 1 TB in 1,000 steps", "Loss scale", "5 steps (1 skipped)",
    ):  # fmt: skip
        assert expected in words
    assert "Loss scale" not in Outline(render_page(make_run(), "run")).words


def test_long_steps_are_cut_off_and_counted() -> None:
    run = make_run(9)
    assert "cut off" not in Outline(render_page(run, "run")).words
    run.steps[0] = replace(run.steps[0], wall_s=7.0, seconds={"forward": 7.0})
    assert "1 of 9 steps is cut off; the longest took 7 seconds." in Outline(render_page(run, "run")).words


def test_no_cell_of_a_table_breaks_a_word() -> None:
    assert "tbody th, tbody td { white-space: nowrap }" in STYLE


def test_a_run_that_was_resumed_says_after_which_step() -> None:
    run = make_run(5)
    assert "resumed" not in Outline(render_page(run, "whole")).words
    del run.steps[:3]
    assert "resumed after step 3" in Outline(render_page(run, "resumed")).words


def test_what_was_not_recorded_is_said() -> None:
    words = Outline(render_page(RunRecord(header=RunHeader(model="m", num_parameters=0)), "empty")).words
    assert words.count("Not recorded.") == 9
    bare = RunRecord(
        header=RunHeader(model="m", num_parameters=0),
        steps=[StepReport(step=1, wall_s=1.0, seconds={"other": 1.0}, loss=math.nan)],
    )
    words = Outline(render_page(bare, "bare")).words
    assert "Steps/s" in words and words.count("Not recorded.") == 7


@pytest.mark.parametrize("num_steps", [1, 2, 121, 5000])
def test_its_size_does_not_grow_with_the_run(num_steps: int) -> None:
    assert len(render_page(make_run(num_steps), "run")) < 100_000


def test_every_name_has_a_colour_in_light_and_in_dark() -> None:
    light, dark = STYLE.split("\n")[:2]
    names = set(re.findall(r"(--[\w-]+):", light))
    assert names == set(re.findall(r"(--[\w-]+):", dark))
    assert set(re.findall(r"var\((--[\w-]+)\)", STYLE)) - {"--it"} <= names
    for name in (*CAUSES, *TIERS):
        assert name in COLOURS and f".{style_of(name)} {{" in STYLE
    assert style_of("something new") == "other"


def test_a_run_records_rates_norms_saves_and_where_it_ran(swap_path: Path, tmp_path: Path) -> None:
    """Each step has the learning rate that it was made with; a save after the last step is in the footer."""

    def halve(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    path = tmp_path / "run.jsonl"
    with tiered(ParityGPT(), swap_path, clipping=1.0, make_scheduler=halve, runtime={"report": str(path)}) as engine:
        train(engine, batch, 2)
        engine.save_checkpoint(str(tmp_path / "saved"))
    run = read_run(path)
    first, second = (step.lr for step in run.steps)
    assert first is not None and second == first / 2
    assert all(step.grad_norm for step in run.steps)
    assert run.end_save_s is not None and run.end_save_s > 0
    assert {"tiered_zero", "torch", "python", "kernel", "host"} <= set(run.header.facts)
    assert run.header.config["gradient_clipping"] == "1.0" and "aio.block_size" not in run.header.config


def test_a_flush_without_a_save_under_way_is_no_save(swap_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with tiered(ParityGPT(), swap_path, runtime={"report": str(path)}) as engine:
        train(engine, batch, 1)
        engine.flush()
    run = read_run(path)
    assert run.end_save_s == 0 and run.header.meanings["nvme"]["state"].startswith("master weights")
    assert "checkpoints saved" not in Outline(render_page(run, "run")).words
