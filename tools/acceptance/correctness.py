"""Are the weights plain PyTorch's, whatever the placement, the policy, the order of time, and what goes wrong?"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from tools.acceptance.model import SIZES, Course, Transformer, batch, make_config
from tools.acceptance.report import Report, Site

NUM_STEPS = 4
Weights = dict[str, Tensor]


def build(site: Site) -> Transformer:
    torch.manual_seed(0)
    return Transformer(_size(site))


def _size(site: Site) -> Any:
    return SIZES["tiny" if site.smoke or site.device.type == "cpu" else "small"]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Let torch's operators give the same bits each time: attention in plain operators, no atomic sums."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    memory: Any = torch.utils.deterministic  # it sets its attribute by a property of its module's class
    memory.fill_uninitialized_memory = False  # else memory that is read before it is written would not show
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def start(site: Site, course: Course, directory: Path) -> Any:
    import tiered_zero

    runtime: dict[str, Any] = {"device": str(site.device), "debug_poison": True, "unit_size_cap": 100_000}
    if site.device.type == "cpu":
        runtime["device_memory_limit"] = "1GiB"  # else tiers on the CPU's own memory are left out
    return tiered_zero.initialize(model=build(site), config=make_config(course, directory, **runtime))[0]


def take_steps(site: Site, engine: Any, course: Course, first: int, stop: int) -> None:
    for number in range(first * course.accumulation, stop * course.accumulation):
        engine.backward(engine(batch(_size(site), number, site.device)))
        engine.step()


def weights_of(engine: Any) -> Weights:
    return {name: value.cpu().clone() for name, value in engine.module.state_dict().items()}


def train(site: Site, course: Course) -> Weights:
    with (
        tempfile.TemporaryDirectory(dir=site.directory) as directory,
        start(site, course, Path(directory)) as engine,
    ):
        take_steps(site, engine, course, 0, NUM_STEPS)
        return weights_of(engine)


def train_plain(site: Site, course: Course, *, state_on_device: bool) -> Weights:
    """Compute on the device, and torch's AdamW over fp32 masters where the state rests."""
    model = build(site).to(site.device)
    params, place = list(model.parameters()), site.device if state_on_device else torch.device("cpu")
    masters = [param.detach().to(place, copy=True).requires_grad_() for param in params]
    if course.bf16:
        model.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.01, foreach=False)
    sums: list[Tensor | None] = [None] * len(params)
    for number in range(NUM_STEPS * course.accumulation):
        loss = model(batch(_size(site), number, site.device))
        (loss / course.accumulation if course.accumulation > 1 else loss).backward()
        for index, param in enumerate(params):
            assert param.grad is not None
            grad, param.grad, known = param.grad.float(), None, sums[index]
            sums[index] = grad if known is None else known + grad
        if (number + 1) % course.accumulation:
            continue
        totals = [total for total in sums if total is not None]
        if course.clip:
            norm = torch.nn.utils.get_total_norm(totals)
            torch._foreach_mul_(totals, torch.clamp(course.clip / (norm + 1e-6), max=1.0))
        for master, total in zip(masters, totals, strict=True):
            master.grad = total.to(place)
        optimizer.step()
        sums = [None] * len(params)
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def different(found: Weights, expected: Weights) -> list[str]:
    """Name the weights with other bits."""
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


# -- delays ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def random_sleeps(site: Site, seed: int) -> Iterator[None]:
    """Let the device run late at random: before and after each job of a lane, and between the layers of the model."""
    if site.simulated is not None:
        site.simulated.set(delay_seed=seed)
        yield
        site.simulated.set(delay_seed=-1)
        return
    if site.device.type != "cuda":
        yield
        return
    from tiered_zero.hardware.device.cuda import CudaAccelerator

    rng, cuda = random.Random(seed), cast(Any, torch.cuda)

    def sleep(*_: object) -> None:
        if (draw := rng.random()) > 0.6:
            cuda._sleep(int(draw * 2_000_000))  # up to a millisecond

    def run_late(job: Callable[[], None]) -> None:
        sleep()
        job()
        sleep()

    class Late(CudaAccelerator):  # type: ignore[misc]  # it is final
        def _build_lane(self, name: str) -> Any:
            lane = super()._build_lane(name)
            launch = lane._launch
            lane._launch = lambda work: launch(replace(work, job=partial(run_late, work.job)))
            return lane

    hook = torch.nn.modules.module.register_module_forward_pre_hook(sleep)
    try:
        with patch("tiered_zero.hardware.device.select.CudaAccelerator", Late):
            yield
    finally:
        hook.remove()


# -- sections ----------------------------------------------------------------------------------------------------------

PLACEMENTS = ("none/none", "none/cpu", "cpu/none", "cpu/cpu", "cpu/nvme", "nvme/nvme")


def list_courses(site: Site) -> list[Course]:
    found = [
        Course(placement=placement, update=update, clip=clip, accumulation=accumulation, bf16=bf16)
        for bf16, accumulation, clip, placement, update in itertools.product(
            (False, True), (1, 2), (0.0, 0.3), PLACEMENTS, ("barrier", "overlapped")
        )
        if not (update == "overlapped" and placement.endswith("/none"))  # which is the barrier: nothing to overlap
    ]
    return found[::9] if site.smoke else found


