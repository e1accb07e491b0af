"""The engine as a user drives it: counters, boundaries, skipped steps, failures, evaluation, and its end.

What becomes of numbers is in tests/parity, what becomes of failed transfers in tests/faults.
"""

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import tiered_zero
from tests.bad_inputs import held
from tests.fakes.io_faults import Fault
from tests.support.configs import ADAMW, config_of, zero_section
from tests.support.faulty_runs import faulty_disks
from tests.support.inspection import lane, policy, weights_at_home
from tests.support.inspection.insides import check, materialize
from tests.support.models import rows as batch
from tiered_zero.errors import (
    ConfigError,
    EngineFailedError,
    ModelError,
    NonFiniteError,
    ParameterOffloadedError,
    TransferError,
)

ROOT = Path(__file__).parents[1]
PLACEMENTS = (("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"))
placements = pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda pair: "-".join(pair))


pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """Two layers, dropout, and something of its own to call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(16, 4)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.first(x)))
        if self.fails:
            raise RuntimeError("in the middle of a forward")
        return self.second(hidden)

    def describe(self, word: str = "model") -> str:
        return f"a {word} of {sum(p.numel() for p in self.parameters())}"


def build(swap: Path, placement: tuple[str, str] = ("nvme", "nvme"), **more: Any) -> tiered_zero.Engine:
    config = config_of(zero_section(*placement, swap), **{"optimizer": ADAMW, **more})
    return tiered_zero.initialize(model=Model(), config=config)[0]


def run_step(engine: tiered_zero.Engine, step: int, scale: float = 1.0) -> None:
    dtype = getattr(torch, engine.config.param_dtype_name)
    engine.backward(engine(batch(step).to(dtype)).float().square().mean() * scale)
    engine.step()


def weights(engine: tiered_zero.Engine) -> dict[str, Tensor]:
    return dict(engine.module.state_dict())


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


# -- counters and questions --------------------------------------------------------------------------------------------


@placements
def test_before_the_first_step(placement: tuple[str, str], swap_path: Path) -> None:
    with build(swap_path, placement) as engine:
        assert (engine.global_steps, engine.skipped_steps, engine.loss_scale) == (0, 0, 1.0)
        assert engine.get_global_grad_norm() is None
        assert engine.step_report is None
        assert engine.was_step_applied() is False
        assert engine.get_lr() == [0.01]
        assert engine.is_gradient_accumulation_boundary() is True
        assert engine.memory_report().keys() <= {"device", "host", "nvme"}


def test_boundaries(swap_path: Path) -> None:
    with build(swap_path, gradient_accumulation_steps=3) as engine:
        assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (3, 12)
        seen = []
        for step in range(7):
            boundary = engine.is_gradient_accumulation_boundary()
            before = weights(engine)
            run_step(engine, step)
            moved = not same(before, weights(engine))
            assert moved == boundary
            seen.append((boundary, engine.global_steps))
        assert seen == [(False, 0), (False, 0), (True, 1), (False, 1), (False, 1), (True, 2), (False, 2)]
        assert engine.step_report is not None
        assert engine.step_report.step == 2


@placements
def test_the_norm_is_that_of_clip_grad_norm(placement: tuple[str, str], swap_path: Path) -> None:
    """Unscaled and before clipping, over all micro-batches of the step."""
    plain = Model().eval()
    for step in range(2):
        (plain(batch(step)).square().mean() / 2).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    with build(swap_path, placement, gradient_accumulation_steps=2, gradient_clipping=0.01) as engine:
        engine.eval()
        for step in range(2):
            run_step(engine, step)
        assert engine.get_global_grad_norm() == expected.item()


def test_a_step_without_a_backward_changes_nothing(swap_path: Path) -> None:
    with build(swap_path) as engine:
        before = weights(engine)
        engine.step()
        assert engine.get_global_grad_norm() == 0.0
        assert same(before, weights(engine))


def test_the_report_of_a_step(swap_path: Path) -> None:
    with build(swap_path, gradient_accumulation_steps=2) as engine:
        losses = []
        for step in range(2):
            losses.append(engine(batch(step)).square().mean())
            assert engine.backward(losses[-1]) is losses[-1]  # as given: neither divided nor scaled
            engine.step()
        report = engine.step_report
        assert report is not None
        assert report.loss == pytest.approx(sum(loss.item() for loss in losses) / 2)
        assert report.grad_norm == engine.get_global_grad_norm()
        assert sum(report.seconds.values()) == pytest.approx(report.wall_s, rel=0.05)


def test_the_memory_report_is_within_its_plan(swap_path: Path) -> None:
    with build(swap_path) as engine:
        run_step(engine, 0)
        for tier, kinds in engine.memory_report().items():
            for kind, row in kinds.items():
                assert row.keys() == {"now", "peak", "planned"}
                assert row["now"] <= row["peak"] <= row["planned"], (tier, kind, row)
        for tier in ("host", "nvme"):
            assert sum(row["planned"] for row in engine.memory_report()[tier].values()) == engine.plan.nbytes(tier)


def test_what_it_does_not_have_is_the_modules(swap_path: Path) -> None:
    with build(swap_path) as engine:
        assert engine.describe("net") == "a net of 212"
        assert engine.second.out_features == 4
        assert engine.training is True
        assert next(name for name, _ in engine.named_parameters()) == "first.weight"
        with pytest.raises(AttributeError, match="nothing_of_the_kind"):
            engine.nothing_of_the_kind  # noqa: B018
        with pytest.raises(AttributeError, match="_private"):
            engine._private  # noqa: B018
        assert not hasattr(engine, "__len__")


# -- evaluation --------------------------------------------------------------------------------------------------------


@placements
def test_train_and_eval(placement: tuple[str, str], swap_path: Path) -> None:
    with build(swap_path, placement) as engine:
        run_step(engine, 0)
        assert engine.eval() is engine
        assert engine.module.training is False
        with torch.no_grad():
            first, again = engine(batch(1)), engine(batch(1))
        assert torch.equal(first, again)
        assert not first.requires_grad
        plain = Model().eval()
        plain.load_state_dict(engine.module.state_dict())
        assert torch.equal(plain(batch(1)), first)
        assert engine.train() is engine
        assert engine.drop.training is True
        assert engine.train(False).module.training is False


# -- steps that are skipped --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_skipped_step_is_counted_and_said(precision: str, swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    section = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1} if precision == "fp16" else {"enabled": True}
    with build(swap_path, **{precision: section}) as engine:
        run_step(engine, 0)
        assert engine.was_step_applied() is True
        before, scale = weights(engine), engine.loss_scale
        caplog.clear()
        run_step(engine, 1, scale=float("inf"))
        assert (engine.global_steps, engine.skipped_steps, engine.was_step_applied()) == (2, 1, False)
        assert engine.loss_scale == (scale / 2 if precision == "fp16" else 1.0)
        assert same(before, weights(engine))
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert (
            "step 2 skipped: gradient of first.weight is not finite (1 in a row; stops at 100)" in record.getMessage()
        )
        assert engine.step_report is not None
        assert engine.step_report.skipped is True
        run_step(engine, 2)
        assert (engine.global_steps, engine.skipped_steps, engine.was_step_applied()) == (3, 1, True)
        assert not same(before, weights(engine))


def test_many_skips_in_a_row_end_the_run(
    swap_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a bounded number, with the first bad parameter's name; warnings on the way are few."""
    monkeypatch.setattr(check, "MAX_SKIPPED_IN_A_ROW", 20)
    with build(swap_path, bf16={"enabled": True}) as engine:
        before = weights(engine)
        caplog.clear()
        for step in range(19):
            run_step(engine, step, scale=float("nan"))
        with pytest.raises(
            NonFiniteError, match=r"20 steps in a row .* first in first\.weight.*Weights are as they were"
        ):
            run_step(engine, 19, scale=float("nan"))
        assert engine.skipped_steps == engine.global_steps == 20
        assert len(caplog.records) == 5  # of the steps 1, 2, 4, 8 and 16
        assert same(before, weights(engine))
        run_step(engine, 20)  # the user may go on with better data
        assert engine.was_step_applied()


