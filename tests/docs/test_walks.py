"""The walks of docs/architecture.md are those of a real step, save and load: each function that they name is called, in
the order of the page."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import tiered_zero
from tests.docs.test_names_in_pages import cells
from tests.house import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = str(Path(tiered_zero.__file__).parent)
WIDTH = 128


def walk(title: str) -> list[tuple[str, str]]:
    """List (file, function) of the table under the heading. Rows that begin with "On a GPU" are left out."""
    start = PAGE.index(f"## The walk of one {title}")
    section = PAGE[start : PAGE.index("\n## ", start)]
    rows = [cells(line) for line in section.splitlines() if line.startswith("| `")]
    return [
        (file.strip("`"), function)
        for file, functions, what in rows
        if not what.startswith("On a GPU")
        for function in re.findall(r"`([\w.]+)`", functions)
    ]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[str, str]]]:
    """Calls of package functions on all threads, as (file, name without its class): three steps, a save and a load."""
    recorded: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            recorded.append((frame.f_code.co_filename[len(PACKAGE) + 1 :], frame.f_code.co_name))

    path = tmp_path_factory.mktemp("walks")
    nvme = {"device": "nvme", "nvme_path": str(path / "swap")}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": nvme,
            "offload_optimizer": nvme,
            "stage3_param_persistence_threshold": 0,
        },
        "tiered_zero": {"device": "cpu", "device_memory_limit": "1MiB", "gradients": "nvme"},
    }
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    before = sys.getprofile()
    threading.setprofile(note)  # for the lanes, which start with the engine
    sys.setprofile(note)
    try:
        with tiered_zero.initialize(model=model, config=config)[0] as engine:
            for _ in range(3):
                engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
                engine.step()
            engine.save_checkpoint(path, tag="tag")
            engine.load_checkpoint(path, tag="tag")
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    yield recorded


def not_followed(functions: Sequence[tuple[str, str]], calls: Sequence[tuple[str, str]]) -> list[str]:
    """List what is not called behind the functions before it."""
    missing, start = [], 0
    for file, function in functions:
        wanted = (file, function.rpartition(".")[2])
        try:
            start = calls.index(wanted, start)
        except ValueError:
            missing.append(f"{file}: {function}")
    return missing


@pytest.mark.parametrize("title", ["parameter", "gradient", "save", "load"])
def test_a_walk_is_that_of_a_real_run(title: str, calls: list[tuple[str, str]]) -> None:
    functions = walk(title)
    assert len(functions) > 8
    assert not_followed(functions, calls) == []


def test_another_order_is_noticed(calls: list[tuple[str, str]]) -> None:
    functions = walk("save")
    assert not_followed([*functions[1:], functions[0]], calls) == [": ".join(functions[0])]
