"""Saves beside training: an update waits for its own sub-group's bytes, and for nothing else; what is written is of the
step that was saved."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered_zero
from tests.support.inspection import differences, everything, layouts, policy, state_view
from tests.support.inspection.insides import RecordWriter, SubGroupWork, manifest
from tests.support.models import ParityGPT, batch
from tests.support.trainers import tiered
from tiered_zero.checkpoint.save import StateSaver
from tiered_zero.checkpoint.tag import list_tags
from tiered_zero.concurrency.transfer import wait_all
from tiered_zero.errors import ConfigError, TransferError

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = {"bf16": {"enabled": True}}
BESIDE = {"checkpoint": {"async": True}}
RUNS: list[dict[str, Any]] = [
    {"placement": ("cpu", "cpu"), "update": "overlapped"},
    {"placement": ("nvme", "cpu"), "update": "overlapped"},
    {"placement": ("cpu", "cpu"), "update": "barrier"},
    {"placement": ("cpu", "cpu"), "update": "delayed"},
    {"placement": ("none", "cpu"), "update": "overlapped"},
    {"placement": ("none", "none"), "update": "barrier"},
    {"placement": ("cpu", "cpu"), "update": "overlapped", "state_format": "bf16_remainder"},
    {"placement": ("cpu", "cpu"), "update": "delayed", "state_format": "bf16_remainder"},
]


def make(swap_path: Path, run: dict[str, Any], seed: int = 0, **runtime: Any) -> tiered_zero.Engine:
    torch.manual_seed(seed)
    options = {name: value for name, value in run.items() if name != "placement"}
    return tiered(
        ParityGPT(num_blocks=1),
        swap_path,
        run["placement"],
        runtime={"delay_start_step": 1, **options, **runtime},
        **BF16,
    )


def train(engine: tiered_zero.Engine, first: int, stop: int) -> None:
    for number in range(first, stop):
        engine.backward(engine(*batch(number), number % 3 == 1))
        engine.step()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(map(str, run.values())))
def test_training_goes_on_beside_it(run: dict[str, Any], swap_path: Path, tmp_path: Path) -> None:
    """Several saves, each while the steps after it run, under random delays on all lanes."""
    with make(swap_path, run) as engine:
        train(engine, 0, 2)
        engine.flush()  # as a save does with a delayed update
        saved = everything(engine)
        train(engine, 2, 4)
        engine.flush()
        train(engine, 4, 6)
        expected = everything(engine)
    with make(swap_path, run, **BESIDE, debug_delay_seed=1) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        train(engine, 2, 4)
        engine.save_checkpoint(tmp_path)
        train(engine, 4, 6)
        assert differences(expected, everything(engine)) == []
    for step, state in ((2, saved), (4, None)):
        with make(swap_path, run, seed=1) as engine:
            engine.load_checkpoint(tmp_path, tag=f"global_step{step}")
            if state is not None and run["update"] != "delayed":  # which makes state of what has no gradient, too
                assert differences(state, everything(engine)) == []
            train(engine, step, 4)
            engine.flush()
            train(engine, 4, 6)
            assert differences(expected, everything(engine)) == []


def test_an_update_waits_for_its_own_bytes_alone(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save stops before the third sub-group: the next update makes the first two, and goes on once it does."""
    reached, gate = threading.Event(), threading.Event()
    send = StateSaver._send_subgroup

    def stop_and_send(self: StateSaver, work: SubGroupWork) -> None:
        if work.layout.subgroup.index == 2:
            reached.set()
            assert gate.wait(60)
        send(self, work)
        if work.layout.subgroup.index < 2:
            wait_all(work.writes)

    run = RUNS[0]
    with make(swap_path, run) as engine:
        train(engine, 0, 2)
        saved = everything(engine)
        train(engine, 2, 3)
        expected = everything(engine)
    monkeypatch.setattr(StateSaver, "_send_subgroup", stop_and_send)
    with make(swap_path, run, **BESIDE) as engine:
        assert len(layouts(engine)) > 3
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        assert reached.wait(60)
        train(engine, 2, 3)
        held = policy(engine)._pipeline._held
        assert [held[index].done() for index in (0, 1, 2)] == [True, True, False]
        second, third = layouts(engine)[1:3]
        scalars = state_view(engine).scalars
        while scalars.of(second)[0]["step"] == 2.0:
            threading.Event().wait(0.001)  # the update runs on its lane
        assert scalars.of(second)[0]["step"] == 3.0
        assert scalars.of(third)[0]["step"] == 2.0
        assert not any(info.complete for info in list_tags(tmp_path))
        gate.set()
        assert differences(expected, everything(engine)) == []
    with make(swap_path, run, seed=1) as engine:
        engine.load_checkpoint(tmp_path)
        assert differences(saved, everything(engine)) == []


