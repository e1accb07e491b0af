"""When the update runs: inside step(), under the next forward, or one step late.

[Note: Update policies]
`barrier`: step() returns when every weight is updated, as DeepSpeed does.
`overlapped`: step() returns after the gradient check. The update runs on its own lane in the order in which the next
forward needs the units; using a unit waits for that unit's update and for nothing else. Update windows are nested
(last gradient out, first forward in), so this order is optimal and exact. Where no check is needed (no clipping, no
overflow check) a unit's update begins in backward, as soon as its gradients are complete; a second backward in such a
step, or reading weights or gradients before step(), is refused, for it would see both old and new
(`tiered_zero.optimizer_in_backward: false` allows them). Such a backward begins once every update of the last step is
computed; what that still writes goes on, ahead of what backward starts.
`delayed`: ZeRO-Offload's one-step delayed parameter update (Ren et al. 2021, section 5.2). After `delay_start_step`
exact steps the update of step i runs while forward and backward of step i+1 compute with the parameters from before
it: theta(i+1) = update(theta(i), gradient at theta(i-1)). New 16-bit parameters are written to other slots and
gradients are double-buffered, so neither side sees half of the other's work; the next step() publishes.

[Note: State on several tiers]
Sub-groups whose state rests on the device are updated by the driver inside step(), in compute's own order: nothing is
gained by running them later, for compute would wait for itself, and no stream has to be ordered after another. The
others follow as above, but do not begin in backward. `delayed` is refused with such state, and where all state is on
the device `barrier` is taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from tiered_zero.errors import EngineFailedError, ModelError
from tiered_zero.failure_latch import FailureLatch
from tiered_zero.hardware.process import OwnProcess
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.step_gradients import StepGradients
from tiered_zero.tiers.unit_update import UnitUpdate
from tiered_zero.transfer import Completion, Transfer
from tiered_zero.update.eager import EagerUpdate
from tiered_zero.update.stepper import StreamingStepper, UpdateJob


class UnitGuard(Protocol):
    """Keeps compute from using units whose update is under way."""

    def block_for_update(self) -> None:
        """Guard every trainable unit, and drop what the device holds of it."""

    def block_unit_for_update(self, unit: Unit) -> bool:
        """The same for one unit in backward; False, with nothing done, while the unit is in use."""

    def unblock(self) -> None:
        """The units blocked in backward are as they were: no update has begun."""


class BackSlots(Protocol):
    """The slots that a delayed update writes while compute reads the others."""

    def begin_update(self) -> None:
        """Note which slots an update that begins now writes: those that compute reads once it is published."""

    def publish(self) -> None:
        """Make compute read them. Where this is interrupted it is called again."""


class UpdatePolicy(ABC):
    """Runs updates. Called from the driver thread between backward and forward.

    `failures`: why an update failed, from the moment when it did; state is rewritten in place, so it stays.
    """

    def __init__(self, stepper: StreamingStepper, groups: Sequence[dict[str, Any]]) -> None:
        """`groups`: the live param groups."""
        self._process = OwnProcess()
        self._stepper = stepper
        self._groups = groups
        self.failures = FailureLatch()

    @property
    def failure(self) -> BaseException | None:
        return self.failures.error

    @abstractmethod
    def prepare(self) -> None:
        """Finish the updates under way, and block compute from what is about to change: the step will be applied. May
        raise, or be followed by `abort`, with nothing changed."""

    @abstractmethod
    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        """Run the update of the prepared step now, or block every read of weights that wait for it. Where this raises,
        half an update may be done: the caller then calls `latch`."""

    @abstractmethod
    def flush(self) -> None:
        """Return when every update so far is done and visible. Raises the error of one that fails during the wait, and
        EngineFailedError if one has failed before: what would be read is partly of its step."""

    def check(self) -> None:
        """Raise EngineFailedError once an update has failed, and ModelError in a forked child."""
        self._process.check()
        self.failures.check(
            lambda error: (
                f"An update failed ({error}); weights and state are partly those of its step and partly those before. "
                "Start again from the last checkpoint."
            )
        )

    def check_untouched(self, act: str) -> None:
        """Raise ModelError if the update of a step that is not taken yet has begun, and `act` comes too late."""
        return

    def begin_backward(self) -> None:
        """Begin the only backward of a step: its state may be read, and units updated as they are complete."""
        self._prefetch()

    def unit_ready(self, unit: Unit) -> None:
        """Begin the unit's update where updates begin in backward: its gradients are complete."""
        return

    def latch(self, why: str) -> None:
        """Fail after an interrupted change of weights or state, and wake every thread that waits for them. Call
        `cancel_open` and drain the lanes before; `check` raises from now on."""
        self.failures.set(EngineFailedError(why))

    @property
    def is_open(self) -> bool:
        """Whether the update of a step that is not taken yet runs, or waits for its gradients."""
        return False

    def cancel_open(self) -> None:
        """Let the open update begin nothing more, and end."""
        return

    def abort(self) -> None:
        """Drop the step; the lanes are idle since `cancel_open`. Raises nothing; latches where that is too late."""
        self.cancel_prefetch()

    def prepare_evaluation(self) -> None:
        """Make every update visible to the forward that begins. Exact policies wait for what is used, as in
        training."""
        return

    def skip(self) -> None:
        """Skip the step: it has no update of its own, but an earlier one becomes visible."""
        self.flush()

    def cancel_prefetch(self) -> None:
        """Drop the state that was read ahead. Does nothing while an update runs, which reads ahead itself."""
        if self._is_idle():
            self._stepper.cancel_prefetch()

    def finalize(self) -> None:
        """End the last update as far as it can be seen, which is in parameters that rest on the device: the engine
        ends. Raises as `flush`."""
        self._stepper.end()
        self.flush()

    def quiesce(self) -> None:
        """Return when no update runs and nothing is read ahead: state or parameters are about to be changed by
        hand."""
        self.flush()
        self.cancel_prefetch()

    def at_cut(self, job: Callable[[], None]) -> Transfer:
        """Run `job` between two updates: behind every write of the last, before the next begins. A save runs there.

        On the update lane where updates run on it, else at once. `flush` and `quiesce` wait for it; the transfer
        carries its error. Raises ModelError while an update is open in backward, EngineFailedError after a failure.
        """
        self.check_untouched("State is to be saved")
        self.check()
        cut = Completion()
        self.run_behind(partial(self._run_cut, job, cut))
        return cut

    def run_behind(self, act: Callable[[], None], after: Sequence[Transfer] = ()) -> None:
        """Run `act` behind the update that is under way."""
        act()

    def has_state(self, layout: StateLayout) -> bool:
        """Whether the sub-group has state besides its masters: from its first update on."""
        return self._stepper.has_state(layout)

    def _prefetch(self) -> None:
        if self._is_idle() and self.failure is None:
            self._stepper.prefetch()

    def _is_idle(self) -> bool:
        """Whether no update is under way."""
        return True

    def _run_cut(self, job: Callable[[], None], cut: Completion) -> None:
        try:
            self.failures.check()
            job()
        except BaseException as error:
            cut.fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            cut.complete()

    def _job(self, gradients: StepGradients, grad_scale: float, **options: Any) -> UpdateJob:
        groups = self._stepper.freeze_groups(self._groups)
        return UpdateJob(gradients=gradients, grad_scale=grad_scale, groups=groups, **options)

    def _step(self, job: UpdateJob) -> None:
        try:
            self.failures.check()  # of the job before, which was still writing when this one was started
            self._stepper.step(job)
        except BaseException as error:
            self.failures.set(error)
            for unit_update in list(job.unit_updates.values()):
                unit_update.fail(error)
            raise
        finally:
            job.computed.complete()


