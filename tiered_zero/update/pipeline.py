"""Run the update over sub-groups: read sub-group i+1 while i is updated and i-1 is written.

One loop, `UpdatePipeline.step`, runs every update. An `UpdateJob` lists the sub-groups to update. `Prefetcher` reads
state ahead. A sub-group is what the optimizer steps at once; the code refers to it by its `StateLayout`."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Completion, FailureLatch, Transfer
from tiered_zero.errors import TieredZeroError
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import ParamPiece, Segment, SubGroup
from tiered_zero.rules.rule import Slice
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.rules.torch_rule import copied_group
from tiered_zero.tiers.step_gradients import GradientSource
from tiered_zero.tiers.tier import UnitUpdate
from tiered_zero.update.state_view import PieceScalars, StateView
from tiered_zero.update.subgroup_io import ParameterSink, SubGroupIO, SubGroupWork

POLL_S = 0.002
"""Seconds that the loop waits for a ready sub-group before it checks which writes have ended."""


class UpdateJob:
    """One update: its input, the sub-groups that are ready, and its progress. A sub-group is ready once the work that
    computes its gradients is launched.

    The driver thread adds units with complete gradients (`add_unit`, in backward), then calls `finish` or `cancel`. The
    thread that updates takes sub-groups, and counts those that are computed and written. When all sub-groups with a
    part of a unit are computed, it completes the unit's `UnitUpdate.computed`. When all are written, it completes
    `UnitUpdate.written`.

    `groups`: copies of the param groups' values. `after`: the job starts after this transfer. `param_kind`: the slots
    for new parameters: "param", or "param_back" for a delayed update. A delayed update also writes the parameters of
    sub-groups without a gradient. `on_device`: whether this job updates only the sub-groups with state on the device. A
    second job then updates the others from the same gradients."""

    def __init__(
        self,
        layouts: Sequence[StateLayout],
        gradients: GradientSource,
        groups: Sequence[Mapping[str, Any]],
        after: Transfer,
        grad_scale: float = 1.0,
        param_kind: str = "param",
        on_device: bool = False,
    ) -> None:
        self.gradients, self.groups, self.after = gradients, groups, after
        self.grad_scale, self.param_kind, self.on_device = grad_scale, param_kind, on_device
        self.unit_updates: dict[Unit, UnitUpdate] = {}
        """Unit -> the `UnitUpdate` to complete. The driver thread adds units before `finish`."""
        self.after_of: dict[int, Transfer] = {}
        """Index of each sub-group that is or was ready -> a transfer. It completes when compute no longer reads the
        sub-group's parameters; the update writes parameters on the device only then."""
        self.computed = Completion()
        """Completes when every sub-group is computed, or when the job ends."""
        self.opened: deque[SubGroupWork] = deque()
        self.written: deque[SubGroupWork] = deque()
        """The sub-groups that are being written. `opened` has the sub-groups that are being read or wait for their
        update."""
        self._layouts = layouts
        self._layouts_of: dict[Unit, list[StateLayout]] = {}
        """Unit -> the sub-groups that hold a part of it."""
        for layout in layouts:
            for unit in layout.subgroup.units:
                self._layouts_of.setdefault(unit, []).append(layout)
        self._num_uncomputed = {unit: len(own) for unit, own in self._layouts_of.items()}
        self._num_unwritten = dict(self._num_uncomputed)
        """`_num_uncomputed`: unit -> the number of its sub-groups that are not computed yet. `_num_unwritten`: unit ->
        the number of its sub-groups that are not written yet."""
        self._changed = threading.Condition()
        self._ready: dict[int, StateLayout] = {}
        """Index of a ready sub-group -> its layout, in the order in which sub-groups became ready."""
        self._ascending: list[int] = []
        """The indices of the ready sub-groups, in the order in which forward needs them."""
        self._skipped: list[StateLayout] = []
        self._closed = False

    # -- the driver thread ---------------------------------------------------------------------------------------------

    @cached_property
    def _waits_for(self) -> dict[int, set[Unit]]:
        """Index of a sub-group -> the units with a part in it that `add_unit` has not added yet."""
        return {own.subgroup.index: set(own.subgroup.units) for own in self._layouts}

    def updates(self, unit: Unit) -> bool:
        """Return whether a sub-group of this job holds a part of the unit."""
        return unit in self._layouts_of

    def add_unit(self, unit: Unit, after: Transfer) -> list[Unit]:
        """Add a unit with complete gradients. A sub-group becomes ready when all its units are added. Return the units
        whose last sub-group became ready in this call. `after`: completes when compute no longer reads the unit's
        parameters."""
        done: list[Unit] = []
        for layout in self._layouts_of[unit]:
            waits_for = self._waits_for[layout.subgroup.index]
            waits_for.discard(unit)
            if waits_for or layout.subgroup.index in self.after_of:
                continue
            self._add(layout, after)
            for own in layout.subgroup.units:
                if all(other.subgroup.index in self.after_of for other in self._layouts_of[own]):
                    done.append(own)
        return done

    def finish(self, after: Transfer) -> None:
        """Make the remaining sub-groups ready, but skip those without a gradient. A delayed update skips none. Complete
        the `UnitUpdate` of units without a sub-group in the job. `after`: completes when all compute launched so far is
        done."""
        for unit, unit_update in self.unit_updates.items():
            if unit not in self._layouts_of:
                unit_update.complete()
        skipped: list[StateLayout] = []
        for layout in self._layouts:
            if layout.subgroup.index in self.after_of:
                continue
            if self.param_kind == "param_back" or self._has_gradient(layout.subgroup):
                self._add(layout, after)
            else:
                skipped.append(layout)
        with self._changed:
            self._skipped += skipped
            self._closed = True
            self._changed.notify()

    def cancel(self) -> bool:
        """Remove the sub-groups that the update has not begun, and accept no others. Return whether the update may have
        changed a sub-group."""
        with self._changed:
            self._ready.clear()
            self._ascending.clear()
            self._closed = True
            self._changed.notify()
        return bool(self.after_of)

    def _add(self, layout: StateLayout, after: Transfer) -> None:
        self.after_of[layout.subgroup.index] = after
        with self._changed:
            self._ready[layout.subgroup.index] = layout
            insort(self._ascending, layout.subgroup.index)
            self._changed.notify()

    def _has_gradient(self, subgroup: SubGroup) -> bool:
        for segment in subgroup.segments:
            for piece in segment.pieces:
                if self.gradients.has(segment.unit, piece.param):
                    return True
        return False

    # -- the thread that updates: ready sub-groups ---------------------------------------------------------------------

    def choose(self) -> StateLayout | None:
        """Return the sub-group to update next; None if no sub-group is ready. If any ready sub-groups have all their
        gradients, choose the one that the next forward needs first. Otherwise choose the one that became ready
        first."""
        with self._changed:
            for index in self._ascending:
                if self.has_arrived(self._ready[index]):
                    return self._ready[index]
            return next(iter(self._ready.values()), None)  # its gradients arrive first

    def has_arrived(self, layout: StateLayout) -> bool:
        """Return whether all gradients of the sub-group can be read now."""
        return all(map(self.gradients.has_arrived, layout.subgroup.units))

    def take(self, subgroups: Collection[int]) -> list[StateLayout]:
        """Remove the sub-groups with the indices `subgroups` from the ready ones. Return those that were ready, in the
        order of `subgroups`."""
        with self._changed:
            if not self._ready:
                return []
            taken = [self._ready.pop(index) for index in list(subgroups) if index in self._ready]
            for layout in taken:
                del self._ascending[bisect_left(self._ascending, layout.subgroup.index)]
            return taken

    def is_ready(self) -> bool:
        """Return whether a sub-group is ready."""
        with self._changed:
            return bool(self._ready)

    def has_ended(self) -> bool:
        """Return whether the job has no more sub-groups to update: none is ready, and none will become ready."""
        with self._changed:
            return self._closed and not self._ready

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a sub-group is ready, and return True. Return False once `has_ended`, or after `timeout_s`."""
        with self._changed:
            while not (self._ready or self._closed) and self._changed.wait(timeout_s):
                pass
            return bool(self._ready)

    # -- the thread that updates: progress -----------------------------------------------------------------------------

    def count_skipped(self) -> None:
        """Count the skipped sub-groups, each once, as computed and written."""
        with self._changed:
            skipped, self._skipped = self._skipped, []
        for layout in skipped:
            self.count_computed(layout.subgroup)
            self.count_written(layout.subgroup)

    def count_computed(self, subgroup: SubGroup) -> None:
        for unit in subgroup.units:
            self._num_uncomputed[unit] -= 1
            if self._num_uncomputed[unit]:
                continue
            if not self.on_device:  # the job for the other tiers runs last and releases them
                self.gradients.release(unit)
            if unit in self.unit_updates:
                self.unit_updates[unit].computed.complete()

    def count_written(self, subgroup: SubGroup) -> None:
        for unit in subgroup.units:
            self._num_unwritten[unit] -= 1
            if not self._num_unwritten[unit] and unit in self.unit_updates:
                self.unit_updates[unit].complete()

    def fail(self, error: BaseException) -> None:
        """Fail the `UnitUpdate` of each unit that is not written yet, so that every wait for the unit raises
        `error`."""
        for unit_update in list(self.unit_updates.values()):  # a copy: the driver may add some
            unit_update.fail(error)

    def end(self) -> None:
        """Release the gradients, and complete `computed`. Called also for a job that was never launched."""
        if not self.on_device:  # the job for the other tiers still needs the gradients
            self.gradients.release_all()
        self.computed.complete()


class UpdatePipeline:
    """Updates sub-groups, one step at a time, on the thread that calls `step`. With state on NVMe, as many sub-groups
    are under way as there are staging buffers."""

    def __init__(
        self,
        view: StateView,
        runtime: Runtime,
        params: ParameterSink,
        gradient_dtypes: Mapping[Unit, torch.dtype] | None = None,
    ) -> None:
        """`gradient_dtypes`: unit with gradients on NVMe -> their dtype."""
        self.view = view
        self._rule = view.rule
        self.runtime = runtime
        self._gradient_dtypes = gradient_dtypes or {}
        self.io = SubGroupIO(view.inventory, runtime, view.staging, params, self._gradient_dtypes)
        """Reads and writes sub-groups; saves and loads use it too."""
        self._prefetcher = Prefetcher(self.io, self._open_nowait)
        self._stages = view.staging is not None
        self.failures = FailureLatch()
        """Remembers the error of the first failed update. Every later step then raises, because the state may be partly
        changed."""
        self._held: Mapping[int, Transfer] = {}
        """Index of a sub-group -> a transfer that completes when the save has read the state of this sub-group."""
        self._reading: Transfer = COMPLETED

    @cached_property
    def has_device_state(self) -> bool:
        """Whether the state of any sub-group rests on the device. Cached, because state never moves to another tier."""
        return any(self.io.updates_on_device(layout.subgroup) for layout in self.view.layouts)

    @cached_property
    def _reads(self) -> bool:
        """Whether the update of any sub-group reads from a tier."""
        return any(map(self.io.reads, self.view.layouts))

    def freeze_groups(self) -> list[dict[str, Any]]:
        """Return copies of the param groups for one update, because schedulers may change the groups while the update
        runs. Then apply the rule's changes for one step, such as new step counts, to the groups."""
        frozen = list(map(copied_group, self.view.groups))
        self._rule.advance_groups(self.view.groups, frozen)
        return frozen

    # -- between steps -------------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Start to read ahead the sub-groups that the next step probably updates first."""
        if self._stages:
            self._prefetcher.read()

    def cancel_prefetch(self) -> None:
        """Drop the state that was read ahead. Called before state changes, and after failures."""
        self._prefetcher.cancel()

    def hold(self, until: Mapping[int, Transfer], reading: Transfer = COMPLETED) -> None:
        """Set the transfers that updates wait for while a save reads state in place. `until`: index of a sub-group ->
        the transfer after which it may be updated. `reading`: completes when the save has read everything; never fails.
        Called on the thread that updates."""
        self._held, self._reading = until, reading

    def wait_held(self) -> None:
        """Wait until the running save has read everything. Called before state or parameters change, or buffers are
        freed."""
        self._reading.wait()

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, job: UpdateJob) -> None:
        """Update every sub-group of the job that has a gradient, and return when everything is written. Raises
        TransferError or CorruptionError if a sub-group cannot be read intact. That sub-group is unchanged, but earlier
        sub-groups are updated. After any error, every `UnitUpdate` that is not complete fails, and later jobs raise the
        error."""
        reads_ahead = self._stages and not job.on_device
        try:
            self.failures.check()  # the job before may have failed after this one was started
            if reads_ahead:
                self._prefetcher.begin_step(job.param_kind)
            while job.opened or job.written or job.wait():
                self._begin(job)
                self._work(job)
                self._retire(job)
            job.count_skipped()
            if reads_ahead:
                self._prefetcher.end_step()
        except BaseException as error:
            self.failures.set(error)
            job.fail(error)
            self.io.cancel([*job.opened, *job.written])
            self._prefetcher.cancel()
            raise
        finally:
            job.end()

    def _begin(self, job: UpdateJob) -> None:
        """Open ready sub-groups: first take those that were read ahead, then start to read others while buffers are
        free."""
        job.count_skipped()
        if self._reads:
            for prefetched in map(self._prefetcher.take, job.take(self._prefetcher.subgroups)):
                self._append(job, prefetched)
        # with nothing to read, begin only one: a sub-group that is needed sooner may become ready during its update
        while (self._reads or not job.opened) and (layout := job.choose()) is not None:
            if (work := self._open_nowait(layout, job.param_kind)) is not None:
                job.take([layout.subgroup.index])
                self._prefetcher.note_begun(work)
                self._append(job, work)
            elif job.opened or not self._prefetcher.evict_last():
                return

    def _append(self, job: UpdateJob, work: SubGroupWork) -> None:
        """Append `work` to the opened sub-groups, and start to read its gradients from NVMe if they have arrived."""
        job.opened.append(work)
        if self._gradient_dtypes and job.has_arrived(work.layout):
            self.io.read_gradients(work, job.gradients)

    def _work(self, job: UpdateJob) -> None:
        """Take the first opened sub-group: wait for its reads, update it, and start its writes."""
        if not job.opened:
            return
        work = job.opened[0]
        for unit in work.layout.subgroup.units:
            job.gradients.wait_transfers(unit)
        self.io.read_gradients(work, job.gradients)
        for read in work.reads:
            self.io.wait(read, work)
        if (held := self._held.get(work.layout.subgroup.index)) is not None and not held.done():
            self.io.wait(held, work)
        self._update(work, job)
        self.io.write(work, job.unit_updates, job.after_of[work.layout.subgroup.index])
        job.count_computed(work.layout.subgroup)
        job.written.append(job.opened.popleft())

    def _retire(self, job: UpdateJob) -> None:
        """Release the buffers of written sub-groups, oldest first, and read ahead into free buffers. Wait for a write
        only at the end of the step, or if a ready sub-group needs a buffer."""
        ended = not job.opened and job.has_ended()
        if ended:  # count the sub-groups skipped last: forward waits for them
            job.count_skipped()
            job.computed.complete()
        reads_ahead = self._stages and not job.on_device
        if reads_ahead:
            self._prefetch(job)
        must_wait = ended
        if self._stages and not (ended or job.opened) and (ready := job.choose()) is not None:
            must_wait = not (self.io.num_free or ready.subgroup.index in self._prefetcher.subgroups)
        while job.written and (must_wait or job.written[0].is_written()):
            self.io.finish(job.written[0])
            self._prefetcher.note_ended(job.written[0])
            job.count_written(job.written.popleft().layout.subgroup)
            must_wait = False
        if reads_ahead:
            self._prefetch(job)
        if job.written and not (ended or job.opened):  # a slow write must not delay sub-groups that become ready
            job.wait(POLL_S)

    def _prefetch(self, job: UpdateJob) -> None:
        if not job.is_ready():
            if job.has_ended():
                self._prefetcher.expect_next_step()
            self._prefetcher.read()

    def _open_nowait(self, layout: StateLayout, param_kind: str) -> SubGroupWork | None:
        has_state = self.view.scalars.has_state(layout)
        return self.io.open_nowait(layout, param_kind, initialized=has_state, with_gradients=True)

    def _update(self, work: SubGroupWork, job: UpdateJob) -> None:
        with (
            self.runtime.recorder.span("update", "update", f"sub-group {work.layout.subgroup.index}"),
            self._gradients(work, job.gradients) as grads,
        ):
            self._step_slices(work, job, grads)

    @contextmanager
    def _gradients(self, work: SubGroupWork, gradients: GradientSource) -> Iterator[list[torch.Tensor]]:
        """A context manager that yields the gradients of each segment. If the state is on the device, gradients in host
        memory are copied to the device for the length of the block."""
        segments = work.layout.subgroup.segments
        grads = [
            gradients.part(segment) if window is None else window.view(self._gradient_dtypes[segment.unit])
            for segment, window in zip(segments, work.grad_windows, strict=True)
        ]
        if not work.on_device or not (
            elsewhere := [i for i, segment in enumerate(segments) if not gradients.on_device(segment.unit)]
        ):
            yield grads
            return
        nbytes = sum(grads[index].nbytes for index in elsewhere)
        # the plan has room for gradients in flight, and there are none during an update
        self.runtime.ledger.charge("device", "gradient_in_flight", nbytes)
        try:
            for index in elsewhere:
                grads[index] = grads[index].to(work.raw.device, copy=True)
            yield grads
        finally:
            self.runtime.ledger.discharge("device", "gradient_in_flight", nbytes)

    def _step_slices(self, work: SubGroupWork, job: UpdateJob, grads: Sequence[torch.Tensor]) -> None:
        layout, gradients = work.layout, job.gradients
        scalars = dict(self.view.scalars.of(layout))
        if not self.view.scalars.has_state(layout):
            layout.initialize(work.raw)
            self.view.initialize(layout, work.raw, layout.subgroup.pieces, job.groups)
        slices: list[Slice] = []
        stepped: list[list[ParamPiece]] = []
        masters = layout.master(work.raw)
        unstepped: list[tuple[torch.Tensor, torch.Tensor]] = []
        views = layout.views(work.raw)
        self.io.bind_outputs(work)
        for segment, out, grad in zip(work.layout.subgroup.segments, work.outs, grads, strict=True):
            master = layout.masters.bind(masters[segment.start : segment.stop], out)
            position = 0  # relative to the segment, like `first` and `last`
            for pieces in self._spans(segment, gradients, scalars):
                first, last = pieces[0].start - segment.start, pieces[-1].stop - segment.start
                parts = [master, grad, out]
                if last - first < segment.numel:
                    parts = [part[first:last] for part in parts]
                if not self._rule.elementwise:
                    parts = list(map(pieces[0].param.view, parts))
                slices.append(
                    Slice(
                        master=parts[0],
                        grad=parts[1],
                        state=layout.state(work.raw, pieces[0], pieces[-1].stop, views),
                        scalars=dict(scalars.get(pieces[0].index, {})),
                        hyper=job.groups[pieces[0].group],
                        out=None if master is out else parts[2],
                        grad_scale=job.grad_scale,
                    )
                )
                stepped.append(pieces)
                # elements that are not stepped (padding, no gradient) keep the value of their master
                if position < first:
                    unstepped.append((master[position:first], out[position:first]))
                position = last
            if position < segment.numel:
                unstepped.append((master[position:], out[position:]))
        if unstepped:
            layout.masters.copy_unstepped(*zip(*unstepped, strict=True))
        self._rule.update(slices)
        for one, pieces in zip(slices, stepped, strict=True):
            for piece in pieces:
                scalars[piece.index] = one.scalars
        self.view.scalars.replace(layout, scalars)

    def _spans(self, segment: Segment, gradients: GradientSource, scalars: PieceScalars) -> list[list[ParamPiece]]:
        """Group the segment's pieces with gradients into lists, one for each `Slice`. Neighbours share a list if they
        are in one param group and share one object of scalars. If the rule is not elementwise, each list has one
        piece."""
        spans: list[list[ParamPiece]] = []
        last: ParamPiece | None = None
        for piece in segment.pieces:
            if not gradients.has(segment.unit, piece.param):
                continue
            if (
                last is not None
                and self._rule.elementwise
                and piece.index == last.index + 1
                and piece.group == last.group
                and scalars.get(piece.index) is scalars.get(last.index)
            ):
                spans[-1].append(piece)
            else:
                spans.append([piece])
            last = piece
        return spans