def check_parity(report: Report, site: Site) -> None:
    """Each run twice, with and without random sleeps, against plain PyTorch with the state in the same place.

    [Note: Norms of sums in host memory] Where micro-batches are added up in host memory, norms are taken there, in the
    CPU's order: with clipping such a run is compared with the others of its kind, and with PyTorch within 1e-5.
    """
    plain: dict[Course, Weights] = {}
    for seed, course in enumerate(list_courses(site)):
        on_device = course.placement.endswith("/none")
        kind = replace(course, placement="none/none" if on_device else "none/cpu", update="barrier")
        sums_on_host = course.clip > 0 and course.accumulation > 1 and not on_device
        with deterministic():
            if kind not in plain:
                plain[kind] = train_plain(site, kind, state_on_device=on_device)
            try:
                found = train(site, course)
                with random_sleeps(site, seed):
                    late = train(site, course)
            except Exception as error:
                report.write(course.name, False, error=f"{type(error).__name__}: {error}")
                continue
        expected = plain[kind]
        close = all(torch.allclose(found[name], value, rtol=1e-5, atol=1e-6) for name, value in expected.items())
        report.write(
            course.name,
            not different(late, found) and (close if sums_on_host else not different(found, expected)),
            changed_by_sleeps=different(late, found),
            other_than_plain=different(found, expected),
        )


def check_failures(report: Report, site: Site) -> None:
    """A run goes on with the bits of one that nothing happened to, after memory ran out and after an exception; from a
    checkpoint; and a program may end without close()."""
    course = Course(placement="cpu/cpu", clip=0.3)
    with deterministic(), tempfile.TemporaryDirectory(dir=site.directory) as name:
        directory = Path(name)
        expected = train(site, course)
        with start(site, course, directory) as engine:
            take_steps(site, engine, course, 0, 2)
            raised = _run_out_of_memory(site, engine)
            take_steps(site, engine, course, 2, NUM_STEPS)
            left = different(weights_of(engine), expected)
        report.write("out of memory", raised in ("OutOfMemoryError", "") and not left, raised=raised, differ=left)
        with start(site, course, directory) as engine:
            take_steps(site, engine, course, 0, 2)
            raised = _fail_in_backward(site, engine)
            take_steps(site, engine, course, 2, 3)
            engine.save_checkpoint(str(directory / "tags"), tag="third")
            take_steps(site, engine, course, 3, NUM_STEPS)
            left = different(weights_of(engine), expected)
        report.write("an exception in backward", raised == "_PlantedError" and not left, raised=raised, differ=left)
        with start(site, course, directory) as engine:
            engine.load_checkpoint(str(directory / "tags"), tag="third")
            take_steps(site, engine, course, 3, NUM_STEPS)
            left = different(weights_of(engine), expected)
        report.write("a checkpoint", not left, differ=left)
    command = [sys.executable, str(Path(__file__).resolve().parents[1] / "gpu_acceptance.py"), "--section", "exit"]
    command += ["--out", str(site.out), "--dir", str(site.directory), *(["--smoke"] if site.smoke else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    report.write("exit without close()", done.returncode == 0, code=done.returncode, errors=done.stderr[-500:])


def exit_without_close(report: Report, site: Site) -> None:
    """End this process with an engine that is at work."""
    course = Course(placement="cpu/nvme", update="overlapped")
    engine = start(site, course, site.directory)
    take_steps(site, engine, course, 0, 2)
    engine.backward(engine(batch(_size(site), 9, site.device)))


def _run_out_of_memory(site: Site, engine: Any) -> str:
    """Name what a forward raises that needs more memory than there is; then drop the step."""
    torch.accelerator.empty_cache()
    site.limit_memory(64 << 10)
    try:
        engine(batch(_size(site), 0, site.device, rows=256))
    except Exception as error:
        return type(error).__name__
    finally:
        site.limit_memory(None)
        engine.abort_step()
    return ""


class _PlantedError(Exception):
    pass


def _fail_in_backward(site: Site, engine: Any) -> str:
    """Name what a backward raises in whose midst a hook fails; then drop the step."""

    def fail(grad: Tensor) -> Tensor:
        raise _PlantedError("planted")

    hook = engine.module.blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    try:
        engine.backward(engine(batch(_size(site), 0, site.device)))
    except Exception as error:
        return type(error).__name__
    finally:
        hook.remove()
        engine.abort_step()
    return ""


def check_memory(report: Report, site: Site) -> None:
    """What the plan says of the device, and what was allocated; the plan knows nothing of activations, so these are
    measured apart, as what a plain forward and backward add to weights and gradients."""
    size = _size(site) if site.smoke else SIZES["1.3b"]
    size = replace(size, tokens=min(size.tokens, 256))
    course = Course(placement="cpu/cpu", update="overlapped", bf16=True)
    torch.manual_seed(0)
    block = copy.deepcopy(Transformer(replace(size, layers=1), recompute=True)).to(site.device, torch.bfloat16)
    tokens = batch(size, 0, site.device, rows=1)
    before = sum(2 * param.nbytes for param in block.parameters())
    torch.accelerator.reset_peak_memory_stats() if site.device.type != "cpu" else None
    block(tokens).backward()
    site.synchronize()
    activations = max(0, site.memory().get("active", 0) - before)
    del block
    if site.device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
    import tiered_zero

    with tempfile.TemporaryDirectory(dir=site.directory) as directory:
        runtime = {"device": str(site.device)} | ({"device_memory_limit": "1GiB"} if site.device.type == "cpu" else {})
        config = make_config(course, Path(directory), rows=1, **runtime)
        with torch.device("meta"):
            model = Transformer(size, recompute=True)
        with tiered_zero.initialize(model=model, config=config)[0] as engine:
            for _ in range(4):
                engine.backward(engine(tokens))
                engine.step()
            engine.flush()
            site.synchronize()
            assert engine.step_report is not None
            planned, counted = engine.plan.nbytes("device"), engine.step_report.peak_nbytes.get("device", 0)
    found = site.memory()
    passed = counted <= planned and found.get("active", 0) <= planned + 2 * activations
    report.write("memory", passed, planned=planned, counted=counted, activations_of_a_layer=activations, **found)
