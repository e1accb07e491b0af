"""Training runs with faults under the real engine: how they are set up, how far they came, what is left of them."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tests.fakes.io_faults import Fault, FaultyEngine
from tests.support.inspection import inventory, layouts, store_of, units
from tests.support.inspection.insides import rack
from tests.support.models import ParityGPT, batch, named_weights
from tests.support.trainers import tiered
from tiered_zero.errors import CorruptionError, EngineFailedError, TieredZeroError, TransferError
from tiered_zero.io.select import Selection, select_engine

NVME = ("nvme", "nvme")
CALLS = ("forward", "backward", "step")

POLICIES: dict[str, dict[str, Any]] = {
    "barrier": {"clipping": 1.0, "runtime": {"update": "barrier"}},
    "overlapped": {"clipping": 1.0, "runtime": {"update": "overlapped"}},
    "overlapped in backward": {"clipping": 0.0, "runtime": {"update": "overlapped"}},
    "delayed": {"clipping": 1.0, "runtime": {"update": "delayed", "delay_start_step": 1}},
}
"""How a run updates; the third begins to, in backward, because nothing is clipped or checked."""

TIGHT = {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}
"""No more on the device than what is in use: every use is a read of its own."""


@contextmanager
def faulty_disks(*faults: Fault, io_timeout_s: float = 120.0) -> Iterator[list[FaultyEngine]]:
    """While this is open each store gets its I/O engine inside a FaultyEngine; yields them in the order of making."""
    disks: list[FaultyEngine] = []

    def select(*args: Any, **options: Any) -> Selection:
        selection = select_engine(*args, **options)
        disks.append(FaultyEngine(selection.engine, faults, io_timeout_s=io_timeout_s))
        return replace(selection, engine=disks[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rack, "select_engine", select)
        yield disks


def build(
    swap_path: Path, policy: str, model: Callable[[], nn.Module] = ParityGPT, placement: tuple[str, str] = NVME,
    zero: dict[str, Any] | None = None, runtime: dict[str, Any] | None = None, **options: Any,
) -> tiered_zero.Engine:  # fmt: skip
    """An engine over the usual model with the usual first weights."""
    torch.manual_seed(0)
    chosen = POLICIES[policy]
    options = {"clipping": chosen["clipping"], **options}
    runtime = {**chosen["runtime"], **(runtime or {})}
    return tiered(model(), swap_path, placement, zero={**TIGHT, **(zero or {})}, runtime=runtime, **options)


@dataclass(frozen=True)
class Failure:
    """What a call raised in a step (from 0)."""

    step: int
    call: str
    error: TieredZeroError

    def __str__(self) -> str:
        return f"{type(self.error).__name__} in {self.call} of step {self.step}: {self.error}"


def train(
    engine: tiered_zero.Engine,
    steps: int,
    first: int = 0,
    before: Callable[[int, str], None] = lambda step, call: None,
) -> Failure | None:
    """Steps `first` to `steps`, up to the first error of ours. `before(step, call)` runs ahead of each call."""
    loss = torch.zeros(())
    for step in range(first, steps):
        for call in CALLS:
            before(step, call)
            try:
                if call == "forward":
                    loss = engine(*batch(step))
                elif call == "backward":
                    engine.backward(loss)
                else:
                    engine.step()
            except TieredZeroError as error:
                return Failure(step, call, error)
    return None


@functools.cache
def reference(policy: str, steps: int, placement: tuple[str, str] = NVME) -> dict[str, Tensor]:
    """Weights after so many steps without any fault."""
    with tempfile.TemporaryDirectory() as path, build(Path(path), policy, placement=placement) as engine:
        assert train(engine, steps) is None
        return dict(named_weights(engine.module))


def differing(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names of weights that are not the same to the bit."""
    assert expected.keys() == found.keys()
    return [name for name, value in expected.items() if not torch.equal(value, found[name])]


@dataclass(frozen=True)
class Extent:
    """Where a record lies: `offsets` of the file `path`."""

    path: str
    offsets: range

    def fault(self, kind: str, nth: int = 1, effect: int | str | None = None, at: int = 0) -> Fault:
        given = {} if effect is None else {"effect": effect}
        return Fault(kind, nth, at=at, path=self.path, extent=self.offsets, **given)


def extent(engine: tiered_zero.Engine, what: str) -> Extent:
    """Of one record in the middle of the model: "param" (read now, written by the next update), "frozen" (parameters
    that none writes), or "state"; or the "last state" that is updated, the embedding's. The store has one file."""
    if what.endswith("state"):
        subgroups = [layout.subgroup for layout in layouts(engine)]
        first = next(subgroup for subgroup in subgroups if subgroup.pieces[0].param.name == "tokens.weight")
        home = inventory(engine).home(subgroups[len(subgroups) // 2] if what == "state" else first, "state")
    else:
        wanted = "<root>:float32:frozen" if what == "frozen" else "blocks.1.query_key_value:float32"
        unit = next(unit for unit in units(engine) if unit.name == wanted)
        home = inventory(engine).home(unit, "param")
    store = store_of(engine)
    record = store.records()[home.slot.name]
    path, offset = store._files.locate(record.offsets[0])
    return Extent(path, range(offset, offset + record.extent_nbytes))


def weights_after(engine: tiered_zero.Engine) -> dict[str, Tensor] | TieredZeroError:
    """What a user sees who looks at the weights after a failure."""
    try:
        return dict(named_weights(engine.module))
    except (EngineFailedError, CorruptionError, TransferError) as error:
        return error


def data_files(swap_path: Path) -> list[Path]:
    return sorted(swap_path.glob("*/data.bin"))


def check_aftermath(policy: str, engine: tiered_zero.Engine, failure: Failure, swap_path: Path) -> str:
    """What every failure must leave: weights that are exactly those before, or errors and nothing but errors.

    `policy` with the usual placement. Returns what came in words, for the table.
    """
    assert str(swap_path) in str(failure.error), f"the path is not named: {failure}"
    assert re.search(r"\d+ bytes at offset \d+|bytes \d+ to \d+, read from \S+ at offset \d+", str(failure.error))
    weights = weights_after(engine)
    if isinstance(weights, dict):
        assert not differing(reference(policy, failure.step), weights), "weights have changed without an error"
        left = "the weights are those before"
    else:
        again = train(engine, failure.step + 2, first=failure.step + 1)
        assert again is not None and again.call == "forward"
        assert isinstance(again.error, EngineFailedError | CorruptionError), again
        left = f"from then on {type(again.error).__name__}"
    return f"raised in {failure.call}(); {left}"


def check_closed(engine: tiered_zero.Engine, swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Closing after whatever came leaves no file, and no buffer in anybody's hands."""
    engine.close()
    assert list(swap_path.iterdir()) == []
    assert not [text for text in caplog.messages if "still leased" in text]