def test_one_that_fails_holds_nothing_back(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RUNS[0]
    with make(swap_path, run) as engine:
        train(engine, 0, 4)
        expected = everything(engine)

    def fail(self: RecordWriter, name: str, memory: memoryview) -> Any:
        raise TransferError("the disk is full, says the test")

    with make(swap_path, run, **BESIDE) as engine:
        train(engine, 0, 2)
        with monkeypatch.context() as patched:
            patched.setattr(RecordWriter, "append", fail)
            engine.save_checkpoint(tmp_path)
            train(engine, 2, 3)
            with pytest.raises(TransferError, match="says the test"):
                engine.flush()
        assert "failed, and training goes on" in caplog.text
        engine.save_checkpoint(tmp_path)
        train(engine, 3, 4)
        assert differences(expected, everything(engine)) == []
    assert [(info.tag, info.complete) for info in list_tags(tmp_path)] == [("global_step3", True)]


def test_changes_by_hand_wait_for_it(swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, save = threading.Event(), StateSaver.save

    def wait_and_save(self: StateSaver, *args: Any) -> None:
        assert gate.wait(60)
        save(self, *args)

    with make(swap_path, RUNS[0], **BESIDE) as engine:
        train(engine, 0, 1)
        expected = everything(engine)
        monkeypatch.setattr(StateSaver, "save", wait_and_save)
        engine.save_checkpoint(tmp_path)
        timer = threading.Timer(0.2, gate.set)
        timer.start()
        engine.poke("norm.weight", "master", torch.full((32,), 7.0))
        assert gate.is_set()
        timer.join()
    with make(swap_path, RUNS[0], seed=1) as engine:
        engine.load_checkpoint(tmp_path)
        assert differences(expected, everything(engine)) == []


@pytest.mark.parametrize(
    ("placement", "runtime"),
    [(("cpu", "nvme"), {}), (("nvme", "cpu"), {"state_format": "bf16_remainder"})],
    ids=["state", "half of the masters"],
)
def test_what_rests_on_nvme_is_refused(
    placement: tuple[str, str], runtime: dict[str, Any], swap_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the directory that the config names is made."""
    with pytest.raises(ConfigError, match=r"tiered_zero.checkpoint.async.*in_place"):
        make(swap_path / "new", {"placement": placement, "update": "auto"}, **BESIDE, **runtime)
    assert list(swap_path.iterdir()) == [] and "Made the swap directory" not in caplog.text


class _Mixed(torch.nn.Module):
    """A parameter in no param group, on one page with one that trains, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.randn(60, 64))
        self.alone = torch.nn.Parameter(torch.randn(64))
        self.frozen = torch.nn.Parameter(torch.randn(3000), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.trained + self.alone).square().mean()


def _mixed(swap_path: Path, params: str, seed: int, **runtime: Any) -> tiered_zero.Engine:
    torch.manual_seed(seed)
    return tiered(
        _Mixed(),
        swap_path,
        (params, "cpu"),
        lambda model: torch.optim.AdamW([model.trained], lr=0.01),
        clipping=0.5,
        runtime={"update": "overlapped", **runtime},
    )


@pytest.mark.parametrize("change", ["step", "by hand", "abort"])
@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_parameters_without_a_master_are_those_of_the_call(
    change: str, params: str, swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written last, when every sub-group may be updated again."""
    send, digest = StateSaver._send_unit, manifest.digest

    def wait_and_send(self: StateSaver, *args: Any) -> None:
        time.sleep(0.1)
        send(self, *args)

    def wait_and_hash(memory: memoryview) -> int:
        time.sleep(0.1)
        return digest(memory)

    with monkeypatch.context() as patched, _mixed(swap_path, params, 0, **BESIDE, debug_poison=True) as engine:
        patched.setattr(StateSaver, "_send_unit", wait_and_send)
        patched.setattr(manifest, "digest", wait_and_hash)
        expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.save_checkpoint(tmp_path)
        if change == "step":
            engine.backward(engine(torch.ones(2, 60)))
            engine.step()
        elif change == "abort":
            engine.backward(engine(torch.ones(2, 60)))
            engine.abort_step()
        else:
            with tiered_zero.gathered([engine.module.alone, engine.module.frozen], modify=True), torch.no_grad():
                engine.module.alone.fill_(7.0)
                engine.module.frozen.fill_(7.0)
    with _mixed(swap_path, params, 1) as engine:
        engine.load_checkpoint(tmp_path)
        assert differences(expected, dict(engine.module.state_dict())) == []
