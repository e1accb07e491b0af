"""When the update runs: inside step(), beside the next forward, or one step late.

[Note: Update policies]
`barrier`: step() returns when every weight is updated, as DeepSpeed does.
`overlapped`: step() returns once the verdict is known. The update runs on its own lane in the order in which the next
forward needs the units; using a unit waits for that unit's unit_update and for nothing else. Update windows are
nested (last gradient out, first forward in), so this order is optimal and exact. Where no verdict is needed (no
clipping, no overflow check) a unit's update begins in backward, as soon as its last gradient has come; a second
backward in such a step, or a look at weights or gradients before step(), is refused, for it would see both old and new
(`tiered_zero.optimizer_in_backward: false` allows them). Such a
backward begins once every update of the last step is computed; what that still writes goes on, ahead of what it starts.
`delayed`: ZeRO-Offload's one-step delayed parameter update (Ren et al. 2021, section 5.2). After `delay_start_step`
exact steps the update of step i runs while forward and backward of step i+1 compute with the parameters from before
it: theta(i+1) = update(theta(i), gradient at theta(i-1)). New 16-bit parameters are written behind the scenes and
gradients are double-buffered, so neither side sees the other's half-done work; the next step() publishes.

[Note: State on several tiers]
Sub-groups whose state rests on the device are updated by the driver inside step(), in compute's own order: nothing is
gained by running them later, for compute would wait for itself, and no stream has to be ordered after another. The
others follow as above, but do not begin in backward. `delayed` is refused with such state, and where all state is on
the device `barrier` is taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from tiered_zero.errors import EngineFailedError, ModelError
from tiered_zero.hardware.process import OwnProcess
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.step_gradients import StepGradients
from tiered_zero.tiers.unit_update import UnitUpdate
from tiered_zero.transfer import Transfer
from tiered_zero.update.eager import BackwardStart, OpenUpdate
from tiered_zero.update.stepper import StreamingStepper, UpdateJob

_POLL_S = 0.25
"""How often it is looked at whether an update has failed."""


class UnitGuard(Protocol):
    """Keeps compute from using units whose update is under way."""

    def block_for_update(self) -> None:
        """Guard every trainable unit, and drop what the device holds of it."""

    def block_unit_for_update(self, unit: Unit) -> bool:
        """The same for one unit in backward; False, with nothing done, while somebody uses it."""

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

    `failure`: why an update broke off, from the moment when it did; state is rewritten in place, so it stays.
    """

    def __init__(self, stepper: StreamingStepper, groups: Sequence[dict[str, Any]]) -> None:
        """`groups`: the live param groups."""
        self._process = OwnProcess()
        self._stepper = stepper
        self._groups = groups
        self.failure: BaseException | None = None
        self._running: list[Transfer] = []
        """Jobs on the lane, in order: one that still writes, and one behind it."""

    @abstractmethod
    def prepare(self) -> None:
        """The step will be applied: end what was under way, and take from compute what is about to change. May break
        off, or be followed by `abort`, with nothing changed."""

    @abstractmethod
    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        """Run the update of the prepared step now, or block every read of weights that wait for it. What breaks
        this off leaves half an update: the caller then calls `latch`."""

    @abstractmethod
    def flush(self) -> None:
        """Return when every update so far is made and visible. Raises what makes one fail meanwhile, and
        EngineFailedError where one has failed before: what is to be read is partly of its step."""

    def check(self) -> None:
        """Raises EngineFailedError once an update has failed, and ModelError in a forked child."""
        self._process.check()
        if self.failure is not None:
            raise EngineFailedError(
                f"An update failed ({self.failure}); weights and state are partly those of its step and partly those "
                "before. Start again from the last checkpoint."
            ) from self.failure

    def check_untouched(self, act: str) -> None:
        """Raises ModelError where the update of a step that is not taken yet has begun, and `act` comes too late."""
        return

    def begin_backward(self) -> None:
        """The only backward of a step begins: its state may be read, and units may be updated as they are completed."""
        self._read_ahead()

    def complete_unit(self, unit: Unit) -> None:
        """Every gradient of the unit has come."""
        return

    def latch(self, why: str) -> None:
        """Latch after an interrupted change of weights or state. Wakes every thread that waits for them. Call
        `give_up` and drain the lanes before, and `check` raises from now on."""
        if self.failure is None:
            self.failure = EngineFailedError(why)

    @property
    def is_open(self) -> bool:
        """Whether the update of a step that is not taken yet runs, or waits for its gradients."""
        return False

    def give_up(self) -> None:
        """The update that is open begins with nothing any more, and ends."""
        return

    def abort(self) -> None:
        """The step is given up, and the lanes are idle since `give_up`. Raises nothing; sets `failure` where that is
        too late."""
        self.cancel_prefetch()

    def prepare_evaluation(self) -> None:
        """A forward begins that shall see every update. Exact policies wait for what is used, as in training."""
        return

    def skip(self) -> None:
        """The step is skipped: it has no update of its own, but an earlier one becomes visible."""
        self.flush()

    def cancel_prefetch(self) -> None:
        """A step is given up, or the engine ends: nothing that was read ahead is used. Does nothing while an update
        runs, which reads ahead itself."""
        if self._is_idle():
            self._stepper.cancel_prefetch()

    def finalize(self) -> None:
        """The engine ends: return when the last update is made as far as it can be seen, which is in parameters
        that rest on the device. Raises as `flush`."""
        self._stepper.end()
        self.flush()

    def settle(self) -> None:
        """State or parameters are about to be changed by hand: no update runs, and nothing is read ahead."""
        self.flush()
        self.cancel_prefetch()

    def has_state(self, layout: StateLayout) -> bool:
        """Whether the sub-group has state besides its masters: from its first update on."""
        return self._stepper.has_state(layout)

    def _read_ahead(self) -> None:
        if self._is_idle() and self.failure is None:
            self._stepper.read_ahead()

    def _is_idle(self) -> bool:
        return all(event.done() for event in self._running)

    def _join(self, runtime: Runtime) -> bool:
        """Wait for the updates under way; False without any. Raises the first error, once: then `check` does."""
        self._process.check()  # a forked child has no lane whose job would end
        if not self._running:
            return False
        errors: list[Exception] = []
        try:
            with runtime.recorder.span("compute", "wait_update"):
                for event in self._running:
                    try:
                        event.wait()
                    except Exception as error:
                        errors.append(error)
        finally:
            self._running = [event for event in self._running if not event.done()]  # where the wait was interrupted
        if errors:
            raise errors[0]
        return True

    def _step(self, job: UpdateJob) -> None:
        try:
            if self.failure is not None:  # of the job before, which was still writing when this one was started
                raise self.failure
            self._stepper.step(job)
        except BaseException as error:
            self.failure = error
            for unit_update in list(job.unit_updates.values()):
                unit_update.fail(error)
            raise
        finally:
            job.made.set()


