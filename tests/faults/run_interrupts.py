"""Run as a program: training runs that get SIGINT at a random time, and how they go on.

    python run_interrupts.py SWAP_PATH < lines of JSON, each the fields of a `Case`

Prints a line of JSON for each case: the case, what came of it ("outcome"), and what was wrong, if anything. A case that
hangs ends the program with the stacks of all threads on stderr.
"""

import faulthandler
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first optimizer would import, within the time of its case
from torch import Tensor, nn

import tiered_zero
from tests.faults.leftovers import held, left_in_saves, left_in_swap
from tests.support.inspection import fetched_nbytes, is_idle, units_in_use
from tests.support.trainers import tiered
from tiered_zero.errors import EngineFailedError, TieredZeroError

HANG_S = 60.0
WIDTH = 12
NUM_STEPS = 6
SAVED, LOADED, CHANGED = 2, 3, 4
"""After how many steps the run is saved, loaded again, and changed by hand."""

CONFIGS: dict[str, tuple[str, float, int, dict[str, Any]]] = {
    "nvme barrier clipped": ("nvme", 0.5, 1, {"update": "barrier"}),
    "nvme overlapped clipped": ("nvme", 0.5, 2, {"update": "overlapped"}),
    "nvme overlapped": ("nvme", 0.0, 1, {"update": "overlapped"}),
    "nvme delayed clipped": ("nvme", 0.5, 1, {"update": "delayed", "delay_start_step": 1}),
    "nvme in place clipped": ("nvme", 0.5, 1, {"update": "overlapped", "checkpoint": {"in_place": True}}),
    "cpu barrier": ("cpu", 0.0, 2, {"update": "barrier"}),
    "cpu overlapped clipped": ("cpu", 0.5, 1, {"update": "overlapped", "debug_delay_seed": 1}),
    "cpu overlapped": ("cpu", 0.0, 1, {"update": "overlapped", "debug_delay_seed": 1}),
    "cpu async clipped": ("cpu", 0.5, 2, {"update": "overlapped", "checkpoint": {"async": True}}),
    "device": ("none", 0.5, 1, {}),
}
"""(tier of parameters and state, clipping, micro-batches of a step, the tiered_zero section); those without clipping
begin to update in backward where the policy is overlapped."""


@dataclass(frozen=True)
class Case:
    """`num_signals` signals in a run of `config`, the first at a time that `seed` draws, the next within 5 ms each.
    `past`: forward and backward are called on the module and the loss, past the engine."""

    config: str
    seed: int = 0
    num_signals: int = 1
    past: bool = False


class Wrong(Exception):
    """What a case must not do."""


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def batch(number: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)


@cache
def plain_digests(clipping: float, accumulation: int, delayed: bool) -> set[str]:
    """What plain PyTorch ends with. `delayed`: from the second step on gradients are taken at the weights before the
    last update, unless somebody has looked at the weights: here nobody, or once before any of the steps."""
    return {_plain_digest(clipping, accumulation, delayed, looked) for looked in range(NUM_STEPS if delayed else 1)}


def _plain_digest(clipping: float, accumulation: int, delayed: bool, looked: int) -> str:
    model, seen = build_model(), build_model()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    for step in range(NUM_STEPS):
        if step in (looked, CHANGED):
            seen.load_state_dict(model.state_dict())
        if step == CHANGED:
            for one in (model, seen):
                change(next(one.parameters()))
        seen.zero_grad()
        for micro in range(accumulation):
            (seen(batch(accumulation * step + micro)).square().mean() / accumulation).backward()
        for param, own in zip(model.parameters(), seen.parameters(), strict=True):
            param.grad = own.grad.clone()  # type: ignore[union-attr]
        if clipping:
            nn.utils.clip_grad_norm_(model.parameters(), clipping)
        if delayed and step:
            seen.load_state_dict(model.state_dict())
            optimizer.step()
        else:
            optimizer.step()
            seen.load_state_dict(model.state_dict())
        scheduler.step()
    return digest(model.state_dict())


def change(param: Tensor) -> None:
    """What the run changes by hand; twice is as good as once."""
    with torch.no_grad():
        param[0].fill_(0.25)


