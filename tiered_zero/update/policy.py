"""Decide when an update runs: inside step(), under the next forward, or one step late.

[Note: Update policies]
`barrier`: step() returns when every weight is updated, as in DeepSpeed.
`overlapped`: step() returns after the gradient check. The update runs on its own lane, in the order in which the next
forward needs the units. A forward that uses a unit waits only for that unit's update. Results are exact. No other order
is better: the gradients of forward's first unit complete last, and its new weights are needed first.
Without clipping and overflow check a unit's update begins in backward, once its gradients are complete. A second
backward, or reading weights or gradients before step(), would then see old and new values, and is refused
(`tiered_zero.optimizer_in_backward: false` allows both). A backward in which updates begin first waits until the last
update is computed, not until it is written.
`delayed`: ZeRO-Offload's one-step delayed parameter update (Ren et al. 2021, section 5.2). After `delay_start_step`
exact steps the update of step i runs during forward and backward of step i+1, which compute with the parameters from
before it: theta(i+1) = update(theta(i), gradient at theta(i-1)). New 16-bit parameters go to back slots, and gradients
are double-buffered. The next step() makes the new values visible.

[Note: Update of shards]
If ranks hold shards of the state but whole parameters, `barrier` runs on every rank. The update lane steps this rank's
shards. The driver starts to gather each unit once its shard is written, in static order, which is the same on every
rank. Weights are whole when step() returns.
The other policies would gather in the next forward, or when weights are first read: but a rank may do either alone.

[Note: State on several tiers]
Sub-groups with state on the device are updated inside step(), by the driver, on the stream of compute. (A later update
gains nothing: compute would wait for itself.) The other sub-groups are updated as above, but not in backward. `delayed`
is refused with state on the device; if all state is on the device, `barrier` is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import nn

from tiered_zero.concurrency.transfer import Completion, FailureLatch, Transfer, wait_all
from tiered_zero.errors import EngineFailedError, ModelError
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import Segment
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.tiers.step_gradients import GradientSource, StepGradients
from tiered_zero.tiers.tier import UnitUpdate
from tiered_zero.unit.pager import Pager, WholeWeights
from tiered_zero.update.pipeline import ReadyQueue, UpdateJob, UpdatePipeline, has_gradient


@final
class ZeroGradients(GradientSource):
    """Gradients for an update that creates state: zeros for the parameters in `names`, none for others."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def has(self, unit: Unit, param: ParamSpec) -> bool:
        return param.name in self._names

    def part(self, segment: Segment) -> torch.Tensor:
        return torch.zeros(segment.numel)