def test_the_smallest_loss_scale_is_the_end_too(swap_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1}
    with build(swap_path, fp16=fp16) as engine:
        before = weights(engine)
        for step in range(2):
            run_step(engine, step, scale=float("nan"))
        with pytest.raises(NonFiniteError, match=r"fp16\.min_loss_scale = 1.*such a gradient: first\.weight"):
            run_step(engine, 2, scale=float("nan"))
        assert same(before, weights(engine))


def test_fp32_goes_on_as_plain_pytorch_does_and_says_so_rarely(
    swap_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with build(swap_path) as engine:
        caplog.clear()
        for step in range(20):
            run_step(engine, step, scale=float("nan"))
        assert (engine.global_steps, engine.skipped_steps) == (20, 0)
        assert weights(engine)["first.weight"].isnan().all()
        assert len(caplog.records) == 5
        assert "step 1: the gradient of first.weight is not finite" in caplog.records[0].getMessage()


# -- giving up and failing ---------------------------------------------------------------------------------------------


@placements
def test_a_step_that_is_given_up(placement: tuple[str, str], swap_path: Path) -> None:
    """In the middle of an accumulation: no trace of it is left."""
    runs = []
    for gives_up in (False, True):
        with build(swap_path, placement, gradient_accumulation_steps=2) as engine:
            engine.eval()
            for step in (0, 1):
                run_step(engine, step)
            if gives_up:
                run_step(engine, 7)
                assert engine.is_gradient_accumulation_boundary() is True
                engine.abort_step()
                assert engine.is_gradient_accumulation_boundary() is False
            for step in (2, 3):
                run_step(engine, step)
            assert engine.global_steps == 2
            runs.append(weights(engine))
    assert same(*runs)


@placements
def test_an_exception_in_a_forward_or_a_backward(placement: tuple[str, str], swap_path: Path) -> None:
    runs = []
    for goes_wrong in (False, True):
        with build(swap_path, placement) as engine:
            engine.eval()
            run_step(engine, 0)
            if goes_wrong:
                engine.module.fails = True
                with pytest.raises(RuntimeError, match="in the middle of a forward"):
                    engine(batch(1))
                engine.module.fails = False
                out = engine(batch(1))
                out.register_hook(_fail)
                with pytest.raises(ZeroDivisionError):
                    engine.backward(out.sum())
            run_step(engine, 2)
            runs.append(weights(engine))
    assert same(*runs)


def _fail(grad: Tensor) -> None:
    raise ZeroDivisionError


@placements
@pytest.mark.parametrize("update", ["barrier", "overlapped", "delayed"])
def test_a_graph_does_not_outlive_a_step(placement: tuple[str, str], update: str, swap_path: Path) -> None:
    """Plain PyTorch raises by its version counters; nor may ours compute with weights that forward has not seen."""
    if (update, placement[1]) == ("delayed", "none"):
        with pytest.raises(ConfigError, match="off the device"):
            build(swap_path, placement, tiered_zero={"update": update})
        return
    with build(swap_path, placement, tiered_zero={"update": update, "delay_start_step": 1}) as engine:
        for step in range(3):
            run_step(engine, step)
        early = engine(batch(3)).square().mean()
        run_step(engine, 3)
        engine.flush()  # a delayed update shows by now
        with pytest.raises(ModelError, match="have changed since"):
            engine.backward(early)
        before = weights(engine)
        run_step(engine, 4)
        assert not same(before, weights(engine))


@pytest.mark.parametrize("update", ["barrier", "overlapped"])
def test_a_failed_write_latches(update: str, swap_path: Path) -> None:
    """It raises in its step (or, beside the next one, when that is waited for); then there are only LatchedErrors."""
    with faulty_disks() as disks, build(swap_path, ("cpu", "nvme"), tiered_zero={"update": update}) as engine:
        run_step(engine, 0)
        engine.flush()
        disks[0].add(Fault("write", disks[0].count("write") + 1))
        with pytest.raises(TransferError, match=str(swap_path)):
            run_step(engine, 1)
            engine.flush()
        for use in (
            lambda: engine(batch(2)),
            lambda: engine.backward(torch.ones(())),
            engine.step,
            engine.optimizer.step,
        ):
            with pytest.raises(EngineFailedError, match=r"An update failed .* load the last checkpoint"):
                use()
    assert os.listdir(swap_path) == []


@pytest.mark.parametrize("update", ["barrier", "overlapped"])
@pytest.mark.parametrize("first", ["forward", "backward", "step", "flush"])
def test_whoever_meets_a_failure_first_tells_what_happened(first: str, update: str, swap_path: Path) -> None:
    """However many refusals lie around it; its own cause stays. From then on every call says that it has happened."""
    with build(swap_path, ("cpu", "cpu"), tiered_zero={"update": update}, gradient_clipping=1.0) as engine:
        run_step(engine, 0)
        loss = engine(batch(1)).sum()
        if first == "step":
            engine.backward(loss)
        engine.flush()
        happened = TransferError("write of 4096 bytes")
        happened.__cause__ = OSError(5, "Input/output error")
        refusal = EngineFailedError("The swap store failed earlier")
        refusal.__cause__ = happened
        policy(engine).failures.set(refusal)
        calls = {
            "forward": lambda: engine(batch(1)),
            "backward": lambda: engine.backward(loss),
            "step": engine.step,
            "flush": engine.flush,
        }
        with pytest.raises(TransferError) as caught:
            calls[first]()
        assert caught.value is happened
        assert isinstance(happened.__cause__, OSError)
        for call in calls.values():
            with pytest.raises(EngineFailedError, match="An update failed"):
                call()


def test_a_failed_read_before_the_update_leaves_the_weights(swap_path: Path) -> None:
    barrier = {"update": "barrier"}
    with faulty_disks() as disks, build(swap_path, ("cpu", "nvme"), tiered_zero=barrier) as engine:
        run_step(engine, 0)
        before = weights(engine)
        disks[0].add(Fault("read", disks[0].count("read") + 1))
        with pytest.raises(TransferError):
            run_step(engine, 1)
        assert same(before, weights_at_home(engine))


@pytest.mark.parametrize("update", ["barrier", "overlapped"])
def test_gradients_are_dropped_whole_or_not_at_all(update: str, swap_path: Path) -> None:
    """zero_grad() between backward and step(): with some of the gradients in an update already, it is refused."""
    with build(swap_path, tiered_zero={"update": update}) as engine:
        run_step(engine, 0)
        before = weights(engine)
        engine.backward(engine(batch(1)).square().mean())
        if update == "overlapped":
            with pytest.raises(ModelError, match=r"dropped before step.*begun in backward.*barrier"):
                engine.zero_grad()
            engine.step()
            assert not same(before, weights(engine))
        else:
            engine.zero_grad()
            engine.step()
            assert same(before, weights(engine))
        engine.zero_grad()
        run_step(engine, 2)


# -- the end -----------------------------------------------------------------------------------------------------------


@placements
def test_close(placement: tuple[str, str], swap_path: Path) -> None:
    """Twice is as good as once; nothing is left; every use afterwards is one clear error."""
    build(swap_path, placement).close()  # what a process starts once
    before = held()
    engine = build(swap_path, placement)
    run_step(engine, 0)
    model, last = engine.module, weights(engine)
    engine.close()
    engine.close()
    assert os.listdir(swap_path) == []
    gc.collect()
    assert held() <= before
    for use in (lambda: engine(batch(0)), lambda: engine.backward(torch.ones(())), engine.step, engine.optimizer.step):
        with pytest.raises(ModelError, match="This engine is closed"):
            use()
    assert engine.global_steps == 1
    assert engine.get_global_grad_norm() is not None
    if placement[0] == "none":  # the model keeps its weights, and is a plain one
        assert same(last, dict(model.state_dict()))
        model(batch(0)).sum().backward()
        assert model.first.weight.grad is not None
        return
    for use in (lambda: model.first.weight + 1, model.state_dict, lambda: model(batch(0)), lambda: _gather(model)):
        with pytest.raises(
            ParameterOffloadedError, match=r"engine that is closed, and are gone\. Take engine\.module\.state_d"
        ):
            use()
    assert model.first.weight.shape == (16, 8)


def _gather(model: nn.Module) -> None:
    with tiered_zero.gathered(model):
        pass


def test_as_a_context_it_closes_also_on_errors(swap_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), build(swap_path) as engine:
        run_step(engine, 0)
        raise ZeroDivisionError
    assert os.listdir(swap_path) == []
    with pytest.raises(ModelError, match="closed"):
        engine.step()


def test_an_engine_that_nobody_holds_ends(swap_path: Path) -> None:
    """Forgotten engines give their threads, files and memory back (users: re-initialising leaks)."""
    build(swap_path).close()
    before = held()
    engine = build(swap_path)
    run_step(engine, 0)
    ended = weakref.ref(engine)
    del engine
    gc.collect()
    assert ended() is None
    assert os.listdir(swap_path) == []
    assert held() <= before


def test_the_start_is_logged_and_is_no_part_of_the_first_step(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(materialize, "PROGRESS_S", 0.0)
    caplog.set_level(logging.INFO, "tiered_zero")
    with build(swap_path) as engine:
        assert "parameters are placed" in caplog.text
        starts = []
        for step in range(2):
            run_step(engine, step)
            assert engine.step_report is not None
            starts.append(engine.step_report.start_s > 0)
    assert starts == [True, False]


@pytest.mark.parametrize("poison", [False, True])
def test_an_engine_that_is_collected_while_something_traces_ends(
    poison: bool, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs in whatever code is running, such as a compiler's, under its modes."""
    errors: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: errors.append(error))
    engine = build(swap_path, tiered_zero={"debug_poison": poison})
    run_step(engine, 0)
    engine.itself = engine  # only the collector finds it
    del engine

    def collect(values: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return values * 2

    traced = make_fx(collect, tracing_mode="fake")(torch.ones(3))
    assert errors == [] and os.listdir(swap_path) == []
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_function", "output"]


def test_an_engine_that_its_own_lane_finds_forgotten_ends(swap_path: Path) -> None:
    """Garbage is collected where some is made: here on the update lane, while an update waits there."""
    build(swap_path).close()
    before = held()
    engine = build(swap_path)
    forgotten = threading.Event()
    gc.disable()
    try:
        own = lane(engine, "update")
        own.submit(lambda: gc.collect() if forgotten.wait(300) else None)
        run_step(engine, 0)
        engine.itself = engine  # only the collector finds it
        del engine, own
        forgotten.set()
        deadline_s = time.monotonic() + 300
        while os.listdir(swap_path) or not held() <= before:
            assert time.monotonic() < deadline_s, f"left: {os.listdir(swap_path)}, {held() - before}"
            time.sleep(0.01)
    finally:
        gc.enable()


@placements
def test_a_close_that_is_interrupted_twice_is_made_by_the_next(
    placement: tuple[str, str], swap_path: Path, monkeypatch: Any
) -> None:
    """A second Ctrl-C while close() waits for the last update."""
    build(swap_path, placement).close()
    before = held()
    engine = build(swap_path, placement, tiered_zero={"update": "overlapped", "debug_delay_seed": 1})
    run_step(engine, 0)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(policy(engine), "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    engine.close()
    assert os.listdir(swap_path) == []
    assert held() <= before


SCRIPT = """
import os, sys, torch, tiered_zero.api
swap = sys.argv[1]
for device in ("cpu", "nvme"):
    if not (child := os.fork()):
        break
    assert os.waitpid(child, 0)[1] == 0, device
else:
    sys.exit()
rest = {"device": device, "nvme_path": swap, "max_in_cpu": 0}
zero = {"stage": 3, "offload_param": rest, "offload_optimizer": {**rest}, "stage3_param_persistence_threshold": 0}
del zero["offload_optimizer"]["max_in_cpu"]
config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
config["tiered_zero"] = {"device_memory_limit": "1GiB"}
engine = tiered_zero.initialize(model=torch.nn.Linear(64, 64), config=config)[0]
for _ in range(3):
    engine.backward(engine(torch.ones(4, 64)).sum())
    engine.step()
"""


def test_a_script_need_not_close_it(swap_path: Path) -> None:
    """The last update is made, threads end before the interpreter does, and the swap directory is gone."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(swap_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "still leased" not in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(swap_path) == []


def test_an_engine_its_plan_and_its_report_print_as_a_user_would_read_them(swap_path: Path) -> None:
    with build(swap_path, ("cpu", "cpu")) as engine:
        run_step(engine, 0)
        num_parameters = sum(param.numel() for param in engine.module.parameters())
        assert repr(engine) == f"Engine(Model, {num_parameters:,} parameters, device cpu, barrier updates, step 1)"
        assert "master weights and optimizer state" in str(engine.plan) and "update policy: barrier" in str(engine.plan)
        assert str(engine.step_report).startswith("step 1: ") and "bound by" in str(engine.step_report)
    assert repr(engine).endswith("closed)")
