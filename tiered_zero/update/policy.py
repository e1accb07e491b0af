"""Decide when an update runs: inside step(), under the next forward, or one step late.

[Note: Update policies]
`barrier`: step() returns when every weight is updated, as in DeepSpeed.
`overlapped`: step() returns after the gradient check. The update runs on its own lane in the order in which the next
forward needs the units; using a unit waits for that unit's update only. Update windows are nested (the last gradient to
complete belongs to the first unit of forward), so this order is optimal, and results are exact. Without clipping and
overflow check a unit's update begins in backward, as soon as its gradients are complete. A second backward in such a
step, or reading weights or gradients before step(), would see both old and new values and is refused
(`tiered_zero.optimizer_in_backward: false` allows them). Such a backward begins once every update of the last step is
computed; the last writes go on, ahead of those that backward starts.
`delayed`: ZeRO-Offload's one-step delayed parameter update (Ren et al. 2021, section 5.2). After `delay_start_step`
exact steps the update of step i runs while forward and backward of step i+1 compute with the parameters from before
it: theta(i+1) = update(theta(i), gradient at theta(i-1)). New 16-bit parameters go to separate back slots and
gradients are double-buffered, so neither side sees half of the other's work; the next step() publishes the new values.

[Note: Update of shards]
If ranks hold shards of the state but whole parameters, `barrier` runs on every rank: the update lane steps this rank's
shards, and the driver starts to gather each unit once its shard is written, in static order. So gathers overlap the
updates of later units, every rank issues them in the same order, and weights are whole when step() returns.
`overlapped` would leave gathers to the next forward, which one rank alone may run; `delayed` to the first read of
weights, which may differ between ranks.

[Note: State on several tiers]
The driver updates sub-groups whose state rests on the device inside step(), in compute's own order: running them later
gains nothing, since compute would wait for itself, and this order needs no synchronization of streams. The other
sub-groups follow as above, but do not begin in backward. `delayed` is refused with such state; if all state is on the
device, `barrier` is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tiered_zero.concurrency.transfer import Completion, FailureLatch, Transfer, wait_all
from tiered_zero.errors import EngineFailedError, ModelError
from tiered_zero.layout.flat import Unit
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.tiers.step_gradients import GradientSource, StepGradients
from tiered_zero.tiers.unit_update import UnitUpdate
from tiered_zero.unit.pager import Pager, WholeWeights
from tiered_zero.update.pipeline import ReadyQueue, UpdateJob, UpdatePipeline, has_gradient


class UpdatePolicy(ABC):
    """Runs updates. The driver calls it between backward and forward. `failures`: keeps the error of a failed update.
    State is rewritten in place, so no later step runs."""

    def __init__(self, pipeline: UpdatePipeline, pager: Pager | None) -> None:
        """`pager`: keeps compute from using weights of before an update; None without an engine."""
        self._pipeline = pipeline
        self._pager = pager
        self.view = pipeline.view
        self.failures = FailureLatch()
        self.num_applied = 0
        """Steps applied so far, including those before a resume."""

    @abstractmethod
    def prepare(self) -> None:
        """Finish the updates under way and block compute from what is about to change. If this raises, or `drop`
        follows, nothing has changed."""

    @abstractmethod
    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        """Run the update of the prepared step now, or block every read of weights that must wait for it. If this
        raises, half an update may be done: the caller then calls `latch`."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait for the updates under way and make them visible."""

    # -- ways to end an update -----------------------------------------------------------------------------------------

    def finish(self, *, before_write: bool = False) -> None:
        """Return when every update so far is done and visible.

        Raises the error of an update that fails during the wait, and EngineFailedError if one has failed before, since
        state is then partly new. `before_write`: the caller is about to change state or parameters, so drop what was
        read ahead and wait for a save that reads them.
        """
        self._finish()
        if before_write:
            self._cancel_prefetch()
            self._pipeline.wait_held()

    def drop(self, drain: Callable[[], None]) -> None:
        """Drop the step: begin no more of its updates and drop what was read ahead. `drain`: blocks until the lanes are
        idle. Raises only what `drain` raises. Latches if half of the update is done."""
        drain()
        self._cancel_prefetch()

    def latch(self, why: str) -> None:
        """Record a change of weights or state that was not completed, and wake every thread that waits for it. From now
        on `check` raises."""
        self.failures.set(EngineFailedError(why))

    # -- in a step -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise EngineFailedError if an update has failed."""
        if self.failures.error is not None:
            self.failures.check(_refusal)

    def check_untouched(self, act: str) -> None:
        """Raise ModelError if an eager update is open, so that `act` comes too late."""
        return

    def update_now(self, gradients: GradientSource) -> None:
        """Run an update on this thread, between two steps, that changes no weight and does not count as a step. It
        needs no other rank."""
        self.finish(before_write=True)
        self._step(self._job(gradients, 1.0))
        self._end_update()

    def begin_backward(self) -> None:
        """Prepare for the only backward of a step: read its state ahead and allow updates of complete units."""
        self._prefetch()

    def unit_ready(self, unit: Unit) -> None:
        """Begin the unit's update, now that its gradients are complete, if updates begin in backward."""
        return

    @property
    def is_open(self) -> bool:
        """Whether an eager update runs or waits for gradients, before step() has taken its step."""
        return False

    def prepare_evaluation(self) -> None:
        """Make every update visible to the forward that begins. Exact policies do nothing here: using a unit waits for
        its update."""
        return

    def at_cut(self, job: Callable[[], None]) -> Transfer:
        """Run `job` between two updates: after every write of the last, before the next begins. An asynchronous save
        starts there. It runs on the update lane if updates do, else at once. `finish` waits for it; the transfer
        carries its error. Raises ModelError while an update is open in backward, and EngineFailedError after a
        failure."""
        self.check_untouched("State is to be saved")
        self.check()
        cut = Completion()
        self.run_behind(partial(self._run_cut, job, cut))
        return cut

    def run_behind(self, act: Callable[[], None], after: Sequence[Transfer] = ()) -> None:
        """Run `act` after the update that is under way."""
        act()

    def _cancel_prefetch(self) -> None:
        """Drop the state that was read ahead, unless an update runs, which reads ahead itself."""
        if self._is_idle():
            self._pipeline.cancel_prefetch()

    def _prefetch(self) -> None:
        if self._is_idle() and self.failures.error is None:
            self._pipeline.prefetch()

    def _is_idle(self) -> bool:
        """Return whether no update is under way."""
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

    def _job(self, gradients: GradientSource, grad_scale: float, **options: Any) -> UpdateJob:
        groups = self._pipeline.freeze_groups()
        after = self._pipeline.record_compute()
        return UpdateJob(gradients=gradients, grad_scale=grad_scale, groups=groups, after=after, **options)

    def _step(self, job: UpdateJob) -> None:
        try:
            if self.failures.error is not None:
                self.failures.check()  # the job before may have failed after this one was started
            self._pipeline.step(job)
        except BaseException as error:
            self.failures.set(error)
            for unit_update in list(job.unit_updates.values()):
                unit_update.fail(error)
            raise
        finally:
            self._end(job)

    def _end_update(self) -> None:
        """Mark the values of resident units as new."""
        if self._pager is not None:
            self._pager.end_update()

    @staticmethod
    def _end(job: UpdateJob) -> None:
        """Release the job's gradients and complete it, even if it was never launched."""
        if not job.on_device:  # the job for the other tiers still needs the gradients
            job.gradients.release_all()
        job.computed.complete()


