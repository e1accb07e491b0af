"""Run as a program: training runs with one call interrupted at one of its lines, and how they go on.

    python run_interrupts.py SWAP_PATH < lines of JSON, each the fields of a `Batch`

Prints a line of JSON for each case: the case, what came of it ("outcome"), and what was wrong, if anything. A case that
hangs ends the program with the stacks of all threads on stderr.
"""

import faulthandler
import gc
import hashlib
import itertools
import json
import os
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first optimizer would import, within the time of its case
from torch import Tensor, nn

import tiered_zero
from tests.faults.breaker import Breaker
from tests.faults.leftovers import held, left_in_saves, left_in_swap
from tests.support.inspection import fetched_nbytes, is_idle, units_in_use
from tests.support.trainers import tiered
from tiered_zero.errors import EngineFailedError, TieredZeroError
from tiered_zero.optim import kernel_rule

HANG_S = 40.0
WIDTH = 12
NUM_BEFORE, NUM_AFTER = 2, 3
"""Steps before and after the one that is broken off."""

CONFIGS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "nvme barrier clipped": ("nvme", 0.5, {"update": "barrier"}),
    "nvme barrier": ("nvme", 0.0, {"update": "barrier"}),
    "nvme overlapped clipped": ("nvme", 0.5, {"update": "overlapped"}),
    "nvme overlapped": ("nvme", 0.0, {"update": "overlapped"}),
    "nvme delayed clipped": ("nvme", 0.5, {"update": "delayed", "delay_start_step": 1}),
    "cpu barrier clipped": ("cpu", 0.5, {"update": "barrier"}),
    "cpu overlapped clipped": ("cpu", 0.5, {"update": "overlapped", "debug_delay_seed": 1}),
    "cpu overlapped": ("cpu", 0.0, {"update": "overlapped", "debug_delay_seed": 1}),
    "cpu delayed": ("cpu", 0.0, {"update": "delayed", "delay_start_step": 1}),
    "cpu async clipped": ("cpu", 0.5, {"update": "overlapped", "checkpoint": {"async": True}}),
    "nvme in place clipped": ("nvme", 0.5, {"update": "overlapped", "checkpoint": {"in_place": True}}),
}
"""(tier of parameters and state, clipping, the tiered_zero section); those without clipping begin to update in backward
where the policy is overlapped."""

CALLS = (
    "initialize", "forward", "backward", "step", "zero_grad", "abort_step", "gathered", "modify", "state_dict",
    "optimizer_state_dict", "save_16bit_model", "flush", "save_checkpoint", "load_checkpoint", "close",
)  # fmt: skip
KINDS: dict[str, type[BaseException]] = {"interrupt": KeyboardInterrupt, "memory": MemoryError}


@dataclass(frozen=True)
class Case:
    """`kind` of exception raised in one `call`, in step NUM_BEFORE of a run of `config`, the `nth` time (from 1) that
    the line `place` ("file:line"; "" for none) is executed. `aborts`: the user calls `abort_step()` then; else he only
    catches it. `repeats`: he makes the step again where it was not made; else he leaves it out."""

    config: str
    call: str
    kind: str = "interrupt"
    place: str = ""
    nth: int = 1
    aborts: bool = False
    repeats: bool = True
    at_calls: bool = False
    """`place` is one where a call returns ("file:line.offset"): see `Breaker`."""


@dataclass(frozen=True)
class Batch:
    """Cases of one `call` in runs of `config`: `count` places in the package, drawn by `seed`; 0: every place, once, or
    each time that it is executed (`every_time`). Which lines a call executes depends on the timing of threads: the draw
    ranks places by their hash, so that a place more or less changes no other case."""

    config: str
    call: str
    count: int = 0
    every_time: bool = False
    seed: int = 0
    kinds: tuple[str, ...] = ("interrupt",)
    at_calls: bool = False

    def cases(self, places: list[str]) -> Iterator[Case]:
        """`places`: the lines that the call executes, in order."""
        times = Counter(places)
        ranked = sorted(times, key=lambda one: self._draw(one, 0).random())
        drawn = [(one, 0) for one in (ranked[: self.count] if self.count else times)]
        if self.every_time:
            drawn = [(one, nth) for one, _ in drawn for nth in range(1, times[one] + 1)]
        for place, nth in drawn:
            draw = self._draw(place, nth)
            nth = nth or draw.randint(1, min(3, times[place]))
            # where updates begin in backward, a step that is dropped after that latches the engine
            aborts = draw.random() < 0.3 and not begins_in_backward(self.config)
            kind, repeats = draw.choice(self.kinds), draw.random() < 0.6
            yield Case(self.config, self.call, kind, place, nth, aborts, repeats, self.at_calls)

    def _draw(self, place: str, nth: int) -> random.Random:
        return random.Random(f"{self.seed}/{self.config}/{self.call}/{place}/{nth}")


