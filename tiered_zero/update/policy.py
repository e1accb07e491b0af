"""Decide when an update runs: inside step(), under the next forward, or one step late.

[Note: Update policies]
`barrier`: step() returns when every weight is updated, as in DeepSpeed.
`overlapped`: step() returns after the gradient check. The update runs on its own lane, in the order in which the next
forward needs the units. A forward that uses a unit waits only for that unit's update. Results are exact. No other order
is better: the gradients of forward's first unit complete last, and its new weights are needed first.
Without clipping and overflow check a unit's update begins in backward, once its gradients are complete. A second
backward, or reading weights or gradients before step(), would then see old and new values, and is refused
(`tiered_zero.optimizer_in_backward: false` allows both). Such a backward waits until the last step's updates are
computed; their writes may still run.
`delayed`: ZeRO-Offload's one-step delayed parameter update (Ren et al. 2021, section 5.2). After `delay_start_step`
exact steps the update of step i runs during forward and backward of step i+1, which still compute with the parameters
from before this update: theta(i+1) = update(theta(i), gradient at theta(i-1)). New 16-bit parameters go to back slots,
and gradients are double-buffered. The next step() makes the new values visible.

[Note: Update of shards] If ranks hold shards of the state but whole parameters, `barrier` runs on every rank. The
update lane steps this rank's shards. The driver starts to gather each unit once its shard is written, in static order,
which is the same on every rank. Weights are whole when step() returns. The other policies are not used. They would
gather in the next forward, or when weights are first read, and one rank may do this while the others do not.

[Note: State on several tiers] Sub-groups with state on the device are updated inside step(), by the driver thread, on
the compute stream. (A later update would not be faster, because it uses the same stream.) The other sub-groups are
updated as above, but not in backward. `delayed` is refused with state on the device; if all state is on the device,
`barrier` is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import final

import torch
from torch import nn

from tiered_zero.concurrency.transfer import Completion, Transfer, wait_all
from tiered_zero.errors import EngineFailedError, ModelError
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import Segment
from tiered_zero.tiers.step_gradients import GradientSource, StepGradients
from tiered_zero.tiers.tier import UnitUpdate
from tiered_zero.unit.pager import Pager, WholeWeights
from tiered_zero.update.pipeline import UpdateJob, UpdatePipeline


@final
class ZeroGradients(GradientSource):
    """Gradients for an update that creates state: zeros for the parameters in `names`, none for others."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def has(self, unit: Unit, param: ParamSpec) -> bool:
        return param.name in self._names

    def part(self, segment: Segment) -> torch.Tensor:
        return torch.zeros(segment.numel)

    def read_part(self, segment: Segment, out: torch.Tensor) -> None:
        out.zero_()