class BarrierPolicy(UpdatePolicy):
    """`invalidate`: drops what the device holds of trainable units. `end_update`: those that rest on the device have
    their new values."""

    def __init__(
        self,
        stepper: StreamingStepper,
        groups: Sequence[dict[str, Any]],
        invalidate: Callable[[], None],
        end_update: Callable[[], None],
    ) -> None:
        super().__init__(stepper, groups)
        self._invalidate = invalidate
        self._end_update = end_update

    def prepare(self) -> None:
        self._invalidate()

    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        self._step(self._job(gradients, grad_scale))
        self._end_update()

    def flush(self) -> None:
        self.check()  # no update is under way between steps


class OverlappedPolicy(UpdatePolicy):
    """`guard`: blocks units from compute until their updates, which `inventory` publishes."""

    def __init__(
        self,
        stepper: StreamingStepper,
        groups: Sequence[dict[str, Any]],
        inventory: Inventory,
        units: Sequence[Unit],
        runtime: Runtime,
        guard: UnitGuard,
        open_eagerly: Callable[[Sequence[Mapping[str, Any]]], EagerUpdate] | None = None,
    ) -> None:
        """`open_eagerly`: opens an update of frozen groups in backward; None where a gradient check comes first."""
        super().__init__(stepper, groups)
        self._inventory = inventory
        self._units = units
        self._runtime = runtime
        self._guard = guard
        self._open_eagerly = open_eagerly
        self._open: EagerUpdate | None = None
        self._started: UpdateJob | None = None
        self._running: list[Transfer] = []
        """Jobs on the update lane, in order: one that still writes, and one behind it."""

    def begin_backward(self) -> None:
        if self._open_eagerly is None:
            self._prefetch()
            return
        self._wait_computed()
        self._prefetch()
        self._open = self._open_eagerly(self._stepper.freeze_groups(self._groups))
        self._start(self._open.job)

    def unit_ready(self, unit: Unit) -> None:
        if self._open is not None and self._open.updates(unit) and self._guard.block_unit_for_update(unit):
            self._publish(unit, self._open.job)
            self._open.add(unit)

    def prepare(self) -> None:
        if self._open is None:
            self.flush()
        self._guard.block_for_update()

    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        if self._open is not None:
            for unit in self._open.incomplete(self._units):
                self._publish(unit, self._open.job)
            self._open.finish(gradients)
            self._open = None
            return
        job = self._job(gradients, grad_scale)
        if self._stepper.has_device_state:  # [Note: State on several tiers]
            self._step(UpdateJob(gradients=gradients, grad_scale=grad_scale, groups=job.groups, on_device=True))
            job = replace(job, on_device=False)
        for unit in self._units:
            self._publish(unit, job)
        self._start(job)

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def cancel_open(self) -> None:
        if self._open is not None:
            self._open.cancel()

    def abort(self) -> None:
        if self._open is not None:
            if self._open.cancel():
                self.latch(
                    "backward or step() was interrupted after some of the step's updates had begun, as they do in "
                    'backward where nothing is clipped or checked. Set "tiered_zero": {"optimizer_in_backward": false} '
                    "to be able to leave a step out"
                )
            else:
                for unit_update in self._open.job.unit_updates.values():
                    unit_update.complete()
                self._guard.unblock()
            self._open = None
        super().abort()

    def latch(self, why: str) -> None:
        super().latch(why)
        assert self.failure is not None
        for unit in self._units:  # also of a job that never came to its lane
            if (unit_update := self._inventory.published(unit)) is not None:
                unit_update.fail(self.failure)

    def check_untouched(self, act: str) -> None:
        if self._open is not None:
            self.check()
            raise ModelError(
                f"{act} before step(), but the update has begun in backward, as it does where nothing is clipped or "
                'checked. Call step() first, or set "tiered_zero": {"optimizer_in_backward": false} or {"update": '
                '"barrier"}.'
            )

    def flush(self) -> None:
        self.check_untouched("Weights are looked at")
        self._join()
        self.check()

    def run_behind(self, act: Callable[[], None], after: Sequence[Transfer] = ()) -> None:
        self._running.append(self._runtime.accelerator.lane("update").submit(act, after=after))

    def _is_idle(self) -> bool:
        return all(event.done() for event in self._running)

    def _join(self) -> None:
        """Wait for the updates under way. Raises the first error, once: after that `check` does."""
        self._process.check()  # a forked child has no lane whose job would end
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
            self._running = [event for event in self._running if not event.done()]  # where the wait was interrupted
        if errors:
            raise errors[0]

    def _wait_computed(self) -> None:
        """Block until the last update does not need its gradients any more, though it may still write."""
        self.check_untouched("Another backward begins")
        if self._started is not None:
            with self._runtime.recorder.span("compute", "wait_update"):
                self._started.computed.wait()
        if self._is_idle() or self.failure is not None:
            self.flush()

    def _publish(self, unit: Unit, job: UpdateJob) -> None:
        unit_update = job.unit_updates[unit.index] = UnitUpdate()
        self._inventory.publish(unit, unit_update)
        if self.failure is not None:  # the job ended before it could see this one
            unit_update.fail(self.failure)

    def _start(self, job: UpdateJob) -> None:
        self._started = job
        while self._running and self._running[0].done():
            self._running.pop(0).wait()  # its error, if it has one, ends this one too
        self.run_behind(partial(self._step, job), after=[self._runtime.accelerator.record_compute()])
        self._runtime.accelerator.lane("update").submit(job.computed.complete)  # also of a job that was not launched