def _refusal(error: BaseException) -> str:
    """Explain why nothing can go on after `error`, and what to do."""
    if isinstance(error, EngineFailedError) and error.__cause__ is None:  # set by `latch`
        text = f"{error}; weights and state are partly new and partly those before."
    else:
        text = (
            f"An update failed ({str(error) or type(error).__name__}); weights and state are partly those of its step "
            "and partly those before."
        )
    return f"{text} Build another engine, and load the last checkpoint."


class BarrierPolicy(UpdatePolicy):
    """Runs updates inside step()."""

    def prepare(self) -> None:
        if self._pager is not None:
            self._pager.invalidate()

    def apply(self, gradients: GradientSource, grad_scale: float) -> None:
        self.num_applied += 1
        self._step(self._job(gradients, grad_scale))
        self._end_update()

    def apply_in_order(
        self,
        gradients: GradientSource,
        grad_scale: float,
        units: Sequence[Unit],
        written: Callable[[Unit], None],
    ) -> None:
        """Apply on the update lane. For each of `units` that has a gradient, in order, call `written` on the driver
        once its parameters are written, while later units are updated."""
        self.num_applied += 1
        runtime = self._pipeline.runtime
        changed = [u for u in units if any(gradients.has(u, entry.param) for entry in u.entries)]
        updates = {unit.index: UnitUpdate() for unit in changed}
        job = self._job(gradients, grad_scale, unit_updates=updates)
        update = runtime.accelerator.lane("update").submit(partial(self._step, job), after=[job.after])
        try:
            for unit in changed:
                with runtime.recorder.span("compute", "wait_update", unit.name):
                    updates[unit.index].written.wait()
                written(unit)
        finally:
            update.wait()  # raises the original error, ahead of the unit's

    def _finish(self) -> None:
        self.check()  # no update is under way between steps