class UpdatePolicy(ABC):
    """Decides when updates run, and runs them. The driver thread calls it between backward and forward. `failures`:
    remembers the error of the first failed update; no step runs after it, because an update rewrites state in place."""

    def __init__(self, pipeline: UpdatePipeline, pager: Pager | None) -> None:
        """`pager`: blocks compute from using old weights during an update; None without an engine."""
        self._pipeline = pipeline
        self._pager = pager
        self.view = pipeline.view
        self.failures = FailureLatch()
        self.num_applied = 0
        """The number of steps applied so far, including steps before a resume."""

    @abstractmethod
    def prepare(self) -> None:
        """Prepare a step: finish the updates under way, and let compute use no weights that this step is about to
        change. If this raises, no weight has changed, except by updates that began in backward."""

    @abstractmethod
    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        """Run the update of the prepared step; or start it, and make each read of weights wait for it. If this raises,
        the caller calls `latch`, because the update may be partly done."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait for the updates under way and make them visible."""

    # -- ways to end an update -----------------------------------------------------------------------------------------

    def finish(self, *, before_write: bool = False) -> None:
        """Wait until every update so far is complete and visible to compute. Raises the error of an update that fails
        now, and EngineFailedError if one has failed before. `before_write`: whether the caller will change state or
        parameters; if so, also drop the state that was read ahead, and wait for a running save."""
        self._finish()
        if before_write:
            self._cancel_prefetch()
            self._pipeline.wait_held()

    def drop(self, drain: Callable[[], None]) -> None:
        """Drop the step, and the state that was read ahead. If updates of the step may have begun in backward, also
        `latch`. `drain`: blocks until the lanes are idle. Raises only errors of `drain`."""
        drain()
        self._cancel_prefetch()

    def latch(self, why: str) -> None:
        """Record that a change of weights or state was not completed, for the reason `why`. From now on `check`, and
        waits for unfinished updates, raise EngineFailedError."""
        self.failures.set(EngineFailedError(why))

    # -- in a step -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise EngineFailedError if an update has failed."""
        if self.failures.error is not None:
            self.failures.check(_refusal)

    def check_untouched(self, act: str) -> None:
        """Raise ModelError if an update that began in backward still waits for its step(). Its message begins with
        `act`."""
        return

    def create_state(self, params: Collection[nn.Parameter]) -> None:
        """Create the state of `params` by an update with zero gradients, which changes no weight and counts no step.
        Called between two steps. Other ranks need not call it."""
        self.finish(before_write=True)
        self._step(self._job(ZeroGradients(self.view.names_of(params)), 1.0))
        self._end_update()

    def begin_backward(self) -> None:
        """Prepare for a backward that is probably the last one before a `step()` that updates: start to read state
        ahead. If updates begin in backward, start the job to which `unit_ready` adds units."""
        self._prefetch()

    def unit_ready(self, unit: Unit) -> None:
        """Begin the unit's update, if updates begin in backward. Called when the unit's gradients are complete."""
        return

    @property
    def is_open(self) -> bool:
        """Whether an update that began in backward waits for its step()."""
        return False

    def prepare_evaluation(self) -> None:
        """Make every update visible before a forward in evaluation."""
        return  # with an exact policy each use of a unit waits for its update

    def at_cut(self, job: Callable[[], None]) -> Transfer:
        """Run `job` between two updates: on the update lane behind the update under way, or in this call if updates run
        inside step(). Return a transfer that completes when the job ends, and carries its error. Raises ModelError if
        an update that began in backward still waits for its step(), and EngineFailedError after a failure."""
        self.check_untouched("State is to be saved")
        self.check()
        cut = Completion()
        self.run_behind(partial(self._run_cut, job, cut))
        return cut

    def run_behind(self, act: Callable[[], None], after: Sequence[Transfer] = ()) -> None:
        """Run `act` after the update under way and the transfers in `after`, on the update lane. If updates run inside
        step(), run it in this call."""
        act()

    def _cancel_prefetch(self) -> None:
        """Drop the state that was read ahead, unless an update runs, which uses it."""
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
        after = self._pipeline.runtime.accelerator.record_compute()
        return UpdateJob(gradients=gradients, grad_scale=grad_scale, groups=groups, after=after, **options)

    def _step(self, job: UpdateJob) -> None:
        try:
            if self.failures.error is not None:
                self.failures.check()  # the job before may have failed after this one was started
            self._pipeline.step(job)
        except BaseException as error:
            self.failures.set(error)
            job.fail(error)
            raise
        finally:
            self._end(job)

    def _end_update(self) -> None:
        """Record in the pager that units on the device have their new values."""
        if self._pager is not None:
            self._pager.end_update()

    @staticmethod
    def _end(job: UpdateJob) -> None:
        """Release the job's gradients, and complete its `computed`. Called also for a job that was never launched."""
        if not job.on_device:  # the job for the other tiers still needs the gradients
            job.gradients.release_all()
        job.computed.complete()


def _refusal(error: BaseException) -> str:
    """Return the message of the EngineFailedError that calls after the failure `error` raise."""
    if isinstance(error, EngineFailedError) and error.__cause__ is None:  # set by `latch`
        text = f"{error}; weights and state are partly new and partly those before."
    else:
        text = (
            f"An update failed ({str(error) or type(error).__name__}); weights and state are partly those of its step "
            "and partly those before."
        )
    return f"{text} Build another engine, and load the last checkpoint."