def begins_in_backward(config: str) -> bool:
    _, clipping, runtime = CONFIGS[config]
    return runtime["update"] == "overlapped" and not clipping


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def batch(step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)


class Reference:
    """Plain PyTorch; `delayed`: from the second step on gradients are taken at the weights before the last update."""

    def __init__(self, clipping: float, delayed: bool) -> None:
        self._model, self._seen = build_model(), build_model()
        self._optimizer = make_optimizer(self._model)
        self._scheduler = make_scheduler(self._optimizer)
        self._clipping = clipping
        self._delayed = delayed
        self._num_steps = 0
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        loss = self._seen(batch(number)).square().mean()
        self._seen.zero_grad()
        loss.backward()
        self.losses.append(loss.item())
        for param, seen in zip(self._model.parameters(), self._seen.parameters(), strict=True):
            param.grad = seen.grad.clone()  # type: ignore[union-attr]
        if self._clipping:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clipping)
        self.show()
        self._optimizer.step()
        self._scheduler.step()
        self._num_steps += 1
        if not self._delayed or self._num_steps <= 1:
            self.show()

    def show(self) -> None:
        """What every look at the weights does."""
        self._seen.load_state_dict(self._model.state_dict())

    def change(self) -> None:
        """What the case "modify" does by hand."""
        self.show()
        with torch.no_grad():
            next(self._model.parameters()).add_(0.25)
        self.show()

    def digest(self) -> str:
        self.show()
        return digest(self._seen.state_dict(), self.losses)


def digest(weights: dict[str, Tensor], losses: list[float]) -> str:
    whole = hashlib.sha256(repr(losses).encode())
    for name in sorted(weights):
        whole.update(name.encode() + weights[name].detach().contiguous().numpy().tobytes())
    return whole.hexdigest()[:16]


class Wrong(Exception):
    """What a case must not do."""


