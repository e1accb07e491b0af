"""Are the weights plain PyTorch's, whatever the placement, the policy, the order of time, and what goes wrong?"""

from __future__ import annotations

import contextlib
import copy
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from tools.acceptance.model import SIZES, Course, Transformer, batch, make_config, meta_model
from tools.acceptance.report import Record, Section, Site, left_out

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

    config = make_config(course, directory, site.runtime(debug_poison=True, unit_size_cap=100_000))
    return tiered_zero.initialize(model=build(site), config=config)[0]


def batch_of(site: Site, number: int) -> Tensor:
    return batch(_size(site), number, site.device)


def take_steps(site: Site, engine: Any, course: Course, first: int, stop: int) -> None:
    for number in range(first * course.accumulation, stop * course.accumulation):
        engine.backward(engine(batch_of(site, number)))
        engine.step()


def weights_of(engine: Any) -> Weights:
    return {name: value.cpu().clone() for name, value in engine.module.state_dict().items()}


def train(site: Site, course: Course, num_steps: int = NUM_STEPS) -> Weights:
    with (
        tempfile.TemporaryDirectory(dir=site.directory) as directory,
        start(site, course, Path(directory)) as engine,
    ):
        take_steps(site, engine, course, 0, num_steps)
        return weights_of(engine)


@cache
def train_plain(
    site: Site, course: Course, *, state_on_device: bool, exact_root: bool = False, num_steps: int = NUM_STEPS
) -> Weights:
    """Compute on the device, and torch's AdamW over fp32 masters where the state rests.

    Norms are those of the gradients that backward leaves, 16-bit ones too: of the same values in fp32 a GPU may add up
    the squares in another order. `exact_root`: Adam's square root is not MKL's, which is off in the last place in a
    fifth of all cases; the update kernel takes the exact one for 16-bit gradients.
    """
    from tests.support.exact_root import ExactRoot

    model = build(site).to(site.device)
    params, place = list(model.parameters()), site.device if state_on_device else torch.device("cpu")
    masters = [param.detach().to(place, copy=True).requires_grad_() for param in params]
    if course.bf16:
        model.bfloat16()
    hyper: dict[str, Any] = {"lr": course.lr, "weight_decay": 0.01}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(masters, **hyper, foreach=None if state_on_device else False)
    if exact_root:
        optimizer = ExactRoot(masters, hyper)
    sums: list[Tensor | None] = [None] * len(params)
    left: list[Tensor] = []
    for number in range(num_steps * course.accumulation):
        loss = model(batch_of(site, number))
        (loss / course.accumulation if course.accumulation > 1 else loss).backward()
        left = [param.grad for param in params if param.grad is not None]
        for index, param in enumerate(params):
            grad, param.grad, known = left[index].float(), None, sums[index]
            sums[index] = grad if known is None else known + grad
        if (number + 1) % course.accumulation:
            continue
        totals = [total for total in sums if total is not None]
        if course.clip:
            norms = torch._foreach_norm(left if course.accumulation == 1 else totals, 2, dtype=torch.float32)
            norm = torch.linalg.vector_norm(torch.stack(norms))
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
    from tiered_zero.hardware.device.streams import CudaAccelerator

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
        with patch("tiered_zero.hardware.runtime.CudaAccelerator", Late):
            yield
    finally:
        hook.remove()


# -- sections ----------------------------------------------------------------------------------------------------------

PLACEMENTS = ("none/none", "none/cpu", "cpu/none", "cpu/cpu", "cpu/nvme", "nvme/nvme")


def first_courses() -> list[Course]:
    """A few in which every two settings meet."""
    from tests.support.pairwise import pairwise

    factors: dict[str, list[Any]] = {"placement": [*PLACEMENTS], "update": ["barrier", "overlapped"]}
    factors |= {"clip": [0.0, 0.3], "accumulation": [1, 2], "bf16": [False, True]}
    nothing_overlaps = {"is barrier": lambda case: not _differs(case["update"], case["placement"])}
    return [Course(**case) for case in pairwise(factors, nothing_overlaps)]


