"""What a course of training meets besides steps, on a device that lags: the bits stay those of plain PyTorch."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiered_zero
from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.lagging.test_planted_faults import stream_of
from tests.lagging.training import Course, build, data, data_on_device, engine_for, plain
from tests.parity.test_activations import MODES, Blocks
from tests.parity.test_failures import Fragile, Trip
from tests.support.models import ParityGPT, batch
from tests.support.pairwise import by_turns
from tests.support.trainers import FAR, Plain, adamw, assert_same_bits, follow, tiered, train
from tiered_zero.hardware.device.streams import StreamAccelerator


def batch_on_device(number: int) -> tuple[Tensor, Tensor]:
    tokens, targets = batch(number)
    return tokens.cuda(), targets.cuda()


def seeded(model: type[nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return model(*args)


@pytest.mark.parametrize(("mode", "where"), by_turns(list(MODES), ["cpu", "nvme"]))
@on_device
def test_activations_leave_and_come_back(device: LaggingDevice, mode: str, where: str, swap_path: Path):
    """Dropout draws the device's random numbers, so plain PyTorch runs there, too."""
    moved = []

    def script(trainer: Any) -> list[Any]:
        torch.manual_seed(1)
        seen = train(trainer, batch_on_device, 2, 2)
        if not isinstance(trainer, Plain):
            moved.append(trainer.step_report.activations["num_moved"])
        return seen

    expected = follow(script, Plain(seeded(Blocks, mode).cuda(), adamw, 2, 0.5))
    device.set(delay_seed=MODES.index(mode))
    nvme = {"nvme_path": str(swap_path)} if where == "nvme" else {}
    activations = {"device": where, "limit": "4MiB", "min_nbytes": 64, **nvme}
    runtime = {"device": "cuda", "activations": activations, "debug_poison": True}
    engine = tiered(seeded(Blocks, mode), swap_path, ("cpu", "nvme"), adamw, 2, 0.5, runtime=runtime)
    assert_same_bits(expected, follow(script, engine))
    assert moved[0] >= 6, "each block's input has left the device"


SAVES: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "resident": (("none", "none"), {}),
    "beside training, resident": (("none", "none"), {"checkpoint": {"async": True}, "update": "barrier"}),
    "beside training": (("none", "cpu"), {"checkpoint": {"async": True}}),
    "in place": (("nvme", "nvme"), {"checkpoint": {"in_place": True}}),
}


@pytest.mark.parametrize("name", SAVES)
@on_device
def test_a_loaded_run_goes_on_with_the_same_bits(device: LaggingDevice, name: str, swap_path: Path, tmp_path: Path):
    """Random numbers of the device are part of a checkpoint; the run that saves goes on while it is written."""
    placement, runtime = SAVES[name]

    def engine(seed: int) -> tiered_zero.Engine:
        torch.manual_seed(seed)
        return tiered(Blocks("no checkpoint"), swap_path, placement, runtime={"device": "cuda", **runtime})

    def steps(own: tiered_zero.Engine, first: int) -> dict[str, Tensor]:
        for number in (first, first + 1):
            own.backward(own(*batch_on_device(number)))
            own.step()
        return {name: value.cpu() for name, value in own.module.state_dict().items()} if first else {}

    device.set(delay_seed=1, kernel_s=2e-4, d2h_bytes_per_s=2e7)
    with engine(0) as own:
        steps(own, 0)
        own.save_checkpoint(str(tmp_path), tag="t")
        expected = steps(own, 2)
    with engine(7) as own:
        assert own.load_checkpoint(str(tmp_path), tag="t")[0] is not None
        found = steps(own, 2)
    different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    assert not different, different


def break_and_go_on(trainer: Any, data: Any) -> list[Any]:
    """Steps, and between them forwards and backwards that raise."""
    seen: list[Any] = []
    for step, where in enumerate(("forward", "backward", "forward")):
        with pytest.raises(Trip):
            trainer.backward(trainer(*data(90 + step), (where, step)))
        trainer.abort_step()
        seen += train(trainer, lambda number, step=step: data(number + 10 * step), 1)
    return seen


@pytest.mark.parametrize("placement", [("none", "cpu"), *FAR], ids="-".join)
@on_device
def test_training_goes_on_after_exceptions(device: LaggingDevice, placement: tuple[str, str], swap_path: Path):
    with sdpa_kernel(SDPBackend.MATH):
        expected = follow(partial(break_and_go_on, data=batch), Plain(seeded(Fragile), clipping=0.5))
    device.set(delay_seed=len(placement[0]))
    runtime = {"device": "cuda", "debug_poison": True}
    engine = tiered(seeded(Fragile), swap_path, placement, clipping=0.5, runtime=runtime)
    assert_same_bits(expected, follow(partial(break_and_go_on, data=batch_on_device), engine))


