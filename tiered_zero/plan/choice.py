"""Choose where everything rests: `tiered_zero.placement: "auto"`.

Candidates differ in settings that change no numbers and that the config leaves out. For each pair of slowest tiers, one
for parameters and one for state, the search plans as little as possible on faster tiers. Then it fills the room that is
left, on the device first and in host memory after that. The predicted seconds of a step decide.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from tiered_zero.config.schema import Config
from tiered_zero.errors import ConfigError, ModelError, PlanError
from tiered_zero.plan.activations import ActivationEstimate
from tiered_zero.plan.planner import Plan
from tiered_zero.plan.request import RESERVED, RESERVED_SHARE
from tiered_zero.plan.step_time import StepSeconds
from tiered_zero.sizes import TIERS, format_nbytes

NUM_SHOWN = 3
NUM_TRIES = 4
"""The most tries to fill a tier: a try may exceed a limit because buffers grow with the bytes that rest there."""

LARGE_SUB_GROUP_NUMEL = 1 << 22
"""The most elements that `sub_group_size` can set. If that key is left out, sub-groups whose state is transferred have
a quarter of it."""

_ZERO, _OWN = "zero_optimization.", "tiered_zero."
_PARAM, _STATE = f"{_ZERO}offload_param.", f"{_ZERO}offload_optimizer."
_ON_DEVICE = f"{_ZERO}stage3_model_persistence_threshold"

Settings = Mapping[str, Any]
"""Path of a config key -> its value."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A config that fits, its plan, and the step that is predicted for it. `settings`: the keys that the search has set
    in the config."""

    config: Config
    plan: Plan
    step: StepSeconds
    settings: Settings = field(default_factory=dict)

    @property
    def written_nbytes(self) -> int:
        """Bytes that a step writes to disks."""
        return sum(self.step.written_nbytes.values())

    @property
    def places(self) -> str:
        """Say what rests on which tier, and when the update runs."""
        words = []
        for what, kind in (("parameters", "param"), ("state", "state"), ("gradients", "gradient")):
            sizes = {tier: self.plan.nbytes(tier, kind) for tier in TIERS}
            on = [f"{tier} {format_nbytes(nbytes)}" for tier, nbytes in sizes.items() if nbytes]
            words.append(f"{what} on {' + '.join(on)}" if on else "")
        if self.plan.activations is not None:
            words.append(f"activations on {self.plan.activations.tier}")
        size = self.config.zero_optimization.sub_group_size
        words.append(f"update {self.plan.update_policy.policy}")
        words.append(f"sub_group_size {size}" if size == LARGE_SUB_GROUP_NUMEL else "")
        return ", ".join(filter(None, words))

    @property
    def text(self) -> str:
        """Describe the candidate in one line: seconds of a step, busiest resource, places, bytes of each tier, and
        bytes written in a step."""
        sizes = ", ".join(f"{tier} {format_nbytes(n)}" for tier in TIERS if (n := self.plan.nbytes(tier)))
        bound = self.step.bound_by
        return (
            f"{self.step.seconds:.3g} s a step, {self.step.by_resource[bound]:.3g} s of them {bound}: {self.places}; "
            f"in all {sizes}; {format_nbytes(self.written_nbytes)} written to disks"
        )


SAME_SHARE = 1.05
"""Steps up to this share of the shortest are equal: predictions are off by more."""


def _best_first(found: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates by the seconds of a step. Of those that SAME_SHARE makes equal to the shortest, candidates with
    the default sub_group_size come first (4 Mi elements, chosen for a predicted gain of 0.5%, took 1.17 times as long),
    then those that write less."""
    same_s = SAME_SHARE * min((each.step.seconds for each in found), default=0.0)

    def order(candidate: Candidate) -> tuple[float, bool, int, float]:
        seconds, sets_size = candidate.step.seconds, f"{_ZERO}sub_group_size" in candidate.settings
        return max(seconds, same_s), sets_size, candidate.written_nbytes, seconds

    return sorted(found, key=order)


