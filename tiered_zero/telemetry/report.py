"""Report steps and runs: seconds by cause, bytes by lane, and the lane that bound a step.

[Note: The facts of a step] The seconds of all causes sum to the wall time. The causes are `forward`, `backward` and
`step`, each without the causes inside it; the driver's work for other lanes, such as `update`; each named wait; and
`other`, the loop around the engine. A lane's busy share is its busy seconds divided by the wall time. The lane with the
largest share binds the step. The overlap is 1 if the step took no longer than its busiest lane, and 0 if it took the
sum of all lanes' busy seconds.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import filterfalse
from typing import Any, SupportsFloat, TypeVar, final

from tiered_zero.errors import StoreError
from tiered_zero.sizes import format_nbytes
from tiered_zero.telemetry.spans import LANES, WAIT_CAUSES, Ledger, Recorder, Totals

OTHER = "other"
CAUSES = ("forward", "backward", "step", "update", "fetch", "reduce", "save", *WAIT_CAUSES, OTHER)
"""All causes of a step's seconds, in the order in which they are shown."""

BOUND_SHARE = 0.5
"""A lane binds a step only if it is busy for at least this share of the step."""

MAX_STEPS_KEPT = 1000
"""The typical step of a run is computed from at most this number of its last steps."""

Record = TypeVar("Record", bound="JsonRecord")
Number = TypeVar("Number", int, float)
_FLOATS = ("float", "float | None")


class JsonRecord:
    """The base of dataclasses that are written as JSON objects. A float that is not finite is written as text."""

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        odd = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
        return {name: str(value) if name in odd else value for name, value in values.items()}

    @classmethod
    def from_json(cls: type[Record], values: Mapping[str, Any]) -> Record:
        """Make an instance from a JSON object. Raises StoreError if a field is missing."""
        known = {  # without unknown names, which a newer version may have added
            f.name: float(values[f.name]) if f.type in _FLOATS and values[f.name] is not None else values[f.name]
            for f in fields(cls)  # type: ignore[arg-type]
            if f.name in values
        }
        try:
            return cls(**known)
        except TypeError as error:
            raise StoreError(f"This is no {cls.__name__}: {error}.") from error


@dataclass(frozen=True, kw_only=True)
class StepReport(JsonRecord):
    """The report of one optimizer step. See [Note: The facts of a step]."""

    step: int
    wall_s: float
    start_s: float = 0.0
    """Seconds that placing the model's values on their tiers took; 0 after the first step."""
    seconds: dict[str, float]
    """Cause (see CAUSES) -> the step's seconds."""
    loss: float | None = None
    """The mean over the micro-batches, unscaled; None if unknown."""
    tokens: int = 0
    """Tokens of all micro-batches; 0 if the model reads none."""
    lr: float | None = None
    """The learning rate of the first param group; None if there is no group, or if the group has no lr."""
    grad_norm: float | None = None
    """The norm before clipping; None if it was not computed."""
    loss_scale: float = 1.0
    skipped: bool = False
    link_nbytes: dict[str, int] = field(default_factory=dict)
    """Lane -> bytes moved."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """Lane -> busy seconds."""
    tier_nbytes: dict[str, int] = field(default_factory=dict)
    """Tier -> peak bytes in this step."""
    peak_nbytes: dict[str, int] = field(default_factory=dict)
    """Tier -> peak bytes since the run began."""
    kind_nbytes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Tier -> kind -> peak bytes since the run began."""
    activations: dict[str, int] = field(default_factory=dict)
    """Counts and bytes of activations: those moved off the device, and those that stayed because their tier was full.
    Empty if activations are not offloaded."""
    cpu_share: float | None = None
    """CPU seconds that the process used, divided by those that its compute threads could use; None if an accelerator
    computes."""

    @property
    def bytes_per_s(self) -> dict[str, float]:
        """Return lane -> bytes moved per busy second."""
        return link_rates(self.link_nbytes, self.busy_s)

    @property
    def overlap(self) -> float:
        return overlap_fraction(self.busy_s, self.wall_s)

    @property
    def bound_by(self) -> str:
        return bottleneck(self.busy_s, self.wall_s)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "overlap": self.overlap, "bound_by": self.bound_by}

    def __str__(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.6g}"
        skipped = ", skipped" if self.skipped else ""
        return f"step {self.step}: {self.wall_s:.3f} s{loss}{skipped}, bound by {self.bound_by}"


