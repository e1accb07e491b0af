"""What a save and a load promise besides bits: nothing changes where something is refused, a save that fails costs
nothing, and what is left out starts anew."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.faulty_runs import Fault, faulty_disks
from tests.support.inspection import differences, everything, held_nbytes, ledger, pipeline
from tests.support.inspection.insides import LOCK_NAME, RecordWriter
from tests.support.models import ParityGPT, batch
from tests.support.pairwise import by_turns
from tests.support.tags import read_manifest, unfinished
from tests.support.trainers import tiered
from tiered_zero.checkpoint import save
from tiered_zero.checkpoint.tag import list_tags
from tiered_zero.errors import CorruptionError, EngineFailedError, ModelError, StoreError, TransferError

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = {"bf16": {"enabled": True}}
PLACEMENTS = [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")]
SOME = [("cpu", "cpu"), ("nvme", "nvme")]


def build(seed: int) -> ParityGPT:
    torch.manual_seed(seed)
    return ParityGPT(num_blocks=1)


def make(
    swap_path: Path, placement: tuple[str, str] = ("cpu", "cpu"), seed: int = 0, **more: Any
) -> tiered_zero.Engine:
    return tiered(build(seed), swap_path, placement, **{**BF16, **more})


def train(engine: tiered_zero.Engine, first: int, stop: int) -> None:
    for number in range(first, stop):
        engine.backward(engine(*batch(number)))
        engine.step()


@pytest.fixture
def saved(swap_path: Path, tmp_path: Path) -> dict[str, Any]:
    """Two steps, in tmp_path / "saved"; everything that they have made."""
    with make(swap_path) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "saved")
        return everything(engine)


# -- what to load ------------------------------------------------------------------------------------------------------


def test_where_nothing_is_nothing_is_loaded(swap_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    with make(swap_path) as engine:
        for path in (tmp_path / "empty", tmp_path / "missing"):
            caplog.clear()
            assert engine.load_checkpoint(path) == (None, {})
            assert f"no checkpoint in {path} is loaded: " in caplog.text
            with pytest.raises(StoreError):
                engine.load_checkpoint(path, tag="global_step2")
        (tmp_path / "model.pt").touch()
        for path in (tmp_path, tmp_path / "model.pt"):  # of another program: no new start
            with pytest.raises(StoreError, match=r"torch\.save"):
                engine.load_checkpoint(path)


def test_the_path_that_a_load_returns_can_be_loaded(swap_path: Path, tmp_path: Path) -> None:
    """A whole one is taken, and a broken one is refused: neither is a new start."""
    with make(swap_path) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
        path, _ = engine.load_checkpoint(tmp_path)
        assert path is not None and engine.load_checkpoint(path) == (path, {"epoch": 1})
        next(Path(path).glob("data*")).unlink()
        with pytest.raises(StoreError, match=r"cannot be loaded: .* is missing"):
            engine.load_checkpoint(path)


def test_another_number_of_threads_is_said(swap_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """torch adds in another order then, in 16 bit above all."""
    with make(swap_path) as engine:
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
    assert "was written with" not in caplog.text
    torch.set_num_threads(2)  # `one_thread` sets it back
    with make(swap_path) as engine:
        engine.load_checkpoint(tmp_path)
    assert "was written with a number of CPU threads of 1; this run has 2: later steps may differ" in caplog.text


def test_names_of_tags(swap_path: Path, tmp_path: Path) -> None:
    with make(swap_path) as engine:
        engine.save_checkpoint(tmp_path)
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, tag="mine", save_latest=False)
        assert (tmp_path / "latest").read_text() == "global_step0"
        assert [(info.tag, info.step) for info in list_tags(tmp_path)] == [("global_step0", 0), ("mine", 1)]
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step0")
        assert engine.global_steps == 0
        assert engine.load_checkpoint(tmp_path, tag="mine")[0] == str(tmp_path / "mine")
        assert engine.global_steps == 1


def test_a_checkpoint_is_of_a_moment_between_steps(swap_path: Path, tmp_path: Path) -> None:
    with tiered(build(0), swap_path, ("cpu", "cpu"), accumulation=2, **BF16) as engine:
        for act in (engine.save_checkpoint, engine.load_checkpoint):
            engine.backward(engine(*batch(0)))
            with pytest.raises(ModelError, match=r"between two steps.*gradients"):
                act(tmp_path)
            engine.step()
            with pytest.raises(ModelError, match=r"between two steps.*accumulation"):
                act(tmp_path)
            engine.backward(engine(*batch(1)))
            engine.step()
        assert list(tmp_path.iterdir()) == [swap_path] or list(tmp_path.iterdir()) == []
        assert engine.save_checkpoint(tmp_path)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuse(engine: tiered_zero.Engine, path: Path, kind: type[Exception], message: str, **options: Any) -> None:
    """A load raises, and changes nothing."""
    before, state = everything(engine), torch.get_rng_state()
    with pytest.raises(kind, match=message):
        engine.load_checkpoint(path, **options)
    assert differences(before, everything(engine)) == []
    assert torch.equal(state, torch.get_rng_state())
    train(engine, 0, 1)


def test_another_model_is_refused(saved: dict[str, Any], swap_path: Path, tmp_path: Path) -> None:
    with tiered(ParityGPT(num_blocks=2), swap_path, **BF16) as engine:
        refuse(engine, tmp_path / "saved", ModelError, "missing: blocks.1.norm.weight")
    larger = build(1)
    larger.never_used = nn.Parameter(torch.zeros(5, 8))
    larger.register_buffer("more", torch.zeros(3))
    with tiered(larger, swap_path, **BF16) as engine:
        refuse(engine, tmp_path / "saved", ModelError, "missing: more")
        refuse(engine, tmp_path / "saved", ModelError, r"shape \(5, 8\).*has \(5, 7\)", load_module_strict=False)


def test_another_optimizer_is_refused(saved: dict[str, Any], swap_path: Path, tmp_path: Path) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], amsgrad=True)

    with tiered(build(1), swap_path, ("cpu", "cpu"), sgd, **BF16) as engine:
        refuse(engine, tmp_path / "saved", ModelError, "state of SGD; it is that of AdamW")
        engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
    with tiered(build(1), swap_path, ("cpu", "cpu"), amsgrad, **BF16) as engine:
        refuse(engine, tmp_path / "saved", ModelError, "max_exp_avg_sq.*options that it was saved with")


def test_weights_in_use_are_not_replaced(saved: dict[str, Any], swap_path: Path, tmp_path: Path) -> None:
    with make(swap_path) as engine:
        before = everything(engine)
        with (
            tiered_zero.gathered(engine.module.tokens.weight),
            pytest.raises(ModelError, match=r"in use by tiered_zero.gathered"),
        ):
            engine.load_checkpoint(tmp_path / "saved")
        assert differences(before, everything(engine)) == []
        engine.load_checkpoint(tmp_path / "saved")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_damage_ends_the_engines_use(
    saved: dict[str, Any], placement: tuple[str, str], swap_path: Path, tmp_path: Path
) -> None:
    """Weights may be partly new: nothing goes on with them."""
    data = max((tmp_path / "saved" / "global_step2").glob("data*"), key=lambda path: path.stat().st_size)
    flip(data, data.stat().st_size // 2)
    with make(swap_path, placement) as engine:
        with pytest.raises(CorruptionError, match=r"load another checkpoint, into a new engine\.$"):
            engine.load_checkpoint(tmp_path / "saved")
        engine.close()  # what has been raised is not raised again
    with make(swap_path, placement) as engine:
        with pytest.raises(CorruptionError):
            engine.load_checkpoint(tmp_path / "saved")
        with pytest.raises(
            EngineFailedError,
            match=r"Loading .* ended in its middle, by CorruptionError; weights .* load the last checkpoint\.$",
        ):
            engine(*batch(0))
        with pytest.raises(EngineFailedError):
            engine.save_checkpoint(tmp_path / "other")


def test_a_damaged_manifest_changes_nothing(saved: dict[str, Any], swap_path: Path, tmp_path: Path) -> None:
    flip(tmp_path / "saved" / "global_step2" / "manifest.json", 500)
    with make(swap_path) as engine:
        refuse(engine, tmp_path / "saved", StoreError, "manifest", tag="global_step2")


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("placement", "runtime"), by_turns(PLACEMENTS, [{}, {"state_format": "bf16_remainder"}]))
def test_what_is_missing_keeps_its_value(
    placement: tuple[str, str], runtime: dict[str, Any], swap_path: Path, tmp_path: Path
) -> None:
    with make(swap_path, placement, runtime=runtime) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        saved = {name: value.clone() for name, value in engine.module.state_dict().items()}
        masters = {name: engine.peek(name) for name, _ in engine.module.named_parameters()}
    more = build(1)
    more.blocks.append(build(2).blocks[0])
    with tiered(more, swap_path, placement, runtime=runtime, **BF16) as engine:
        train(engine, 2, 3)
        before = {name: value.clone() for name, value in engine.module.state_dict().items()}
        own = {name: engine.peek(name) for name, _ in engine.module.named_parameters()}
        with pytest.raises(ModelError, match="exclude_frozen_parameters"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
        after = engine.module.state_dict()
        for name, value in after.items():
            kept = name.startswith("blocks.1.") or name in ("scale", "codes")
            assert torch.equal(value, before[name] if kept else saved[name]), name
        for name, master in own.items():
            if master is not None:
                found, expected = engine.peek(name), master if name.startswith("blocks.1.") else masters[name]
                assert found is not None
                assert expected is not None
                assert torch.equal(found, expected), name
        train(engine, 3, 4)


def test_frozen_parameters_can_be_left_out(swap_path: Path, tmp_path: Path) -> None:
    model = build(0)
    for param in model.blocks.parameters():
        param.requires_grad_(False)
    with tiered(model, swap_path, ("cpu", "cpu"), **BF16) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, tag="all")
        engine.save_checkpoint(tmp_path, tag="part", exclude_frozen_parameters=True)
    keys = {tag: set(read_manifest(tmp_path / tag).tensors) for tag in ("all", "part")}
    left_out = {f"param/{name}" for name, param in model.named_parameters() if not param.requires_grad}
    assert keys["all"] - keys["part"] == left_out
    assert {"param/scale", "param/codes", "param/blocks.0.out.weight"} < left_out
    trainable = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {key.partition("/")[2] for key in keys["part"] if key.startswith("master/")} == trainable


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_weights_alone_refresh_the_masters(placement: tuple[str, str], swap_path: Path, tmp_path: Path) -> None:
    """A step from loaded weights is the step of a run that began with them."""
    with tiered(build(0), swap_path, placement) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    begun = build(1)
    begun.load_state_dict(weights)
    with tiered(begun, swap_path, placement) as engine:
        train(engine, 7, 9)
        expected = everything(engine)
    with tiered(build(2), swap_path, placement) as engine:
        train(engine, 4, 5)
        state = torch.get_rng_state()
        path, client_state = engine.load_checkpoint(tmp_path, load_module_only=True)
        assert (path, client_state) == (str(tmp_path / "global_step2"), {})
        assert engine.global_steps == 1
        assert torch.equal(state, torch.get_rng_state())
        assert len(engine.optimizer.state) == 0
        train(engine, 7, 9)
        assert differences(expected, everything(engine)) == []


def test_optimizer_state_can_start_anew(saved: dict[str, Any], swap_path: Path, tmp_path: Path) -> None:
    with make(swap_path, seed=1) as engine:
        train(engine, 0, 1)
        engine.load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
        assert engine.global_steps == 2
        assert len(engine.optimizer.state) == 0
        assert all(torch.equal(value, saved[name]) for name, value in engine.module.state_dict().items())
        train(engine, 2, 3)


@pytest.mark.parametrize("most_copied", [0, 1 << 20])
def test_what_a_script_changes_on_the_device_after_the_call_is_not_saved(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_copied: int
) -> None:
    monkeypatch.setattr(save, "_MOST_COPIED_NBYTES", most_copied)
    runtime = {"update": "overlapped", "debug_delay_seed": 3}
    with make(swap_path, ("none", "cpu"), runtime=runtime, clipping=0.5) as engine:
        train(engine, 0, 1)
        expected = engine.module.scale.clone()
        engine.save_checkpoint(tmp_path)
        with torch.no_grad():
            engine.module.scale.fill_(7.0)  # as an average of weights is kept
    with make(swap_path, ("none", "cpu"), seed=1) as engine:
        engine.load_checkpoint(tmp_path)
        assert torch.equal(engine.module.scale, expected)


def test_frozen_parameters_changed_on_the_device_can_be_loaded_over(swap_path: Path, tmp_path: Path) -> None:
    with make(swap_path, ("none", "cpu")) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path)
        saved = everything(engine)
        with torch.no_grad():
            engine.module.scale.fill_(7.0)
        engine.load_checkpoint(tmp_path)
        assert differences(saved, everything(engine)) == []


class _Counting(nn.Linear):
    """With extra state, as torch's modules may have it."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "of": torch.tensor(self.calls)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state["of"])