@dataclass(kw_only=True)
class PlacementSearch:
    """Searches for the placement whose predicted step is shortest. `plan_of`: plans a config, allocating nothing.
    `predict`: predicts the step of a plan. `estimate`: the activations for which room is left if free memory is the
    limit; None: not known. `disk_nbytes`: free bytes of the disk; None: not known. `errors`: why settings were
    dropped."""

    config: Config
    plan_of: Callable[[Config], Plan]
    predict: Callable[[Plan], StepSeconds]
    estimate: ActivationEstimate | None = None
    disk_nbytes: int | None = None
    errors: list[Exception] = field(default_factory=list)
    _plans: dict[frozenset[tuple[str, Any]], Plan] = field(default_factory=dict)

    def run(self) -> list[Candidate]:
        """Return the candidates that fit, best first. If none fits, raise the error of the last settings tried, which
        keep least in memory."""
        placements = [*self._placements()]  # before the disk is asked, so that its error is the last
        plans = [each for each in placements if self._has_disk(each[1])]
        least = min((self._short_nbytes(plan) for _, plan in plans), default=0)
        fitting = {frozenset(settings.items()): (settings, plan) for settings, plan in plans}
        found = [self._candidate(*each) for each in fitting.values() if self._short_nbytes(each[1]) <= least]
        for best in _best_first(found)[:NUM_SHOWN]:
            for update in ("barrier", "overlapped"):
                for size in ({}, {f"{_ZERO}sub_group_size": LARGE_SUB_GROUP_NUMEL}):
                    settings = {**best.settings, f"{_OWN}update": update, **size}
                    plan = self._plan(settings)
                    if plan is not None and self._short_nbytes(plan) <= least and self._has_disk(plan):
                        found.append(self._candidate(settings, plan))
        if not found:
            last = next((error for error in reversed(self.errors) if isinstance(error, PlanError)), self.errors[-1])
            if isinstance(last, PlanError) and self._path is None:
                raise PlanError(
                    "Nothing fits memory alone. So that tiered_zero.placement auto may use a disk, name a directory in "
                    f"zero_optimization.offload_optimizer.nvme_path. {last}"
                )
            raise last
        by_places: dict[str, Candidate] = {}
        for candidate in _best_first(found):
            by_places.setdefault(candidate.places, candidate)
        return [*by_places.values()]

    def _plan(self, settings: Settings, *, fits: bool = True) -> Plan | None:
        """Return the plan of the config with `settings` filled in. If they do not work, or if `fits` is true and the
        plan exceeds a limit, add the error to `errors` and return None."""
        key = frozenset(settings.items())
        try:
            if key not in self._plans:
                self._plans[key] = self.plan_of(self.config.filled_in(settings))
            if fits:
                self._plans[key].check()
        except (ValidationError, ConfigError, ModelError, PlanError) as error:
            self.errors.append(error)
            return None
        return self._plans[key]

    def _has_disk(self, plan: Plan) -> bool:
        """Return whether the disk has room for the plan; if not, add an entry to `errors`."""
        needed = plan.nbytes("nvme")
        if self.disk_nbytes is None or needed <= self.disk_nbytes:
            return True
        free = format_nbytes(self.disk_nbytes)
        self.errors.append(PlanError(f"The plan needs {format_nbytes(needed)} on nvme; {free} are free there."))
        return False

    def _candidate(self, settings: Settings, plan: Plan) -> Candidate:
        config = self.config.filled_in(settings)
        return Candidate(config=config, plan=plan, step=self.predict(plan), settings=settings)

    def _placements(self) -> Iterator[tuple[Settings, Plan]]:
        """Yield settings that differ in tiers and limits, each with its plan, the slowest tiers last. A byte of host
        memory spares the disk more if it holds parameters, which forward and backward read and the update writes, than
        if it holds state."""
        zero = self.config.zero_optimization
        path = self._path
        pages = "stage" not in zero.model_fields_set or zero.stage == 3
        fits: set[tuple[str, str]] = set()
        for param, state in itertools.product(self._devices if pages else ("none",), self._devices):
            if (param == "nvme" and ("cpu", state) in fits) or (state == "nvme" and (param, "cpu") in fits):
                continue  # host memory has room for all of it
            settings: dict[str, Any] = {f"{_PARAM}device": param, f"{_STATE}device": state}
            settings |= {f"{section}nvme_path": path for section in (_PARAM, _STATE) if path}
            if param != "none":
                settings |= {f"{_ZERO}stage": 3, f"{_PARAM}max_in_cpu": 0, _ON_DEVICE: 0}
            for order in (("param", "state"), ("state", "param"))[: 1 if "none" in (param, state) else 2]:
                for found in self._fill(settings, order):
                    fits.add((param, state))
                    yield found

    @property
    def _path(self) -> Any:
        zero = self.config.zero_optimization
        sections = (zero.offload_optimizer, zero.offload_param, self.config.tiered_zero.activations)
        return next((section.nvme_path for section in sections if section.nvme_paths), None)

    @property
    def _devices(self) -> tuple[str, ...]:
        return ("none", "cpu", "nvme") if self._path else ("none", "cpu")

    def _fill(self, settings: Settings, on_device: Sequence[str]) -> Iterator[tuple[Settings, Plan]]:
        """Yield `settings`, extended until faster tiers hold as much as they have room for, and the plan. `on_device`:
        the kinds ("param", "state") that go to the device, in order."""
        plan = self._plan(settings)
        if plan is None:
            return
        moved = f"{_OWN}activations."
        if self.estimate is not None and self._short_nbytes(plan) and f"{moved}device" not in settings:
            more = {f"{moved}limit": self.estimate.budget_nbytes, f"{moved}nvme_path": self._path}
            for device in self._devices[1:]:
                yield from self._fill({**settings, **more, f"{moved}device": device}, on_device)
        if plan.nbytes("nvme", "state") and not plan.nbytes("nvme", "gradient"):
            settings = {**settings, f"{_OWN}gradients": "cpu"}  # they spare the disk at least as much as state does
        for kind in on_device if "device" in plan.limits else ():
            settings, plan = self._grow(settings, plan, "device", kind)
        for kind in ("param", "state"):
            if plan.nbytes("nvme", kind):
                settings, plan = self._grow(settings, plan, "host", kind)
        yield settings, plan

    def _grow(self, settings: Settings, plan: Plan, tier: str, kind: str) -> tuple[Settings, Plan]:
        """Put as much of `kind` on `tier` as the tier has room for, and move nothing else away from the tier. Return
        the new settings and plan, or those given if nothing can be added."""
        itemsize, room_of = 4 if self.config.param_dtype_name == "float32" else 2, self._room_nbytes
        room = min(room_of(plan, tier), sum(plan.nbytes(other, kind) for other in TIERS))
        for _ in range(NUM_TRIES):
            if room <= 0:
                break
            if kind == "state":
                more = {f"{_OWN}state_limits.{tier}": room}
            elif tier == "host":
                more = {f"{_PARAM}max_in_cpu": room // itemsize}
            else:
                numel = (plan.nbytes("device", "param") + room) // itemsize
                more = {f"{_ZERO}stage3_param_persistence_threshold": numel, _ON_DEVICE: numel}
            grown = self._plan({**settings, **more}, fits=False)
            if grown is None or grown.rows == plan.rows:
                break
            missing = sum(max(0, min(0, room_of(plan, each)) - room_of(grown, each)) for each in grown.limits)
            if tier in grown.pager_limits.limited_by and tier not in plan.pager_limits.limited_by:
                missing += plan.pager_limits.live_nbytes - grown.pager_limits.live_nbytes
            if missing <= 0:
                return {**settings, **more}, grown
            room -= missing
        return settings, plan

    def _short_nbytes(self, plan: Plan) -> int:
        """Return the bytes that the estimated activations need beyond those that the plan leaves; 0 if they fit."""
        return max(0, -self._room_nbytes(plan, plan.request.computing_tier))

    def _room_nbytes(self, plan: Plan, tier: str) -> int:
        """Return the bytes of the tier that neither the plan nor activations need; negative if they need too much."""
        limit, source = plan.limits[tier]
        room = limit - plan.needed_nbytes(tier)
        if self.estimate is None or tier != plan.request.computing_tier or RESERVED not in source:
            return room  # a limit that the config sets is without activations
        return room - max(0, self.estimate.needed_nbytes(plan.activations) - limit // (RESERVED_SHARE - 1))
