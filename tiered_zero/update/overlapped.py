"""Run updates under compute: exactly, in the order of the next forward, or one step late.

See [Note: Update policies].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from tiered_zero.concurrency.transfer import Completion, Transfer
from tiered_zero.errors import ModelError
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.step_gradients import StepGradients
from tiered_zero.tiers.unit_update import UnitUpdate
from tiered_zero.update.eager import EagerUpdate, UpdateJob
from tiered_zero.update.policy import UpdatePolicy, WeightGuard
from tiered_zero.update.stepper import StreamingStepper


class UnitGuard(WeightGuard, Protocol):
    """Keeps compute from using units whose update is under way."""

    def block_for_update(self) -> None:
        """Guard every trainable unit and drop its bytes on the device."""

    def block_unit_for_update(self, unit: Unit) -> bool:
        """Guard one unit in backward. Return False and do nothing if the unit is in use."""

    def unblock(self) -> None:
        """Unblock the units that were blocked in backward; no update has begun."""

    def begin_back_update(self) -> None:
        """Choose the back slots, which the delayed update that begins now writes."""

    def swap_param_buffers(self) -> None:
        """Swap the front and back slots of every unit. Idempotent: it is retried after a failure."""


class OverlappedPolicy(UpdatePolicy):
    """Runs updates on the update lane, under compute. `guard` blocks a unit until its last update, in `inventory`, is
    done."""

    def __init__(
        self,
        stepper: StreamingStepper,
        groups: Sequence[dict[str, Any]],
        inventory: Inventory,
        units: Sequence[Unit],
        runtime: Runtime,
        guard: UnitGuard,
        open_eagerly: Callable[[Sequence[Mapping[str, Any]], Transfer], EagerUpdate] | None = None,
    ) -> None:
        """`open_eagerly`: opens an update in backward, from frozen groups and a mark of what compute has launched; None
        if a gradient check comes first."""
        super().__init__(stepper, groups, guard)
        self._inventory = inventory
        self._units = units
        self._runtime = runtime
        self.guard = guard
        self._open_eagerly = open_eagerly
        self._open: EagerUpdate | None = None
        self._started: UpdateJob | None = None
        self._running: list[Transfer] = []
        """Jobs on the update lane, in order: at most one that still writes and one that follows it."""

    def begin_backward(self) -> None:
        if self._open_eagerly is None:
            self._prefetch()
            return
        self._wait_computed()
        self._prefetch()
        frozen = self._stepper.freeze_groups(self._groups)
        self._open = self._open_eagerly(frozen, self._stepper.record_compute())
        self._start(self._open.job)

    def unit_ready(self, unit: Unit) -> None:
        if self._open is not None and self._open.updates(unit) and self.guard.block_unit_for_update(unit):
            self._add_unit_update(unit, self._open.job)
            self._open.add(unit, self._stepper.record_compute())

    def prepare(self) -> None:
        if self._open is None:
            self._finish()
        self.guard.block_for_update()

    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        self.num_applied += 1
        if self._open is not None:
            for unit in self._open.incomplete(self._units):
                self._add_unit_update(unit, self._open.job)
            self._open.finish(gradients, self._stepper.record_compute())
            self._open = None
            return
        job = self._job(gradients, grad_scale)
        if self._stepper.has_device_state:  # [Note: State on several tiers]
            self._step(replace(job, on_device=True, computed=Completion()))
            job = replace(job, on_device=False)
        for unit in self._units:
            self._add_unit_update(unit, job)
        self._start(job)

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def drop(self, drain: Callable[[], None]) -> None:
        update, self._open = self._open, None
        has_begun = update is not None and update.cancel()
        try:
            super().drop(drain)
        finally:
            if has_begun:
                self.latch(
                    "backward or step() has failed after some of the step's updates had begun, as they do in "
                    'backward where nothing is clipped or checked. Set "tiered_zero": {"optimizer_in_backward": false} '
                    "to be able to leave a step out"
                )
            elif update is not None:
                for unit_update in update.job.unit_updates.values():
                    unit_update.complete()
                self.guard.unblock()

    def latch(self, why: str) -> None:
        if self._open is not None:
            self._open.cancel()
        super().latch(why)
        error = self.failures.error
        assert error is not None
        for unit in self._units:  # including those of a job that was never submitted
            if (unit_update := self._inventory.last_update(unit)) is not None:
                unit_update.fail(error)

    def check_untouched(self, act: str) -> None:
        if self._open is not None:
            self.check()
            raise ModelError(
                f"{act} before step(), but the update has begun in backward, as it does where nothing is clipped or "
                'checked. Call step() first, or set "tiered_zero": {"optimizer_in_backward": false} or {"update": '
                '"barrier"}.'
            )

    def _finish(self) -> None:
        self.check_untouched("Weights are looked at")
        self._join()
        self.check()

    def run_behind(self, act: Callable[[], None], after: Sequence[Transfer] = ()) -> None:
        self._running.append(self._runtime.accelerator.lane("update").submit(act, after=after))

    def _is_idle(self) -> bool:
        return all(event.done() for event in self._running)

    def _join(self) -> None:
        """Wait for the updates under way. Raises their first error, once; later `check` raises."""
        if not self._running:
            return
        errors: list[Exception] = []
        try:
            with self._runtime.recorder.span("compute", "wait_update"):
                for event in self._running:
                    try:
                        event.wait()
                    except Exception as error:
                        errors.append(error)
        finally:
            self._running = [event for event in self._running if not event.done()]  # some remain after an interrupt
        if errors:
            raise errors[0]

    def _wait_computed(self) -> None:
        """Block until the last update has read its gradients; it may still write."""
        self.check_untouched("Another backward begins")
        if self._started is not None:
            with self._runtime.recorder.span("compute", "wait_update"):
                self._started.computed.wait()
        if self._is_idle() or self.failures.error is not None:
            self._finish()

    def _add_unit_update(self, unit: Unit, job: UpdateJob) -> None:
        unit_update = job.unit_updates[unit.index] = UnitUpdate()
        self._inventory.set_last_update(unit, unit_update)
        if (error := self.failures.error) is not None:  # the job failed before it could see this update
            unit_update.fail(error)

    def _start(self, job: UpdateJob) -> None:
        while self._running and self._running[0].done():
            self._running.pop(0).wait()  # raises the error of that job, if any
        self.run_behind(partial(self._step, job), after=[job.after])
        self._runtime.accelerator.lane("update").submit(partial(self._end, job))  # even if the step was not launched
        self._started = job


class DelayedPolicy(UpdatePolicy):
    """Runs updates one step late, into the back slots of the units. `exact`: the policy of the first `start_step`
    steps; its lane runs all updates."""

    def __init__(self, exact: OverlappedPolicy, start_step: int) -> None:
        super().__init__(exact._stepper, exact._groups, exact.guard)
        self.failures = exact.failures
        self._exact = exact
        self._start_step = start_step
        self._is_unpublished = False
        """Whether an update of the back slots was begun and is not published yet."""
        self._is_publishing = False

    def begin_backward(self) -> None:
        """Do nothing: the update that runs reads ahead itself."""

    def at_cut(self, job: Callable[[], None]) -> Transfer:
        """Publish the delayed update first, so that a save holds the state of one step."""
        self._finish()
        return super().at_cut(job)

    def run_behind(self, act: Callable[[], None], after: Sequence[Transfer] = ()) -> None:
        self._exact.run_behind(act, after)

    def _is_idle(self) -> bool:
        return self._exact._is_idle()

    def prepare(self) -> None:
        if self.num_applied < self._start_step:
            self._exact.prepare()
        else:
            self._finish()

    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        self.num_applied += 1
        if self.num_applied <= self._start_step:
            self._exact.apply(gradients, grad_scale)
            return
        job = self._job(gradients, grad_scale, param_kind="param_back", every_subgroup=True)
        self._exact.guard.begin_back_update()
        self._is_unpublished = True
        self._exact.run_behind(partial(self._step, job), after=[job.after])

    def prepare_evaluation(self) -> None:
        self._finish()

    def check(self) -> None:
        super().check()
        if self._is_publishing:  # also after a failed attempt
            self._exact.guard.swap_param_buffers()
            self._is_unpublished = False
            self._is_publishing = False

    def _finish(self) -> None:
        self._exact._finish()
        self._is_publishing = self._is_unpublished
        self.check()

    def latch(self, why: str) -> None:
        self._exact.latch(why)