class GatheringPolicy(BarrierPolicy):
    """Updates this rank's shards inside step() and gathers those of all ranks. See [Note: Update of shards]."""

    def __init__(self, pipeline: UpdatePipeline, pager: Pager, gather: WholeWeights) -> None:
        super().__init__(pipeline, pager)
        self._gather = gather

    def apply(self, gradients: GradientSource, grad_scale: float) -> None:
        gathers: list[Transfer] = []
        self.apply_in_order(  # ranks have agreed which units have gradients
            gradients, grad_scale, self._gather.units, lambda unit: gathers.append(self._gather.start(unit))
        )
        with self._pipeline.runtime.recorder.span("compute", "wait_param"):
            wait_all(gathers)
        self._end_update()


class EagerUpdate:
    """Queues a sub-group of a running job as soon as the gradients of all its units are complete. Driver thread.

    `freeze(unit, into)` moves a unit's gradients from the gradient store to the job. `keep(unit)` is called once every
    sub-group of the unit is queued: its gradients may then stay in place until they are used.
    """

    def __init__(
        self,
        layouts: Sequence[StateLayout],
        freeze: Callable[[Unit, StepGradients], None],
        keep: Callable[[Unit], None],
        groups: Sequence[Mapping[str, Any]],
        after: Transfer,
    ) -> None:
        self._layouts = layouts
        self._layouts_of: dict[int, list[StateLayout]] = {}
        """Unit -> the sub-groups that hold a part of it."""
        self._freeze, self._keep = freeze, keep
        self._queue = ReadyQueue()
        self._waits_for = {
            layout.subgroup.index: {segment.unit.index for segment in layout.subgroup.segments} for layout in layouts
        }
        for layout in layouts:
            for index in self._waits_for[layout.subgroup.index]:
                self._layouts_of.setdefault(index, []).append(layout)
        self._queued: set[int] = set()
        self._gradients = StepGradients()
        self.job = UpdateJob(gradients=self._gradients, grad_scale=1.0, groups=groups, after=after, queue=self._queue)

    def updates(self, unit: Unit) -> bool:
        """Return whether a sub-group holds a part of the unit."""
        return unit.index in self._layouts_of

    def incomplete(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units whose gradients were not complete in backward."""
        return [unit for unit in units if unit.index not in self.job.unit_updates]

    def add(self, unit: Unit, after: Transfer) -> None:
        """Begin the unit's update: its gradients are complete, and compute reads its parameters only until `after`."""
        self._freeze(unit, self._gradients)
        for layout in self._layouts_of[unit.index]:
            waits_for = self._waits_for[layout.subgroup.index]
            waits_for.discard(unit.index)
            if not waits_for and layout.subgroup.index not in self._queued:
                self._queued.add(layout.subgroup.index)
                self.job.after_of[layout.subgroup.index] = after
                self._queue.add(layout)
                for segment in layout.subgroup.segments:
                    if all(own.subgroup.index in self._queued for own in self._layouts_of[segment.unit.index]):
                        self._keep(segment.unit)

    def finish(self, gradients: StepGradients, after: Transfer) -> None:
        """Queue the remaining sub-groups that have a gradient, skip the others, and close the queue. `step()` calls
        this. `after`: what compute has launched."""
        self._gradients.fill(gradients)
        skipped: list[StateLayout] = []
        for layout in self._layouts:
            if layout.subgroup.index in self._queued:
                continue
            if has_gradient(layout.subgroup, self._gradients):
                self.job.after_of[layout.subgroup.index] = after
                self._queue.add(layout)
            else:
                skipped.append(layout)
        self._queue.close(skipped)

    def cancel(self) -> bool:
        """End the job without the sub-groups that it has not begun. Return whether it may have begun any."""
        self._queue.clear()
        self._queue.close()
        return bool(self._queued)


class OverlappedPolicy(UpdatePolicy):
    """Runs updates on the update lane, under compute. A unit is blocked until its last update, which the inventory
    has, is done."""

    def __init__(
        self,
        pipeline: UpdatePipeline,
        pager: Pager,
        open_eagerly: Callable[[Sequence[Mapping[str, Any]], Transfer], EagerUpdate] | None = None,
    ) -> None:
        """`open_eagerly`: opens an update in backward, from frozen groups and a mark of what compute has launched; None
        if a gradient check comes first."""
        super().__init__(pipeline, pager)
        self._inventory = self.view.inventory
        segments = [segment for layout in self.view.layouts for segment in layout.subgroup.segments]
        self._units = list({segment.unit.index: segment.unit for segment in segments}.values())
        self._runtime = pipeline.runtime
        self.pager = pager
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
        frozen = self._pipeline.freeze_groups()
        self._open = self._open_eagerly(frozen, self._pipeline.record_compute())
        self._start(self._open.job)

    def unit_ready(self, unit: Unit) -> None:
        if self._open is not None and self._open.updates(unit) and self.pager.block_unit_for_update(unit):
            self._add_unit_update(unit, self._open.job)
            self._open.add(unit, self._pipeline.record_compute())

    def prepare(self) -> None:
        if self._open is None:
            self._finish()
        self.pager.block_for_update()

    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        self.num_applied += 1
        if self._open is not None:
            for unit in self._open.incomplete(self._units):
                self._add_unit_update(unit, self._open.job)
            self._open.finish(gradients, self._pipeline.record_compute())
            self._open = None
            return
        job = self._job(gradients, grad_scale)
        if self._pipeline.has_device_state:  # [Note: State on several tiers]
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
                self.pager.unblock()

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
        super().__init__(exact._pipeline, exact.pager)
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
        self._exact.pager.begin_back_update()
        self._is_unpublished = True
        self._exact.run_behind(partial(self._step, job), after=[job.after])

    def prepare_evaluation(self) -> None:
        self._finish()

    def check(self) -> None:
        super().check()
        if self._is_publishing:  # also after a failed attempt
            self._exact.pager.swap_param_buffers()
            self._is_unpublished = False
            self._is_publishing = False

    def _finish(self) -> None:
        self._exact._finish()
        self._is_publishing = self._is_unpublished
        self.check()

    def latch(self, why: str) -> None:
        self._exact.latch(why)