def build_step_report(
    step: int, totals: Totals, wall_s: float, ledger: Ledger | None = None, **facts: Any
) -> StepReport:
    """Build the report of a step. `totals`: the recorder's sums over the step. `facts`: other fields of StepReport."""
    seconds = {**totals.causes, OTHER: max(0.0, wall_s - sum(totals.causes.values()))}
    kinds = ledger.by_kind() if ledger else {}
    return StepReport(
        step=step,
        wall_s=wall_s,
        seconds={cause: seconds[cause] for cause in known_first(CAUSES, seconds)},
        link_nbytes={lane: nbytes for lane, nbytes in totals.nbytes.items() if nbytes},
        busy_s={lane: min(wall_s, totals.busy_s[lane]) for lane in known_first(LANES, totals.busy_s)},
        tier_nbytes=ledger.take_recent_peaks() if ledger else {},
        peak_nbytes=ledger.peaks() if ledger else {},
        kind_nbytes={tier: {kind: peak for kind, (_, peak) in row.items()} for tier, row in kinds.items()},
        **facts,
    )


@final
class StepMeter:
    """Measures each step, collects the losses and tokens of its micro-batches, and builds its report. Used on the
    driver thread. `num_threads`: threads of compute on the CPU; 0 if an accelerator computes."""

    def __init__(self, recorder: Recorder, ledger: Ledger, num_threads: int = 0) -> None:
        self._num_threads, self._start_cpu_s = num_threads, time.process_time()
        self._recorder = recorder
        self._ledger = ledger
        self._start_s = time.perf_counter()
        self._assembled_s = 0.0
        self.losses: list[SupportsFloat] = []
        self.num_tokens = 0
        self.report: StepReport | None = None
        """The report of the last optimizer step."""

    def begin(self) -> None:
        """Begin to measure the first step."""
        self._recorder.take_totals()  # drop the sums of the time before the first step
        self._assembled_s = time.perf_counter() - self._start_s
        self._start_s, self._start_cpu_s = time.perf_counter(), time.process_time()

    def clear(self) -> None:
        """Drop the losses and tokens of this step's micro-batches."""
        self.losses.clear()
        self.num_tokens = 0

    def finish(self, step: int, **facts: Any) -> None:
        """End an optimizer step and build its report. `facts`: lr, grad_norm, loss_scale, skipped of `StepReport`."""
        now_s, cpu_s = time.perf_counter(), time.process_time()
        possible_s = self._num_threads * (now_s - self._start_s)
        losses, self.losses = self.losses, []
        tokens, self.num_tokens = self.num_tokens, 0
        self.report = build_step_report(
            step,
            self._recorder.take_totals(),
            now_s - self._start_s,
            self._ledger,
            loss=sum(map(float, losses)) / len(losses) if losses else None,
            tokens=tokens,
            cpu_share=(cpu_s - self._start_cpu_s) / possible_s if possible_s else None,
            start_s=self._assembled_s,
            **facts,
        )
        self._start_s, self._start_cpu_s, self._assembled_s = now_s, cpu_s, 0.0


def known_first(known: Sequence[str], found: Iterable[str]) -> list[str]:
    """Return each name in `found` once: first those in `known`, in the order of `known`, then the others."""
    names = dict.fromkeys(found)
    return [*filter(names.__contains__, known), *filterfalse(known.__contains__, names)]


def bottleneck(busy_s: Mapping[str, float], wall_s: float) -> str:
    """Return the lane that binds a step as text: 'disk write (93% busy)'. If all lanes are below BOUND_SHARE, the text
    says so."""
    if not busy_s or wall_s <= 0:
        return "nothing measured"
    lane = max(busy_s, key=lambda name: busy_s[name])
    share = min(1.0, busy_s[lane] / wall_s)
    return f"{lane} ({share:.0%} busy)" if share >= BOUND_SHARE else f"no resource ({lane} is busiest, {share:.0%})"


def overlap_fraction(busy_s: Mapping[str, float], wall_s: float) -> float:
    """Return the overlap of a step: 1 if it took as long as its busiest lane, 0 if it took the sum of all busy
    seconds."""
    total, longest = sum(busy_s.values()), max(busy_s.values(), default=0.0)
    if total <= longest:
        return 0.0
    return min(1.0, max(0.0, (total - wall_s) / (total - longest)))


def link_rates(nbytes: Mapping[str, int], busy_s: Mapping[str, float]) -> dict[str, float]:
    return {lane: count / busy_s[lane] for lane, count in nbytes.items() if busy_s.get(lane)}