# -- reads ahead -----------------------------------------------------------------------------------------------------


class Prefetcher:
    """Reads sub-groups ahead into free staging buffers, in the order of the last step. It leaves one buffer free. Used
    by one thread at a time: by the thread that updates, and between steps by the driver thread.

    [Note: Reading ahead] While an update waits for gradients, the disk reads the state that the update will need. Once
    a step has begun all of its sub-groups, the first ones of the next step are read: during the last writes, the
    forward, and the beginning of backward. Code that changes state between two steps calls `cancel` first."""

    def __init__(self, io: SubGroupIO, open_nowait: Callable[[StateLayout, str], SubGroupWork | None]) -> None:
        self._io = io
        self._open_nowait = open_nowait
        self._param_kind = "param"
        self._works: dict[int, SubGroupWork] = {}
        """Index of a sub-group that was read ahead -> its `SubGroupWork`, in the order of the reads."""
        self._expected: dict[int, StateLayout] = {}
        """Index of a sub-group to read ahead -> its layout, in the order of the reads."""
        self._order: dict[int, StateLayout] = {}
        """The sub-groups that the last step read, in the order in which the step began the sub-groups."""
        self._ended: dict[int, StateLayout] = {}
        """The sub-groups that this step has read and written, in order."""
        self._all_begun = False
        """Whether this step has begun all of its sub-groups."""

    @property
    def subgroups(self) -> Collection[int]:
        """The indices of the sub-groups that were read ahead. Their reads may still be under way."""
        return self._works.keys()

    def read(self) -> None:
        """Start to read the next expected sub-groups, as long as more than one buffer is free. If a read cannot start,
        stop without an error: the step will read the sub-group again and raise the error."""
        with suppress(TieredZeroError):
            while self._io.num_free > 1 and (layout := self._next()) is not None:
                if (work := self._open_nowait(layout, self._param_kind)) is None:
                    return
                self._works[layout.subgroup.index] = work

    def _next(self) -> StateLayout | None:
        while self._expected:
            layout = self._expected.pop(next(iter(self._expected)))
            # masters that are computed from parameters: a delayed update swaps the homes of these before
            if self._param_kind == "param" or not layout.masters.needs_params:
                return layout
        return None

    def evict_last(self) -> bool:
        """Drop the sub-group that was read ahead last, which frees its buffer. Return False if there is none."""
        if not self._works:
            return False
        index, last = self._works.popitem()
        self._expected = {index: last.layout, **self._expected}
        self._io.cancel([last])
        return True

    def cancel(self) -> None:
        """Drop all sub-groups that were read ahead. Must be called before state changes."""
        self._expected = dict(self._order)
        for index, work in list(self._works.items()):
            self._io.cancel([work])
            del self._works[index]

    # -- what a step does ----------------------------------------------------------------------------------------------

    def begin_step(self, param_kind: str) -> None:
        if param_kind != self._param_kind:
            self.cancel()
        self._param_kind = param_kind
        self._ended, self._all_begun = {}, False

    def take(self, layout: StateLayout) -> SubGroupWork:
        """Remove and return the `SubGroupWork` of a sub-group that was read ahead. Called when the step begins to
        update it."""
        return self._works.pop(layout.subgroup.index)

    def note_begun(self, work: SubGroupWork) -> None:
        """Record that the step has begun a sub-group that was not read ahead."""
        self._expected.pop(work.layout.subgroup.index, None)

    def note_ended(self, work: SubGroupWork) -> None:
        """Record that a sub-group is written. Sub-groups are written in the order in which they were begun."""
        if work.lease is None or not work.reads or work.on_device:
            return
        self._ended[work.layout.subgroup.index] = work.layout
        if self._all_begun:
            self._expected[work.layout.subgroup.index] = work.layout

    def expect_next_step(self) -> None:
        """Expect the sub-groups of the next step, in the order of this step. Called when this step has begun all of its
        sub-groups."""
        if not self._all_begun:
            self._all_begun = True
            self.cancel()
            self._expected = dict(self._ended)

    def end_step(self) -> None:
        self.expect_next_step()
        if self._ended:
            self._order = self._ended
        else:  # the step was aborted or read nothing
            self._expected = dict(self._order)
        self.read()