@pytest.mark.parametrize("module_only", [False, True])
def test_the_extra_state_of_modules_comes_along(
    swap_path: Path, tmp_path: Path, module_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def start(counting: bool = True) -> tiered_zero.Engine:
        model = nn.Sequential(nn.Linear(8, 8), _Counting(8, 8) if counting else nn.Linear(8, 8))
        return tiered(model, swap_path, ("cpu", "cpu"))

    with start() as engine:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            engine.step()
        engine.save_checkpoint(tmp_path)
        engine.eval()
        engine(torch.ones(2, 8))
    with start() as engine:
        engine.load_checkpoint(tmp_path, load_module_only=module_only)
        assert engine.module[1].calls == 3
        assert not caplog.records
    with start(counting=False) as engine:
        engine.load_checkpoint(tmp_path)
        assert "the extra state of module '1' is left out" in caplog.text
        engine.save_checkpoint(tmp_path, "without")
    with start() as engine:
        engine.load_checkpoint(tmp_path, "without")
        assert "the checkpoint has no extra state of module '1'" in caplog.text


@pytest.mark.parametrize("given", ["", None, 3])
def test_what_names_no_directory_is_refused(swap_path: Path, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(swap_path)
    with make(swap_path / "swap", ("cpu", "cpu")) as engine:
        for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
            with pytest.raises(ModelError, match=rf"{call.__name__}\(\) expects the path of a directory; found"):
                call(given)
    assert not list(swap_path.glob("*step*"))


def test_what_was_frozen_can_train(swap_path: Path, tmp_path: Path) -> None:
    model = build(0)
    for param in model.blocks.parameters():
        param.requires_grad_(False)
    with tiered(model, swap_path, ("cpu", "cpu"), **BF16) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        saved = {name: value.clone() for name, value in engine.module.state_dict().items()}
    with make(swap_path, ("nvme", "nvme"), seed=1) as engine:
        with pytest.raises(ModelError, match="param groups"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_module_only=True)
        assert all(torch.equal(value, saved[name]) for name, value in engine.module.state_dict().items())
        assert torch.equal(engine.peek("blocks.0.out.weight"), saved["blocks.0.out.weight"].float())
        train(engine, 2, 3)


def test_what_the_device_has_cached_is_dropped(swap_path: Path, tmp_path: Path) -> None:
    """Frozen units too, which no update invalidates."""

    def loss(engine: tiered_zero.Engine) -> float:
        with torch.no_grad():
            return engine(*batch(0)).item()

    with make(swap_path) as engine:
        expected = loss(engine)
        engine.save_checkpoint(tmp_path)
    with make(swap_path, seed=1) as engine:
        assert loss(engine) != expected
        engine.load_checkpoint(tmp_path)
        assert loss(engine) == expected


# -- saves that fail, and saves under way ------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the n-th write of a save fail from now on; 0: none."""
    append = RecordWriter.append
    countdown = [0]

    def fail(self: RecordWriter, name: str, memory: memoryview) -> Any:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise TransferError("the disk is full, says the test")
        return append(self, name, memory)

    monkeypatch.setattr(RecordWriter, "append", fail)

    def set_countdown(number: int) -> None:
        countdown[0] = number

    return set_countdown


@pytest.mark.parametrize(
    ("placement", "update", "nth"),
    [(SOME[0], "barrier", 1), (SOME[0], "overlapped", 6), (SOME[1], "overlapped", 1), (SOME[1], "barrier", 3)],
)
def test_a_save_that_fails_costs_nothing(
    placement: tuple[str, str],
    update: str,
    nth: int,
    failing: Callable[[int], None],
    swap_path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = {"update": update}
    with make(swap_path, placement, runtime=runtime) as engine:
        train(engine, 0, 4)
        expected = everything(engine)
    with make(swap_path, placement, runtime=runtime) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, tag="good")
        train(engine, 1, 2)
        failing(nth)
        with pytest.raises(TransferError, match="says the test"):
            engine.save_checkpoint(tmp_path, tag="bad")
        assert "failed" not in caplog.text  # it is raised
        assert [(info.tag, info.complete) for info in list_tags(tmp_path)] == [("good", True)]
        train(engine, 2, 3)
        engine.save_checkpoint(tmp_path, tag="bad")
        train(engine, 3, 4)
        assert differences(expected, everything(engine)) == []
        engine.load_checkpoint(tmp_path, tag="good")
        train(engine, 1, 4)
        assert differences(expected, everything(engine)) == []


def test_a_run_whose_first_save_failed_is_resumed_at_step_0(
    failing: Callable[[int], None], swap_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = tmp_path / "saved"
    again = {"runtime": {"checkpoint": {"resume": str(saved)}}}
    with make(swap_path) as engine, pytest.raises(TransferError, match="says the test"):
        failing(1)
        engine.save_checkpoint(saved)
    (saved / "global_step0").mkdir()  # as of a process that was killed
    (saved / LOCK_NAME).write_text("0123456789ab global_step0")
    with make(swap_path, **again) as engine:
        assert (engine.resumed, engine.global_steps) == (None, 0)
        assert f"no checkpoint in {saved} is resumed: its first save was not completed" in caplog.text
        train(engine, 0, 1)
        engine.save_checkpoint(saved)
    with make(swap_path, **again) as engine:
        assert engine.resumed is not None and engine.global_steps == 1
    with pytest.raises(StoreError, match=r"There is no checkpoint .*resume to null"):
        make(swap_path, runtime={"checkpoint": {"resume": str(tmp_path / "missing")}})


def test_close_raises_what_no_call_has_raised(failing: Callable[[int], None], swap_path: Path, tmp_path: Path) -> None:
    engine = make(swap_path, runtime={"update": "overlapped", "checkpoint": {"async": True}})
    train(engine, 0, 1)
    failing(2)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(TransferError, match="says the test"):
        engine.close()
    engine.close()
    assert [held_nbytes(ledger(engine), tier) for tier in ("device", "host", "nvme")] == [0, 0, 0]


def test_a_save_behind_an_update_that_fails_raises_its_error(swap_path: Path, tmp_path: Path) -> None:
    runtime = {"update": "overlapped"}
    with faulty_disks() as disks, make(swap_path, ("cpu", "nvme"), runtime=runtime) as engine:
        train(engine, 0, 1)
        engine.flush()
        disks[0].add(Fault("write", disks[0].count("write") + 1))
        with pytest.raises((TransferError, EngineFailedError), match=str(swap_path)):
            train(engine, 1, 2)
            engine.save_checkpoint(tmp_path)  # which may come before the failure, or behind it
        assert list_tags(tmp_path) == [] and unfinished(tmp_path) == []
        with pytest.raises((TransferError, EngineFailedError), match=str(swap_path)):
            engine(*batch(2))


def test_close_finishes_an_asynchronous_save_and_its_update(swap_path: Path, tmp_path: Path) -> None:
    """The end of a run skips updates of which nothing is left; a save needs all of them."""
    with make(swap_path) as engine:
        train(engine, 0, 2)
        expected = everything(engine)
    engine = make(swap_path, runtime={"checkpoint": {"async": True}})
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    engine.close()
    with make(swap_path, seed=1) as engine:
        engine.load_checkpoint(tmp_path)
        assert differences(expected, everything(engine)) == []


@pytest.mark.parametrize("placement", SOME, ids="-".join)
def test_state_read_ahead_does_not_keep_a_save_waiting(
    placement: tuple[str, str], swap_path: Path, tmp_path: Path
) -> None:
    """A step ends with all staging buffers but one filled for the next; after a save they are filled again."""
    with make(swap_path, placement, runtime={"update": "overlapped"}) as engine:
        train(engine, 0, 3)
        engine.flush()
        before = set(pipeline(engine)._prefetcher.subgroups)
        engine.save_checkpoint(tmp_path)
        assert set(pipeline(engine)._prefetcher.subgroups) == before
        assert bool(before) is (placement[1] == "nvme")


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_the_ledger_does_not_move(placement: tuple[str, str], swap_path: Path, tmp_path: Path) -> None:
    """A save and a load use the run's own buffers, and besides them a fixed amount."""
    with make(swap_path, placement) as engine:
        train(engine, 0, 3)
        engine.flush()
        before = {tier: ledger(engine).peaks().get(tier, 0) for tier in ("device", "host", "nvme")}
        for _ in range(20):
            engine.save_checkpoint(tmp_path, tag="again")
            engine.load_checkpoint(tmp_path)
        train(engine, 3, 4)
        engine.flush()
        assert {tier: ledger(engine).peaks().get(tier, 0) for tier in before} == before
        assert all(ledger(engine).peaks().get(tier, 0) <= engine.plan.nbytes(tier) for tier in before)


def test_the_log_says_what_differs(
    saved: dict[str, Any], swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(save, "__version__", "9.9.9")
    with make(swap_path) as engine, caplog.at_level(logging.WARNING):
        engine.load_checkpoint(tmp_path / "saved")
        assert "this run has 9.9.9" in caplog.text