class BarrierPolicy(UpdatePolicy):
    """Runs each update inside step(): `barrier`."""

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
        """Run the update on the update lane. For each of `units` with a gradient, in order, call `written(unit)` on the
        driver thread once the unit's parameters are written."""
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
    """Updates this rank's shards inside step(), and gathers each unit. See [Note: Update of shards]."""

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
    """An update that begins in backward. A sub-group is queued once the gradients of all units in it are complete. Used
    on the driver thread.

    `freeze(unit, into)`: moves a unit's gradients from the gradient store to `into`. `keep(unit)`: called once every
    sub-group of the unit is queued; its gradients then stay in host memory until the update has read them."""

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
        """Unit index -> the sub-groups that hold a part of the unit."""
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
        """Return whether the update has a sub-group with a part of the unit."""
        return unit.index in self._layouts_of

    def incomplete(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the members of `units` that were not added: their gradients were not complete in backward."""
        return [unit for unit in units if unit.index not in self.job.unit_updates]

    def add(self, unit: Unit, after: Transfer) -> None:
        """Add a unit with complete gradients, and queue its sub-groups that wait for no other unit. `after`: ends when
        compute no longer reads the unit's parameters."""
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
        """Queue the remaining sub-groups with a gradient, skip the others, and close the queue. `gradients`: all
        gradients of the step. `after`: a transfer that ends when all work launched by compute so far is done."""
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
        """End the job, and remove the sub-groups that it has not begun. Return whether it may have updated a
        sub-group."""
        self._queue.clear()
        self._queue.close()
        return bool(self._queued)


class OverlappedPolicy(UpdatePolicy):
    """Runs updates on the update lane while compute goes on: `overlapped`. Each use of a unit waits for the unit's last
    update, which the inventory keeps."""

    def __init__(
        self,
        pipeline: UpdatePipeline,
        pager: Pager,
        open_eagerly: Callable[[Sequence[Mapping[str, Any]], Transfer], EagerUpdate] | None = None,
    ) -> None:
        """`open_eagerly(groups, after)`: makes an update that begins in backward; None if a gradient check comes first.
        `after`: ends when all work launched by compute so far is done."""
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
        """The jobs on the update lane, in order: at most one that still writes, and one after it."""

    def begin_backward(self) -> None:
        if self._open_eagerly is None:
            self._prefetch()
            return
        self._wait_computed()
        self._prefetch()
        frozen = self._pipeline.freeze_groups()
        self._open = self._open_eagerly(frozen, self._runtime.accelerator.record_compute())
        self._start(self._open.job)

    def unit_ready(self, unit: Unit) -> None:
        if self._open is not None and self._open.updates(unit) and self.pager.block_unit_for_update(unit):
            self._add_unit_update(unit, self._open.job)
            self._open.add(unit, self._runtime.accelerator.record_compute())

    def prepare(self) -> None:
        if self._open is None:
            self._finish()
        self.pager.block_for_update()

    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        self.num_applied += 1
        if self._open is not None:
            for unit in self._open.incomplete(self._units):
                self._add_unit_update(unit, self._open.job)
            self._open.finish(gradients, self._runtime.accelerator.record_compute())
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
        """Wait for all jobs on the update lane, and raise the first error among them, once."""
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
        """Block until the last update is computed and no longer needs its gradients. Its writes may go on."""
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


class DelayedPolicy(OverlappedPolicy):
    """Runs updates one step late: `delayed`. Updates write to the back slots, a second set of slots for parameters. The
    first `start_step` steps are exact, as those of `overlapped`."""

    def __init__(self, pipeline: UpdatePipeline, pager: Pager, start_step: int) -> None:
        super().__init__(pipeline, pager)
        self._start_step = start_step
        self._is_unpublished = False
        """Whether an update to the back slots has begun, and its new values are not visible yet."""
        self._is_publishing = False
        """Whether `check` must make the new values visible: their update is complete."""

    def begin_backward(self) -> None:
        """Do nothing: an update runs during this backward, and reads ahead itself."""

    def at_cut(self, job: Callable[[], None]) -> Transfer:
        """Make the delayed update visible, so that a save holds the state of one step. Then run `job` between two
        updates. Return a transfer that completes when the job ends. Raises what `UpdatePolicy.at_cut` raises."""
        self._finish()
        return super().at_cut(job)

    def prepare(self) -> None:
        if self.num_applied < self._start_step:
            super().prepare()
        else:
            self._finish()

    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        if self.num_applied < self._start_step:
            super().apply(gradients, grad_scale)
            return
        self.num_applied += 1
        job = self._job(gradients, grad_scale, param_kind="param_back", every_subgroup=True)
        self.pager.begin_back_update()
        self._is_unpublished = True
        self.run_behind(partial(self._step, job), after=[job.after])

    def prepare_evaluation(self) -> None:
        self._finish()

    def check(self) -> None:
        super().check()
        if self._is_publishing:  # also after a failed attempt
            self.pager.swap_param_buffers()
            self._is_unpublished = False
            self._is_publishing = False

    def _finish(self) -> None:
        self._join()
        self._is_publishing = self._is_unpublished
        self.check()