def all_courses() -> list[Course]:
    return [
        Course(placement=placement, update=update, clip=clip, accumulation=accumulation, bf16=bf16)
        for bf16, accumulation, clip, placement, update in product(
            (False, True), (1, 2), (0.0, 0.3), PLACEMENTS, ("barrier", "overlapped")
        )
        if _differs(update, placement)
    ]


def _differs(update: str, placement: str) -> bool:
    """Whether the update is not that inside step() by another name: state on the device has nothing to overlap."""
    return update == "barrier" or not placement.endswith("/none")


def parity_sections(courses: list[Course]) -> list[Section]:
    return [
        Section(name=f"parity {course.name}", group="parity", run=partial(check_parity, course=course), most_s=60.0)
        for course in courses
    ]


def check_parity(site: Site, course: Course) -> Record:
    """Train twice, with and without random sleeps, beside plain PyTorch with the state in the same place.

    [Note: Norms of sums in host memory] Where micro-batches are added up in host memory, norms are taken there, in the
    CPU's order: with clipping such a run is compared with the others of its kind, and with PyTorch within 1e-5.
    """
    on_device = course.placement.endswith("/none")
    kind = replace(course, placement="none/none" if on_device else "none/cpu", update="barrier")
    sums_on_host = course.clip > 0 and course.accumulation > 1 and not on_device
    with deterministic():
        references = [train_plain(site, kind, state_on_device=on_device)]
        if course.bf16 and (not on_device or site.device.type == "cpu"):
            references.append(train_plain(site, kind, state_on_device=on_device, exact_root=True))
        found = train(site, course)
        expected = min(references, key=lambda reference: len(different(found, reference)))
        with random_sleeps(site, all_courses().index(course)):
            late = train(site, course)
    close = all(torch.allclose(found[name], value, rtol=1e-5, atol=1e-6) for name, value in expected.items())
    changed, other = different(late, found), different(found, expected)
    passed = not changed and (close if sums_on_host else not other)
    return {
        "passed": passed,
        "changed_by_sleeps": changed,
        "other_than_plain": other,
        "compared_bits": not sums_on_host,
    }


def failure_sections() -> list[Section]:
    """A run goes on with the bits of one that nothing happened to; and a program may end without close()."""
    checks: dict[str, Callable[[Site], Record]] = {
        "out of memory": survive_out_of_memory,
        "an exception in backward": survive_exception,
        "a checkpoint": resume,
        "exit without close()": check_exit,
        "memory": check_memory,
    }
    return [Section(name=name, group="failures", run=run) for name, run in checks.items()]


FAILING = Course(placement="cpu/cpu", clip=0.3)


@cache
def left_alone(site: Site) -> Weights:
    with deterministic():
        return train(site, FAILING)


@contextlib.contextmanager
def interrupted(site: Site, num_steps: int = 2) -> Iterator[tuple[Any, Path]]:
    """Yield an engine after `num_steps` steps, and a folder."""
    with (
        deterministic(),
        tempfile.TemporaryDirectory(dir=site.directory) as name,
        start(site, FAILING, Path(name)) as engine,
    ):
        take_steps(site, engine, FAILING, 0, num_steps)
        yield engine, Path(name)


def survive_out_of_memory(site: Site) -> Record:
    if site.device.type != "cuda":
        return left_out("only CUDA's allocator takes a limit")
    expected = left_alone(site)
    with interrupted(site) as (engine, _):
        raised = _run_out_of_memory(site, engine)
        take_steps(site, engine, FAILING, 2, NUM_STEPS)
        left = different(weights_of(engine), expected)
    return {"passed": raised == "OutOfMemoryError" and not left, "raised": raised, "differ": left}


def survive_exception(site: Site) -> Record:
    expected = left_alone(site)
    with interrupted(site) as (engine, _):
        raised = _fail_in_backward(site, engine)
        take_steps(site, engine, FAILING, 2, NUM_STEPS)
        left = different(weights_of(engine), expected)
    return {"passed": raised == "_PlantedError" and not left, "raised": raised, "differ": left}