@dataclass(frozen=True, kw_only=True)
class RunReport(JsonRecord):
    """The report of a whole run, or of a run up to now.

    The typical step is a mean over steps. It leaves out the first step (if there are others), and then the fastest and
    the slowest quarter. `step_s`, `seconds`, `busy_s`, `overlap`, `bound_by` and `cpu_share` describe the typical step.
    """

    steps: int
    skipped_steps: int
    first_loss: float | None
    last_loss: float | None
    total_s: float
    tokens: int
    tokens_per_s: float
    start_s: float = 0.0
    """Seconds that placing the model's values on their tiers took."""
    step_s: float
    seconds: dict[str, float]
    busy_s: dict[str, float]
    overlap: float
    bound_by: str
    link_nbytes: dict[str, int]
    """Lane -> bytes moved in the whole run."""
    bytes_per_s: dict[str, float]
    """Lane -> bytes moved per busy second."""
    planned_nbytes: dict[str, int]
    """Tier -> bytes in the plan."""
    peak_nbytes: dict[str, int]
    """Tier -> the most bytes allocated at one time."""
    cpu_share: float | None = None
    predicted: dict[str, float] = field(default_factory=dict)
    """The predicted step: "tokens" -> its tokens, "step" -> its seconds, each lane -> its busy seconds. Empty if
    unknown."""

    @property
    def steps_text(self) -> str:
        """The number of steps as text: '1 step', '200 steps (2 skipped)'."""
        skipped = f" ({self.skipped_steps} skipped)" if self.skipped_steps else ""
        return f"{self.steps:,} step{'s' * (self.steps != 1)}{skipped}"

    def prediction_rows(self) -> list[tuple[str, float, float]]:
        """Return rows (name, predicted seconds, measured seconds): first "step", then each lane. Return an empty list
        if no prediction was made for steps with this number of tokens."""
        if not self.steps or self.predicted.get("tokens") != self.tokens / self.steps:
            return []
        measured = {"step": self.step_s, **self.busy_s}
        return [(name, s, measured.get(name, 0.0)) for name, s in self.predicted.items() if name != "tokens"]

    def link_rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield a row of texts for each lane: name, bytes in the whole run, rate, and busy share of a typical step."""
        for lane, busy_s in self.busy_s.items():
            nbytes, rate = self.link_nbytes.get(lane), self.bytes_per_s.get(lane)
            yield (
                lane,
                "-" if nbytes is None else format_nbytes(nbytes),
                "-" if rate is None else f"{format_nbytes(rate)}/s",
                f"{min(1.0, busy_s / self.step_s):.0%}" if self.step_s else "-",
            )


class RunTotals:
    """Combines the reports of a run's steps into a RunReport. Used by one thread."""

    def __init__(
        self, planned_nbytes: Mapping[str, int] | None = None, predicted: Mapping[str, float] | None = None
    ) -> None:
        self._planned_nbytes, self._predicted = dict(planned_nbytes or {}), dict(predicted or {})
        self._recent: deque[StepReport] = deque(maxlen=MAX_STEPS_KEPT)
        self._first: StepReport | None = None
        self._num_steps = self._num_skipped = self._tokens = 0
        self._total_s = 0.0
        self._link_nbytes: dict[str, int] = {}
        self._busy_s: dict[str, float] = {}

    def add(self, report: StepReport) -> None:
        self._first = self._first or report
        self._recent.append(report)
        self._num_steps += 1
        self._num_skipped += report.skipped
        self._tokens += report.tokens
        self._total_s += report.wall_s
        _accumulate(self._link_nbytes, report.link_nbytes)
        _accumulate(self._busy_s, report.busy_s)

    def report(self) -> RunReport:
        last = self._recent[-1] if self._recent else None
        others = [report for report in self._recent if report is not self._first]
        typical = middle_half(others or self._recent)
        step_s = _mean(typical, lambda report: {"wall": report.wall_s}).get("wall", 0.0)
        busy_s = _mean(typical, lambda report: report.busy_s)
        return RunReport(
            steps=self._num_steps,
            skipped_steps=self._num_skipped,
            first_loss=self._first.loss if self._first else None,
            last_loss=last.loss if last else None,
            total_s=self._total_s,
            tokens=self._tokens,
            tokens_per_s=self._tokens / self._total_s if self._total_s else 0.0,
            start_s=self._first.start_s if self._first else 0.0,
            step_s=step_s,
            seconds=_mean(typical, lambda report: report.seconds),
            busy_s=busy_s,
            overlap=overlap_fraction(busy_s, step_s),
            bound_by=bottleneck(busy_s, step_s),
            link_nbytes=dict(self._link_nbytes),
            bytes_per_s=link_rates(self._link_nbytes, self._busy_s),
            planned_nbytes=self._planned_nbytes,
            peak_nbytes=dict(last.peak_nbytes) if last else {},
            predicted=self._predicted,
            cpu_share=_mean(typical, lambda report: {"share": report.cpu_share or 0.0}).get("share") or None,
        )


def middle_half(reports: Iterable[StepReport]) -> list[StepReport]:
    """Return the reports sorted by wall time, without the fastest and the slowest quarter."""
    ranked = sorted(reports, key=lambda report: report.wall_s)
    quarter = len(ranked) // 4
    return ranked[quarter : len(ranked) - quarter]


def _mean(reports: Sequence[StepReport], values: Callable[[StepReport], Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for report in reports:
        _accumulate(sums, values(report))
    return {name: total / len(reports) for name, total in sums.items()}


def _accumulate(sums: dict[str, Number], values: Mapping[str, Number]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0) + value