class UpdatePolicy(ABC):
    """Decides when updates run, and runs them. Used on the driver thread, or on autograd's threads while the driver
    waits in backward."""

    def __init__(self, pipeline: UpdatePipeline, pager: Pager | None) -> None:
        """`pager`: blocks compute from using old weights during an update; None without an engine."""
        self._pipeline = pipeline
        self._pager = pager
        self.view = pipeline.view
        self.failures = pipeline.failures
        self.num_applied = 0
        """The number of steps applied so far, including steps before a resume."""

    @abstractmethod
    def prepare(self) -> None:
        """Prepare a step. Finish earlier updates, unless the step's own update began in backward. Block compute from
        using weights that `apply` will change in place. If this raises, no weight has changed, except by updates that
        began in backward."""

    @abstractmethod
    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        """Run the update of the prepared step, or start it on the update lane. If this raises, the caller calls
        `latch`, because the update may be partly done."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait for the updates under way and make them visible."""

    # -- ways to end an update -----------------------------------------------------------------------------------------

    def finish(self, *, before_write: bool = False) -> None:
        """Wait until every update so far is complete and visible to compute. Raises the error of a failed update. If an
        earlier call has raised that error, raises EngineFailedError. `before_write`: whether the caller will change
        state or parameters. If so, also drop the state that was read ahead, and wait for the reads of a running
        save."""
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
        """Raise ModelError if an update that began in backward still waits for its step(). `act`: the beginning of the
        message, such as "State is to be saved"."""
        return

    def create_state(self, params: Collection[nn.Parameter]) -> None:
        """Create the state of `params` by an update with zero gradients, which changes no weight and counts no step.
        Called between two steps. Other ranks need not call it."""
        self.finish(before_write=True)
        self._pipeline.step(self._job(ZeroGradients(self.view.names_of(params)), 1.0))
        self._end_update()

    def begin_backward(self) -> None:
        """Start to read state ahead. If updates begin in backward, also start the job to which `unit_ready` adds units.
        Called before the backward that probably is the last before an update."""
        self._prefetch()

    def unit_ready(self, unit: Unit) -> None:
        """Add the unit to the job that `begin_backward` has started, if updates begin in backward. Called when the
        unit's gradients are complete."""
        return

    @property
    def is_open(self) -> bool:
        """Whether an update that began in backward waits for its step()."""
        return False

    def prepare_evaluation(self) -> None:
        """Make every update visible before a forward in evaluation."""
        return  # with an exact policy each use of a unit waits for its update

    def at_cut(self, job: Callable[[], None]) -> Transfer:
        """Run `job` between two updates: on the update lane after the update under way, or in this call if updates run
        inside step(). Return a transfer that completes when the job ends, and fails if the job raises. Raises
        ModelError if an update that began in backward still waits for its step(), and EngineFailedError after a
        failure."""
        self.check_untouched("State is to be saved")
        self.check()
        cut = Completion()
        self.run_behind(partial(self._run_cut, job, cut))
        return cut

    def run_behind(self, act: Callable[[], None], after: Sequence[Transfer] = ()) -> None:
        """Run `act` on the update lane, after the update under way and the transfers in `after`. If updates run inside
        step(), run `act` in this call."""
        act()

    def _cancel_prefetch(self) -> None:
        """Drop the state that was read ahead. Do nothing during an update, which uses this state."""
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

    def _job(
        self,
        gradients: GradientSource,
        grad_scale: float,
        param_kind: str = "param",
        unit_updates: Mapping[Unit, UnitUpdate] | None = None,
    ) -> UpdateJob:
        """Make a job that updates every sub-group with a gradient."""
        groups, after = self._pipeline.freeze_groups(), self._pipeline.runtime.accelerator.record_compute()
        job = UpdateJob(self.view.layouts, gradients, groups, after, grad_scale, param_kind)
        job.unit_updates.update(unit_updates or {})
        job.finish(after)
        return job

    def _end_update(self) -> None:
        """Record in the pager that units on the device have their new values."""
        if self._pager is not None:
            self._pager.end_update()


def _refusal(error: BaseException) -> str:
    """Return the message of the EngineFailedError that every call raises after the failure `error`."""
    if isinstance(error, EngineFailedError) and error.__cause__ is None:  # set by `latch`
        text = f"{error}; weights and state are partly new and partly those before."
    else:
        text = (
            f"An update failed ({str(error) or type(error).__name__}); weights and state are partly those of its step "
            "and partly those before."
        )
    return f"{text} Build another engine, and load the last checkpoint."


class BarrierPolicy(UpdatePolicy):
    """The policy `barrier`: runs each update inside step()."""

    def prepare(self) -> None:
        if self._pager is not None:
            self._pager.invalidate()

    def apply(self, gradients: GradientSource, grad_scale: float) -> None:
        self.num_applied += 1
        self._pipeline.step(self._job(gradients, grad_scale))
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
        updates = {unit: UnitUpdate() for unit in changed}
        job = self._job(gradients, grad_scale, unit_updates=updates)
        update = runtime.accelerator.lane("update").submit(partial(self._pipeline.step, job), after=[job.after])
        try:
            for unit in changed:
                with runtime.recorder.span("compute", "wait_update", unit.name):
                    updates[unit].written.wait()
                written(unit)
        finally:
            update.wait()  # raises the original error, ahead of the unit's

    def _finish(self) -> None:
        self.check()  # no update is under way between steps


class GatheringPolicy(BarrierPolicy):
    """Updates this rank's shards inside step(), and gathers each unit from all ranks. See [Note: Update of shards]."""

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