class DelayedPolicy(UpdatePolicy):
    """`exact`: the policy of the first `start_step` steps, which joins the updates of all steps. `back_slots`: what the
    updates of the others write."""

    def __init__(
        self,
        exact: OverlappedPolicy,
        start_step: int,
        stepper: StreamingStepper,
        groups: Sequence[dict[str, Any]],
        back_slots: BackSlots,
    ) -> None:
        super().__init__(stepper, groups)
        self.failures = exact.failures
        self._exact = exact
        self._start_step = start_step
        self._back_slots = back_slots
        self._is_unpublished = False
        """Whether an update of the back slots was begun and not published yet."""
        self._is_publishing = False
        self._num_applied = 0

    def begin_backward(self) -> None:
        """Nothing: the update that runs reads ahead itself when it has no more to read."""

    def run_behind(self, act: Callable[[], None], after: Sequence[Transfer] = ()) -> None:
        self._exact.run_behind(act, after)

    def _is_idle(self) -> bool:
        return self._exact._is_idle()

    def prepare(self) -> None:
        if self._num_applied < self._start_step:
            self._exact.prepare()
        else:
            self.flush()

    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        self._num_applied += 1
        if self._num_applied <= self._start_step:
            self._exact.apply(gradients, grad_scale)
            return
        job = self._job(gradients, grad_scale, param_kind="param_back", every_subgroup=True)
        self._back_slots.begin_update()
        self._is_unpublished = True
        self._exact.run_behind(partial(self._step, job))

    def prepare_evaluation(self) -> None:
        self.flush()

    def check(self) -> None:
        super().check()
        if self._is_publishing:  # also what was interrupted
            self._back_slots.publish()
            self._is_unpublished = False
            self._is_publishing = False

    def flush(self) -> None:
        self._exact.flush()
        self._is_publishing = self._is_unpublished
        self.check()

    def latch(self, why: str) -> None:
        self._exact.latch(why)