def skip_steps(trainer: Any, data: Any, run_out: Any) -> list[Any]:
    """Steps, and between them some for which there is no memory."""
    seen: list[Any] = []
    for step in range(3):
        seen += train(trainer, lambda number, step=step: data(number + 10 * step), 1)
        run_out(step)
    return seen


@pytest.mark.parametrize("placement", [("none", "none"), ("cpu", "cpu"), ("nvme", "cpu")], ids="-".join)
@on_device
def test_training_goes_on_after_the_memory_ran_out(device: LaggingDevice, placement: tuple[str, str], swap_path: Path):
    with sdpa_kernel(SDPBackend.MATH):
        expected = follow(partial(skip_steps, data=data, run_out=lambda step: None), Plain(build(), clipping=0.5))
    device.set(delay_seed=3)
    engine = engine_for(Course(placement=placement, clipping=0.5), swap_path)
    raised = []

    def run_out(step: int) -> None:
        arguments = data_on_device(99)
        torch.accelerator.empty_cache()
        for room in (0, 8 << 10, 20 << 10, 40 << 10):
            device.set(capacity_nbytes=torch.cuda.memory_reserved() + room)
            try:
                engine.backward(engine(*arguments))
            except torch.OutOfMemoryError as error:
                raised.append(str(error))
            device.set(capacity_nbytes=8 << 30)
            engine.abort_step()

    found = follow(partial(skip_steps, data=data_on_device, run_out=run_out), engine)
    assert len(raised) >= 3, "memory has not run out"
    assert_same_bits(expected, found)


@pytest.mark.parametrize("placement", [("none", "cpu"), ("none", "none"), ("nvme", "nvme")], ids="-".join)
@on_device
def test_a_users_own_stream(device: LaggingDevice, placement: tuple[str, str], swap_path: Path):
    """An engine that was made on it runs there; one that was made elsewhere refuses it."""
    expected = plain("fp32", 1, 0.0)
    device.set(delay_seed=5, kernel_s=1e-4)
    with torch.Stream("cuda"):
        engine = engine_for(Course(placement=placement), swap_path)
        assert_same_bits(expected, follow(lambda own: train(own, data_on_device, 3), engine))
    with engine_for(Course(placement=placement), swap_path) as engine:
        loss = engine(*data_on_device(0))
        with torch.Stream("cuda"):
            for call in (lambda: engine(*data_on_device(0)), lambda: engine.backward(loss), engine.step):
                with pytest.raises(tiered_zero.errors.ModelError, match="found"):
                    call()
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("placement", [("none", "none"), ("nvme", "cpu")], ids="-".join)
@on_device
def test_the_second_device(device: LaggingDevice, placement: tuple[str, str], swap_path: Path):
    device.set(delay_seed=6)

    def data_there(number: int) -> tuple[Any, ...]:
        tokens, targets, detour = data(number)
        return tokens.to("cuda:1"), targets.to("cuda:1"), detour

    engine = engine_for(Course(placement=placement), swap_path, device="cuda:1")
    assert engine.device == torch.device("cuda:1")
    before = torch.cuda.max_memory_allocated(0)
    assert_same_bits(plain("fp32", 1, 0.0), follow(lambda own: train(own, data_there, 3), engine))
    assert torch.cuda.current_device() == 0 and torch.cuda.max_memory_allocated(0) == before


@on_device
def test_autocast(device: LaggingDevice, swap_path: Path):
    def script(trainer: Any) -> list[Any]:
        seen = []
        for number in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                loss = trainer(*data_on_device(number))
            trainer.backward(loss)
            trainer.step()
            seen.append(loss.detach())
        return seen

    expected = follow(script, Plain(build().cuda(), adamw))
    device.set(delay_seed=8)
    assert_same_bits(expected, follow(script, engine_for(Course(placement=("cpu", "cpu")), swap_path)))


@on_device
def test_delayed_updates(device: LaggingDevice, swap_path: Path):
    """Plain PyTorch has none: the CPU as the device has the same bits."""
    course = Course(placement=("cpu", "cpu"), policy="delayed")
    with sdpa_kernel(SDPBackend.MATH):
        expected = follow(lambda own: train(own, data), engine_for(course, swap_path, device="cpu"))
    for seed in range(3):
        device.set(delay_seed=seed)
        assert_same_bits(expected, follow(lambda own: train(own, data_on_device), engine_for(course, swap_path)))