class BarrierPolicy(UpdatePolicy):
    """`forget`: drops what the device holds of trainable units. `end_update`: those that stay on the device have their
    new values."""

    def __init__(
        self,
        stepper: StreamingStepper,
        groups: Sequence[dict[str, Any]],
        forget: Callable[[], None],
        end_update: Callable[[], None],
    ) -> None:
        super().__init__(stepper, groups)
        self._forget = forget
        self._end_update = end_update

    def prepare(self) -> None:
        self._forget()

    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        self._step(UpdateJob(gradients, grad_scale, self._stepper.freeze_groups(self._groups), {}))
        self._end_update()

    def flush(self) -> None:
        self.check()  # nothing is ever under way between steps


class OverlappedPolicy(UpdatePolicy):
    """`guard`: takes units from compute until their unit_update, which `inventory` hands to whoever asks."""

    def __init__(
        self,
        stepper: StreamingStepper,
        groups: Sequence[dict[str, Any]],
        inventory: Inventory,
        units: Sequence[Unit],
        runtime: Runtime,
        guard: UnitGuard,
        in_backward: BackwardStart | None = None,
    ) -> None:
        """`in_backward`: how updates begin in backward; None where a verdict comes first."""
        super().__init__(stepper, groups)
        self._inventory = inventory
        self._units = units
        self._runtime = runtime
        self._guard = guard
        self._in_backward = in_backward
        self._open: OpenUpdate | None = None
        self._started: UpdateJob | None = None

    def begin_backward(self) -> None:
        if self._in_backward is None:
            self._read_ahead()
            return
        self._await_made()
        self._read_ahead()
        self._open = OpenUpdate(self._in_backward, self._stepper.freeze_groups(self._groups))
        self._start(self._open.job)

    def complete_unit(self, unit: Unit) -> None:
        if self._open is not None and self._open.concerns(unit) and self._guard.block_unit_for_update(unit):
            self._publish(unit, self._open.job)
            self._open.add(unit)

    def prepare(self) -> None:
        if self._open is None:
            self.flush()
        self._guard.block_for_update()

    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        if self._open is not None:
            for unit in self._open.missing(self._units):
                self._publish(unit, self._open.job)
            self._open.finish(gradients)
            self._open = None
            return
        groups = self._stepper.freeze_groups(self._groups)
        on_device: bool | None = None
        if self._stepper.has_device_state:  # [Note: State on several tiers]
            self._step(UpdateJob(gradients, grad_scale, groups, {}, on_device=True))
            on_device = False
        job = UpdateJob(gradients, grad_scale, groups, {}, on_device=on_device)
        for unit in self._units:
            self._publish(unit, job)
        self._start(job)

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def give_up(self) -> None:
        if self._open is not None:
            self._open.give_up()

    def abort(self) -> None:
        if self._open is not None:
            if self._open.give_up():
                self.latch(
                    "backward or step() broke off after some of the step's updates had begun, as they do in backward "
                    'where nothing is clipped or checked. Set "tiered_zero": {"optimizer_in_backward": false} to be '
                    "able to leave a step out"
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
        self._join(self._runtime)
        self.check()

    def _await_made(self) -> None:
        """Block until the last update has no use for its gradients any more, though it may still write."""
        self.check_untouched("Another backward begins")
        if self._started is not None:
            with self._runtime.recorder.span("compute", "wait_update"):
                while not (self._started.made.wait(_POLL_S) or self._is_idle()):
                    pass  # a lane that has failed never begins the job
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
            self._running.pop(0).wait()  # what it made fail, if anything, ends this one too
        accelerator = self._runtime.accelerator
        after = [accelerator.record_compute()]
        self._running.append(accelerator.lane("optimizer").submit(partial(self._step, job), after=after))


class DelayedPolicy(UpdatePolicy):
    """`exact`: the policy of the first `start_step` steps. `back_slots`: what the updates of the others write."""

    def __init__(
        self,
        exact: UpdatePolicy,
        start_step: int,
        stepper: StreamingStepper,
        groups: Sequence[dict[str, Any]],
        runtime: Runtime,
        back_slots: BackSlots,
    ) -> None:
        super().__init__(stepper, groups)
        self._exact = exact
        self._start_step = start_step
        self._runtime = runtime
        self._back_slots = back_slots
        self._is_unpublished = False
        """Whether an update of the back slots was begun and not published yet."""
        self._is_publishing = False
        self._num_applied = 0

    def begin_backward(self) -> None:
        """An update runs beside it, and reads ahead itself when it has no more to read."""

    def _is_idle(self) -> bool:
        return super()._is_idle() and self._exact._is_idle()

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
        groups = self._stepper.freeze_groups(self._groups)
        self._back_slots.begin_update()
        self._is_unpublished = True
        job = UpdateJob(gradients, grad_scale, groups, {}, param_kind="param_back", every_subgroup=True)
        self._running.append(self._runtime.accelerator.lane("optimizer").submit(partial(self._step, job)))

    def prepare_evaluation(self) -> None:
        self.flush()

    def check(self) -> None:
        self._exact.check()
        super().check()
        if self._is_publishing:  # also what was interrupted
            self._back_slots.publish()
            self._is_unpublished = False
            self._is_publishing = False

    def flush(self) -> None:
        self._exact.flush()
        self._join(self._runtime)
        self._is_publishing = self._is_unpublished
        self.check()

    def latch(self, why: str) -> None:
        self._exact.latch(why)
        super().latch(why)