class Run:
    """One engine under a case."""

    def __init__(self, case: Case, swap_path: Path) -> None:
        self.case = case
        self.swap_path = swap_path
        self.folder = swap_path.with_suffix(".saved")
        """For checkpoints."""
        self.breaker = Breaker(KINDS[case.kind], case.place, case.nth if case.place else 0, at_calls=case.at_calls)
        self.losses: list[float] = []
        self.engine: tiered_zero.Engine | None = None

    def build(self) -> tiered_zero.Engine:
        tier, clipping, runtime = CONFIGS[self.case.config]
        model = build_model()
        runtime = {"unit_size_cap": 1, **runtime}
        zero = {"sub_group_size": 160, "stage3_prefetch_bucket_size": 2000}
        return tiered(
            model, self.swap_path, (tier, tier), make_optimizer, clipping=clipping, make_scheduler=make_scheduler,
            zero=zero, runtime=runtime,
        )  # fmt: skip

    @contextmanager
    def breaking(self, call: str) -> Iterator[None]:
        if call == self.case.call:
            with self.breaker:
                yield
        else:
            yield

    def step(self, engine: tiered_zero.Engine, number: int, call: Callable[[str], Any]) -> None:
        with call("forward"):
            loss = engine(batch(number)).square().mean()
        with call("backward"):
            engine.backward(loss)
        if call == self.breaking:
            self.extras(engine)
        with call("step"):
            engine.step()
        self.losses.append(loss.item())

    def extras(self, engine: tiered_zero.Engine) -> None:
        """Calls that leave the step out."""
        if self.case.call in ("zero_grad", "abort_step"):
            with self.breaking(self.case.call):
                getattr(engine, self.case.call)()
            raise _LeftOut

    def between_steps(self, engine: tiered_zero.Engine) -> None:
        param = next(engine.module.parameters())
        with self.breaking("gathered"):
            if self.case.call == "gathered":
                with tiered_zero.gathered(engine.module):
                    param.sum().item()
        with self.breaking("modify"):
            if self.case.call == "modify":
                with tiered_zero.gathered(engine.module[0], modify=True), torch.no_grad():
                    param.add_(0.25)
        with self.breaking("state_dict"):
            if self.case.call == "state_dict":
                engine.module.state_dict()
        with self.breaking("optimizer_state_dict"):
            if self.case.call == "optimizer_state_dict":
                engine.optimizer.state_dict()
        with self.breaking("save_16bit_model"):
            if self.case.call == "save_16bit_model":
                engine.save_16bit_model(self.folder)
        if self.case.call in ("flush", "close"):  # both wait for it
            engine.save_checkpoint(self.folder)
        with self.breaking("flush"):
            if self.case.call == "flush":
                engine.flush()
        with self.breaking("save_checkpoint"):
            if self.case.call == "save_checkpoint":
                engine.save_checkpoint(self.folder)
                engine.flush()
        with self.breaking("load_checkpoint"):
            if self.case.call == "load_checkpoint":
                engine.load_checkpoint(self.folder)

    def go(self) -> str:
        """What came of it, in words. Raises Wrong."""
        if self.case.call == "initialize":
            return self.go_initialize()
        engine = self.engine = self.build()
        for step in range(NUM_BEFORE):
            self.step(engine, step, _plainly)
            if self.case.call == "load_checkpoint" and step == 0:
                engine.save_checkpoint(self.folder)
                engine.flush()
        before, made, broken = engine.global_steps, False, ""
        try:
            self.between_steps(engine)
            if self.case.call in ("forward", "backward", "step", "zero_grad", "abort_step"):
                self.step(engine, NUM_BEFORE, self.breaking)
                made = True
        except _LeftOut:
            pass
        except (KeyboardInterrupt, MemoryError, TieredZeroError) as error:
            broken = type(error).__name__
            made = engine.global_steps == before + 1
            self.losses += [float("nan")] * made  # the reference has it
        if self.case.call == "close":
            return self.go_close(engine)
        return self.go_on(engine, made, broken)

    def go_on(self, engine: tiered_zero.Engine, made: bool, broken: str) -> str:
        case = self.case
        try:
            if case.aborts:
                engine.abort_step()
            redo = case.repeats and not made
            for step in range(NUM_BEFORE + (not redo), NUM_BEFORE + 1 + NUM_AFTER):
                self.step(engine, step, _plainly)
            weights = dict(engine.module.state_dict())
        except EngineFailedError as error:
            if not self.breaker.where:
                raise Wrong(f"latched without an interrupt: {error}") from error
            self.stay_latched(engine)
            return "latched"
        except TieredZeroError as error:
            raise Wrong(f"{type(error).__name__}: {error}") from error
        self.compare((weights, self.losses), made or redo, reveals=case.call != "step" or not made)
        self.look_for_leftovers(engine)
        if case.call == "save_checkpoint":
            self.save_again(engine, weights)
        return ("made" if made else "left out") + (f" after {broken}" if broken else "")

    def save_again(self, engine: tiered_zero.Engine, weights: dict[str, Tensor]) -> None:
        engine.save_checkpoint(self.folder, "again")
        engine.load_checkpoint(self.folder, "again")
        if digest(dict(engine.module.state_dict()), []) != digest(weights, []):
            raise Wrong("a later save holds other weights")

    def compare(self, found: tuple[dict[str, Tensor], list[float]], made: bool, reveals: bool = False) -> None:
        """A loss that the interrupt kept from us is taken from the reference. `made`: the step that was broken off, at
        once or by repeating it. `reveals`: the call may have made the last update visible, if it is one of those that
        do. A load that was broken off has changed nothing, or everything."""
        case = self.case
        reveals &= case.call not in ("forward", "backward", "zero_grad", "abort_step")
        for revealed in (False, True) if reveals or case.call == "load_checkpoint" else (False,):
            for changed in (False, True) if case.call in ("modify", "load_checkpoint") else (False,):
                reference = self.reference_before()
                if revealed:
                    reference.show()
                if changed and case.call == "modify":
                    reference.change()
                elif changed:
                    losses = reference.losses
                    reference = self.reference_before(1)
                    reference.losses = losses
                elif case.call == "load_checkpoint" and not self.breaker.where:
                    continue
                for step in range(NUM_BEFORE + (not made), NUM_BEFORE + 1 + NUM_AFTER):
                    reference.step(step)
                losses = [b if a != a else a for a, b in zip(found[1], reference.losses, strict=True)]
                if digest(found[0], losses) == reference.digest():
                    return
        raise Wrong("other numbers")

    def reference_before(self, num_steps: int = NUM_BEFORE) -> Reference:
        reference = Reference(CONFIGS[self.case.config][1], "delayed" in self.case.config)
        for step in range(num_steps):
            reference.step(step)
            if self.case.call == "load_checkpoint" and step == 0:
                reference.show()  # it was saved
        return reference

    def stay_latched(self, engine: tiered_zero.Engine) -> None:
        for _ in range(2):
            try:
                engine(batch(0))
            except EngineFailedError:
                continue
            raise Wrong("a latched engine goes on")

    def look_for_leftovers(self, engine: tiered_zero.Engine) -> None:
        device = engine.memory_report()["device"]
        if (now := device.get("gradient_in_flight", {"now": 0})["now"]) != 0:
            raise Wrong(f"{now} bytes of gradients in flight are left")
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

    def go_close(self, engine: tiered_zero.Engine) -> str:
        try:
            with self.breaker:
                engine.close()
        except (KeyboardInterrupt, MemoryError):
            engine.close()
            return "closed again"
        return "closed"

    def go_initialize(self) -> str:
        try:
            with self.breaker:
                self.engine = self.build()
        except (KeyboardInterrupt, MemoryError):
            return "not begun"
        except TieredZeroError as error:
            if isinstance(error.__cause__, MemoryError):
                return "not begun"
            raise
        return self.go_on_from_start()

    def go_on_from_start(self) -> str:
        assert self.engine is not None
        for step in range(NUM_BEFORE + 1 + NUM_AFTER):
            self.step(self.engine, step, _plainly)
        self.compare((dict(self.engine.module.state_dict()), self.losses), True)
        return "begun"