@pytest.mark.parametrize(("accumulation", "clipping"), [(1, 0.0), (2, 0.5), (3, 0.0)])
@on_device
def test_gradients_on_nvme(device: LaggingDevice, accumulation: int, clipping: float, swap_path: Path):
    """A window of host memory is written, read and used again while copies to it are late."""
    expected = plain("fp32", accumulation, clipping)
    course = Course(placement=("nvme", "nvme"), accumulation=accumulation, clipping=clipping)
    for settings in ({"delay_seed": 1}, {"d2h_bytes_per_s": 8e6}):
        device.set(**settings)
        engine = engine_for(course, swap_path, gradients="nvme")
        assert_same_bits(expected, follow(lambda own: train(own, data_on_device, 3, accumulation), engine))


@on_device
def test_calls_between_steps_see_every_update(device: LaggingDevice, swap_path: Path):
    """Weights that are lent, changed, copied and evaluated, while updates and copies are under way."""
    logging.getLogger("tiered_zero").setLevel(logging.ERROR)

    def script(trainer: Any, data: Any) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            seen += train(trainer, lambda number, step=step: data(number + 10 * step), 1)
            weight = trainer.module.blocks[0].out.weight
            with tiered_zero.gathered(weight, modify=True) if weight.is_cuda else torch.no_grad():
                weight.data.mul_(1.5)
            seen += [value.detach().cpu().clone() for value in trainer.module.state_dict().values()]
            trainer.eval()
            with torch.no_grad():
                seen.append(trainer(*data(50)).detach())
            trainer.train()
        return seen

    with sdpa_kernel(SDPBackend.MATH):
        expected = follow(partial(script, data=data), Plain(build()))
    for seed, placement in enumerate((("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme"))):
        device.set(delay_seed=seed)
        assert_same_bits(
            expected, follow(partial(script, data=data_on_device), engine_for(Course(placement=placement), swap_path))
        )


def host_waits(device: LaggingDevice, num_blocks: int, swap_path: Path) -> dict[str, int]:
    """Those of the third step."""
    model = seeded(ParityGPT, num_blocks)
    with tiered(model, swap_path, ("cpu", "cpu"), clipping=0.5, runtime={"device": "cuda"}) as engine:
        inputs = data_on_device(0)
        for _ in range(3):
            device.take_counts()
            engine.backward(engine(*inputs))
            engine.step()
        counts = device.take_counts()
    return {name: count for name, count in counts.items() if name.startswith("host_wait.") and "event" not in name}


@on_device
def test_the_host_waits_no_oftener_for_a_deeper_model(device: LaggingDevice, swap_path: Path):
    """Besides events, for which a worker may wait: once for the loss's scale and once for the norm."""
    waits = host_waits(device, 1, swap_path)
    assert waits == host_waits(device, 4, swap_path)
    assert sum(waits.values()) <= 2, waits


def reserved_by_forwards(device: LaggingDevice, swap_path: Path) -> tuple[int, int, int]:
    """(bytes reserved at most, bytes planned, bytes of the model) where no copy ends while the host runs ahead."""
    device.reset()
    model = seeded(ParityGPT, 16)
    zero = {"stage3_max_live_parameters": 25_000, "stage3_prefetch_bucket_size": 10_000}
    with tiered(model, swap_path, ("cpu", "cpu"), zero=zero, runtime={"device": "cuda"}) as engine, torch.no_grad():
        inputs = data_on_device(0)
        engine(*inputs).item()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        with contextlib.ExitStack() as hold:
            with stream_of(engine, "fetch"):
                hold.enter_context(device.held())
            for _ in range(3):
                engine(*inputs)
            peak = torch.cuda.max_memory_reserved() - before
        return (
            peak,
            engine.plan.nbytes("device"),
            sum(param.numel() * 4 for param in seeded(ParityGPT, 16).parameters()),
        )


@on_device
def test_memory_of_a_host_that_runs_ahead(device: LaggingDevice, swap_path: Path):
    """It is that of the plan. Blocks that a lane has recorded would be free only once the host sees its copies done."""
    peak, planned, model = reserved_by_forwards(device, swap_path)
    assert peak <= planned < model / 2, f"{peak} bytes reserved, {planned} planned, {model} of the model"

    copy = StreamAccelerator.copy

    def copy_and_record(self: StreamAccelerator, target: Tensor, source: Tensor, finish: bool = False) -> None:
        copy(self, target, source, finish)
        target.record_stream(torch.accelerator.current_stream())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamAccelerator, "copy", copy_and_record)
        peak, planned, _ = reserved_by_forwards(device, swap_path)
    assert peak > 2 * planned, "that would be seen"