def resume(site: Site) -> Record:
    expected = left_alone(site)
    with interrupted(site, 3) as (engine, folder):
        engine.save_checkpoint(str(folder / "tags"), tag="third")
        engine.close()
        with start(site, FAILING, folder) as resumed:
            resumed.load_checkpoint(str(folder / "tags"), tag="third")
            take_steps(site, resumed, FAILING, 3, NUM_STEPS)
            left = different(weights_of(resumed), expected)
    return {"passed": not left, "differ": left}


def check_exit(site: Site) -> Record:
    command = [sys.executable, str(Path(__file__).resolve().parents[1] / "gpu_acceptance.py"), "--section", "exit"]
    command += ["--out", str(site.out), "--dir", str(site.directory), *(["--smoke"] if site.smoke else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    errors = {"errors": done.stderr[-500:]} if done.returncode else {}
    return {"passed": done.returncode == 0, "code": done.returncode, **errors}


def exit_without_close(site: Site) -> Record:
    """End this process with an engine that is at work."""
    course = Course(placement="cpu/nvme", update="overlapped")
    engine = start(site, course, site.directory)
    take_steps(site, engine, course, 0, 2)
    engine.backward(engine(batch_of(site, 9)))
    return {}


def _run_out_of_memory(site: Site, engine: Any) -> str:
    """Name what a forward raises that needs more memory than there is; then drop the step."""
    torch.accelerator.empty_cache()
    site.limit_memory(torch.accelerator.memory_reserved(site.device) + (64 << 10))
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
        engine.backward(engine(batch_of(site, 0)))
    except Exception as error:
        return type(error).__name__
    finally:
        hook.remove()
        engine.abort_step()
    return ""


def check_memory(site: Site) -> Record:
    """What the plan says of the device, and what was allocated. The plan knows nothing of activations, which are
    measured apart, as what a plain forward and backward add to weights and gradients; and nothing of cuBLAS's
    workspaces, which are what the allocator gets back where they are dropped."""
    import tiered_zero

    size = _size(site) if site.smoke else SIZES["1.3b"]
    size = replace(size, tokens=min(size.tokens, 256))
    course = Course(placement="cpu/cpu", update="overlapped", bf16=True)
    torch.manual_seed(0)
    block = copy.deepcopy(Transformer(replace(size, layers=1), recompute=True)).to(site.device, torch.bfloat16)
    tokens = batch(size, 0, site.device, rows=1)
    block(tokens).backward()  # the gradients' memory and the workspaces
    site.synchronize()
    site.reset_peaks()
    before = torch.accelerator.memory_allocated(site.device) if site.device.type != "cpu" else 0
    block(tokens).backward()
    site.synchronize()
    activations = max(0, site.memory().get("active", 0) - before)
    del block
    _drop_workspaces(site)
    site.reset_peaks()
    with tempfile.TemporaryDirectory(dir=site.directory) as directory:
        config = make_config(course, Path(directory), site.runtime(), rows=1)
        with tiered_zero.initialize(model=meta_model(size), config=config)[0] as engine:
            for _ in range(4):
                engine.backward(engine(tokens))
                engine.step()
            engine.flush()
            site.synchronize()
            assert engine.step_report is not None
            planned, counted = engine.plan.nbytes("device"), engine.step_report.peak_nbytes.get("device", 0)
            found = site.memory()
            workspaces = _drop_workspaces(site)
    passed = counted <= planned and found.get("active", 0) - workspaces <= planned + 2 * activations
    figures = {"planned": planned, "counted": counted, "activations_of_a_layer": activations, "workspaces": workspaces}
    return {"passed": passed, **figures, **found}


def _drop_workspaces(site: Site) -> int:
    """Free what cuBLAS keeps for its kernels, and return its bytes."""
    if not site.is_cuda:
        return 0
    before = torch.accelerator.memory_allocated(site.device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.accelerator.memory_allocated(site.device)