class _LeftOut(Exception):
    pass


@contextmanager
def _plainly(_call: str) -> Iterator[None]:
    yield


def run(case: Case, swap_path: Path) -> dict[str, Any]:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    before = held()
    own = Run(case, swap_path)
    folder = own.folder
    start_s = time.monotonic()
    result: dict[str, Any] = asdict(case)
    try:
        result["outcome"] = own.go()
    except BaseException as error:
        result["wrong"] = f"{type(error).__name__}: {error}"
        if not isinstance(error, Wrong):
            result["traceback"] = "".join(traceback.format_exception(error))[-3000:]
    with suppress(TieredZeroError):
        try:
            if own.engine is not None:
                own.engine.close()
        except TieredZeroError:
            raise
        except BaseException as error:
            result.setdefault("wrong", f"close: {type(error).__name__}: {error}")
            result.setdefault("traceback", "".join(traceback.format_exception(error))[-3000:])
    own.engine = None
    if wrong := left_in_saves(folder):
        result.setdefault("wrong", f"left in the save directory: {wrong}")
    result["num_lines"], result["where"] = len(own.breaker.places), own.breaker.where
    if not case.place:
        result["places"] = own.breaker.places
    del own
    gc.collect()
    deadline_s = time.monotonic() + 2.0
    while (left := held() - before) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    if left:
        result.setdefault("wrong", f"left behind: {sorted(left)}")
    in_place = CONFIGS[case.config][2].get("checkpoint", {}).get("in_place", False)
    if files := left_in_swap(swap_path, in_place):
        result.setdefault("wrong", f"left in the swap directory: {files}")
    shutil.rmtree(folder, ignore_errors=True)
    result["seconds"] = round(time.monotonic() - start_s, 2)
    faulthandler.cancel_dump_traceback_later()
    return result


def main() -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    swap_path, numbers = Path(sys.argv[1]), itertools.count()
    # most of the time of a case: what an engine measures at its start, what the disk does, garbage of what was imported
    kernel_rule._PROBE_NUMEL, kernel_rule.measure_copy_rate.__defaults__ = 1 << 14, (1 << 14,)
    os.fsync = os.fdatasync = lambda _fd: None

    def run_in_own_folder(case: Case) -> dict[str, Any]:
        (own := swap_path / str(next(numbers))).mkdir()
        return run(case, own)

    for line in sys.stdin:
        batch = Batch(**json.loads(line))
        plain = Case(batch.config, batch.call, at_calls=batch.at_calls)
        run_in_own_folder(plain)  # imports what it needs
        gc.freeze()
        unbroken = run_in_own_folder(plain)
        places = unbroken.pop("places")
        for result in itertools.chain([unbroken], map(run_in_own_folder, batch.cases(places))):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