def digest(weights: dict[str, Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(weights):
        whole.update(name.encode() + weights[name].detach().contiguous().numpy().tobytes())
    return whole.hexdigest()[:16]


class Program:
    """A training program that catches KeyboardInterrupt and goes on: after each it calls `abort_step()` and repeats the
    step that the engine counts; where the engine has latched it builds another, which loads the last save."""

    def __init__(self, case: Case, swap_path: Path) -> None:
        self.case, self.swap_path = case, swap_path
        self.folder = swap_path.with_suffix(".saved")
        self.engine: tiered_zero.Engine | None = None
        self.done: set[str] = set()
        self.where: list[str] = []
        self.must_clear = False
        self.num_latched = 0
        self.weights: dict[str, Tensor] = {}

    def run(self) -> None:
        while "closed" not in self.done:
            try:
                if self.must_clear:
                    self.clear()
                    self.must_clear = False
                self.go_on()
            except KeyboardInterrupt as error:
                self.must_clear = True
                self.where.append(_where(error))
            except EngineFailedError as error:
                if not self.must_clear and not self.where:
                    raise Wrong(f"latched without an interrupt: {error}") from error
                self.must_clear = True

    def clear(self) -> None:
        """After an interrupt."""
        engine = self.engine
        if engine is None:
            return
        if "weights" in self.done:
            return
        try:
            engine.abort_step()
            engine.exchange(b"")  # says if it has latched
        except EngineFailedError:
            self.num_latched += 1
            self.stay_latched(engine)
            with suppress(EngineFailedError):
                engine.close()
            self.engine = None
            self.done &= {"saved"}

    def stay_latched(self, engine: tiered_zero.Engine) -> None:
        with suppress(EngineFailedError):
            engine(batch(0))
            raise Wrong("a latched engine goes on")

    def build(self) -> tiered_zero.Engine:
        tier, clipping, accumulation, runtime = CONFIGS[self.case.config]
        zero = {"sub_group_size": 160, "stage3_prefetch_bucket_size": 2000}
        return tiered(
            build_model(), self.swap_path, (tier, tier), make_optimizer, accumulation, clipping,
            make_scheduler=make_scheduler, zero=zero, runtime={"unit_size_cap": 1, **runtime},
        )  # fmt: skip

    def go_on(self) -> None:
        if self.engine is None:
            self.engine = self.build()
        engine = self.engine
        if "saved" in self.done and "resumed" not in self.done:
            if self.num_latched:
                engine.load_checkpoint(self.folder)
            self.done.add("resumed")
        is_delayed = "delayed" in self.case.config
        while engine.global_steps < NUM_STEPS:
            if not is_delayed:
                self.between_steps(engine)
            elif engine.global_steps == CHANGED:
                self.modify(engine)
            self.step(engine)
        if "weights" not in self.done:
            self.weights = dict(engine.module.state_dict())
            self.look_for_leftovers(engine)
            self.done.add("weights")
        engine.close()
        self.done.add("closed")

    def once(self, name: str, act: Callable[[], object]) -> None:
        if name not in self.done:
            act()
            self.done.add(name)

    def between_steps(self, engine: tiered_zero.Engine) -> None:
        step = engine.global_steps
        if step == SAVED:

            def save() -> None:
                engine.save_checkpoint(self.folder)
                engine.flush()

            self.once("saved", save)
            self.done.add("resumed")
            self.once("read", lambda: self.read(engine))
        if step == LOADED and "saved" in self.done:
            self.once("loaded", lambda: engine.load_checkpoint(self.folder))
        if engine.global_steps == CHANGED:
            self.modify(engine)

    def read(self, engine: tiered_zero.Engine) -> None:
        with tiered_zero.gathered(engine.module):
            next(engine.module.parameters()).sum().item()
        engine.module.state_dict()
        engine.optimizer.state_dict()
        engine.peek("0.0.weight", "exp_avg")
        engine.save_16bit_model(self.folder.with_suffix(".weights"))
        with torch.no_grad():
            engine.module(batch(0))
        engine.module[0].load_state_dict(engine.module[0].state_dict())

    def modify(self, engine: tiered_zero.Engine) -> None:
        param = next(engine.module.parameters())
        with tiered_zero.gathered(engine.module[0], modify=True):
            change(param)

    def step(self, engine: tiered_zero.Engine) -> None:
        accumulation, step = CONFIGS[self.case.config][2], engine.global_steps
        for micro in range(accumulation):
            x = batch(accumulation * step + micro)
            if self.case.past:
                engine.module(x).square().mean().backward()
            else:
                engine.backward(engine(x).square().mean())
            engine.step()

    def look_for_leftovers(self, engine: tiered_zero.Engine) -> None:
        device = engine.memory_report()["device"]
        if (now := device.get("gradient_in_flight", {"now": 0})["now"]) != 0:
            raise Wrong(f"{now} bytes of gradients in flight are left")
        if CONFIGS[self.case.config][0] != "none":
            if (now := device["param_window"]["now"]) != (full := fetched_nbytes(engine)):
                raise Wrong(f"{now} bytes of parameters are counted, {full} are there")
            if used := [unit.name for unit in units_in_use(engine)]:
                raise Wrong(f"{used} are still in use")
        if not is_idle(engine):
            raise Wrong("a frame or a phase is left")
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise Wrong("hooks for saved tensors are left")
        if [p for p in engine.module.parameters() if p.grad is not None]:
            raise Wrong("a parameter has a gradient")


def _where(error: BaseException) -> str:
    """The program's own line that was interrupted, and the innermost function of the package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == __file__]
    inner = [frame.name for frame in frames if "tiered_zero/" in frame.filename and "tests/" not in frame.filename]
    return f"{own[-1].line if own else ''} | {inner[-1] if inner else ''}"


def run(case: Case, swap_path: Path, duration_s: float) -> dict[str, Any]:
    """`duration_s`: of a run without signals."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    before = held()
    program, draw = Program(case, swap_path), random.Random(case.seed)
    result: dict[str, Any] = asdict(case)
    begun, ended = threading.Event(), threading.Event()

    def send() -> None:
        begun.wait()
        pause_s = draw.uniform(0.0, duration_s)
        for _ in range(case.num_signals):
            if ended.wait(pause_s):
                return
            os.kill(os.getpid(), signal.SIGINT)
            pause_s = draw.uniform(0.0, 0.005)

    sender = threading.Thread(target=send)
    start_s = time.monotonic()
    sender.start()
    try:
        try:
            while "closed" not in program.done:
                try:
                    begun.set()
                    program.run()
                except KeyboardInterrupt:  # one in the handling of another
                    program.must_clear = True
        finally:
            ended.set()
            sender.join()
            time.sleep(0)  # a signal that was sent last is handled here
    except KeyboardInterrupt:
        pass  # it came after the end
    except BaseException as error:
        result["wrong"] = f"{type(error).__name__}: {error}"
        result["traceback"] = "".join(traceback.format_exception(error))[-5000:]
        with suppress(TieredZeroError, KeyboardInterrupt):
            if program.engine is not None:
                program.engine.close()
    result["outcome"] = f"latched {program.num_latched}" if program.num_latched else "went on"
    result["seconds"], result["where"] = round(time.monotonic() - start_s, 3), program.where
    _, clipping, accumulation, runtime = CONFIGS[case.config]
    if digest(program.weights) not in plain_digests(clipping, accumulation, "delayed" in case.config):
        result.setdefault("wrong", "other numbers than plain PyTorch's")
    if wrong := left_in_saves(program.folder):
        result.setdefault("wrong", f"left in the save directory: {wrong}")
    folders = program.folder, program.folder.with_suffix(".weights")
    del program
    gc.collect()
    deadline_s = time.monotonic() + 2.0
    while (left := held() - before) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    if result["where"]:
        # it may leave what has no owner yet: the thread of a lane, the descriptor of a file that was just opened
        left = {one for one in left if "thread" not in one.lower() and "descriptor" not in one}
    if left:
        result.setdefault("wrong", f"left behind: {sorted(left)}")
    if files := left_in_swap(swap_path, runtime.get("checkpoint", {}).get("in_place", False)):
        result.setdefault("wrong", f"left in the swap directory: {files}")
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        result.setdefault("wrong", "an interrupt is held back")
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    faulthandler.cancel_dump_traceback_later()
    return result


def main() -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    swap_path = Path(sys.argv[1])
    # most of the time of a case: what the disk does, and garbage of what was imported
    os.fsync = os.fdatasync = lambda _fd: None
    durations_s: dict[tuple[str, bool], float] = {}
    for number, line in enumerate(sys.stdin):
        case = Case(**json.loads(line))
        if (case.config, case.past) not in durations_s:
            for attempt in range(2):  # the first imports what it needs
                (own := swap_path / f"{number}-{attempt}").mkdir()
                result = run(Case(case.config, num_signals=0, past=case.past), own, 0.0)
            print(json.dumps(result), flush=True)
            durations_s[case.config, case.past] = result["seconds"]
            gc.freeze()
        (own := swap_path / str(number)).mkdir()
        print(json.dumps(run(case, own, durations_s[case.config, case.past])), flush=True)


if __name__ == "__main__":
    main()