class OverlappedPolicy(UpdatePolicy):
    """The policy `overlapped`: runs updates on the update lane while compute goes on. Each use of a unit waits for the
    unit's last update."""

    def __init__(
        self,
        pipeline: UpdatePipeline,
        pager: Pager,
        freeze: Callable[[Unit, StepGradients], None] | None = None,
        keep: Callable[[Unit], None] = lambda unit: None,
    ) -> None:
        """`freeze(unit, into)`: moves a unit's gradients from the gradient store to `into`, for an update that begins
        in backward; None if no update begins in backward. `keep(unit)`: called when every sub-group of a unit is ready;
        keeps the unit's gradients in host memory until the update has read them."""
        super().__init__(pipeline, pager)
        self._inventory = self.view.inventory
        segments = [segment for layout in self.view.layouts for segment in layout.subgroup.segments]
        self._units = list(dict.fromkeys(segment.unit for segment in segments))
        self._runtime = pipeline.runtime
        self.pager = pager
        self._freeze, self._keep = freeze, keep
        self._open: UpdateJob | None = None
        """The update that began in backward and waits for its step()."""
        self._frozen = StepGradients()
        """The gradients of the last update that began in backward."""
        self._started: UpdateJob | None = None
        self._running: list[Transfer] = []
        """The transfers of jobs on the update lane, in order. Each completes when its job ends."""

    def begin_backward(self) -> None:
        if self._freeze is None:
            self._prefetch()
            return
        self._wait_computed()
        self._prefetch()
        groups, after = self._pipeline.freeze_groups(), self._runtime.accelerator.record_compute()
        self._frozen = StepGradients()
        self._open = UpdateJob(self.view.layouts, self._frozen, groups, after)
        self._start(self._open)

    def unit_ready(self, unit: Unit) -> None:
        if (job := self._open) is None or self._freeze is None:
            return
        if job.updates(unit) and self.pager.block_unit_for_update(unit):
            self._add_unit_update(unit, job)
            after = self._runtime.accelerator.record_compute()
            self._freeze(unit, self._frozen)
            for ready in job.add_unit(unit, after):
                self._keep(ready)

    def prepare(self) -> None:
        if self._open is None:
            self._finish()
        self.pager.block_for_update()

    def apply(self, gradients: StepGradients, grad_scale: float) -> None:
        self.num_applied += 1
        after = self._runtime.accelerator.record_compute()
        if (job := self._open) is not None:
            for unit in self._units:
                if unit not in job.unit_updates:  # its gradients were not complete in backward
                    self._add_unit_update(unit, job)
            self._frozen.fill(gradients)
            job.finish(after)
            self._open = None
            return
        layouts, groups = self.view.layouts, self._pipeline.freeze_groups()
        if self._pipeline.has_device_state:  # [Note: State on several tiers]
            on_device = self._pipeline.io.updates_on_device
            first = [layout for layout in layouts if on_device(layout.subgroup)]
            layouts = [layout for layout in layouts if not on_device(layout.subgroup)]
            job = UpdateJob(first, gradients, groups, after, grad_scale, on_device=True)
            job.finish(after)
            self._pipeline.step(job)
        job = UpdateJob(layouts, gradients, groups, after, grad_scale)
        for unit in self._units:
            self._add_unit_update(unit, job)
        job.finish(after)
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
                for unit_update in update.unit_updates.values():
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
        """Wait for all jobs on the update lane, and raise the first error. Later calls do not raise it again."""
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
        unit_update = job.unit_updates[unit] = UnitUpdate()
        self._inventory.set_last_update(unit, unit_update)
        if (error := self.failures.error) is not None:  # the job failed before it could see this update
            unit_update.fail(error)

    def _start(self, job: UpdateJob) -> None:
        while self._running and self._running[0].done():
            self._running.pop(0).wait()  # raises the error of that job, if any
        self.run_behind(partial(self._pipeline.step, job), after=[job.after])
        self._runtime.accelerator.lane("update").submit(job.end)  # even if the step was not launched
        self._started = job


class DelayedPolicy(OverlappedPolicy):
    """The policy `delayed`: runs updates one step late. Updates write to the back slots, a second set of slots for
    parameters. The first `start_step` steps run as in `overlapped`."""

    def __init__(self, pipeline: UpdatePipeline, pager: Pager, start_step: int) -> None:
        super().__init__(pipeline, pager)
        self._start_step = start_step
        self._is_unpublished = False
        """Whether an update to the back slots has begun, and its new values are not visible yet."""
        self._is_publishing = False
        """Whether `check` must make the new values visible, because their update is complete."""

    def begin_backward(self) -> None:
        """Do nothing, because a delayed update runs during this backward and reads ahead itself."""

    def at_cut(self, job: Callable[[], None]) -> Transfer:
        """Wait for the delayed update and use its new parameters, so that a save holds the state of one step. Then run
        `job` between two updates. Return a transfer that completes when the job ends. Raises what `UpdatePolicy.at_cut`
        raises."""
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
        job = self._job(gradients, grad_scale, "param_back")
        self.pager.begin_back_update()
        self._is_unpublished = True
        self.run_behind(partial(self._pipeline.step, job), after=[job.after])

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
