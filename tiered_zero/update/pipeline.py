"""Run the update over sub-groups: read sub-group i+1 while i is updated and i-1 is written.

One loop, `UpdatePipeline.step`, runs every update. `ReadyQueue` gives it sub-groups. `Prefetcher` reads state ahead. A
sub-group is what the optimizer steps at once; a `StateLayout` stands for it."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Completion, Transfer
from tiered_zero.errors import TieredZeroError
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.subgroups import ParamPiece, Segment, SubGroup
from tiered_zero.rules.rule import Run
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.rules.torch_rule import copied_group
from tiered_zero.tiers.step_gradients import GradientSource
from tiered_zero.tiers.tier import UnitUpdate
from tiered_zero.update.state_view import PieceScalars, StateView
from tiered_zero.update.subgroup_io import ParameterSink, SubGroupIO, SubGroupWork

POLL_S = 0.002
"""How long the loop waits for a sub-group to become ready before it looks for writes that have ended."""


class ReadyQueue:
    """Holds the sub-groups that are ready to be updated: the work that computes their gradients is launched. Nothing is
    added after `close`. `take_skipped` returns each sub-group that this step does not update, once. Any thread."""

    def __init__(self, ready: Iterable[StateLayout] = (), skipped: Iterable[StateLayout] = ()) -> None:
        self._changed = threading.Condition()
        self._ready = {layout.subgroup.index: layout for layout in ready}
        """Index of a ready sub-group -> its layout, in the order in which sub-groups became ready."""
        self._skipped = list(skipped)
        self._closed = False

    def add(self, layout: StateLayout) -> None:
        with self._changed:
            self._ready[layout.subgroup.index] = layout
            self._changed.notify()

    def close(self, skipped: Iterable[StateLayout] = ()) -> None:
        with self._changed:
            self._skipped += skipped
            self._closed = True
            self._changed.notify()

    def clear(self) -> None:
        """Remove all waiting sub-groups."""
        with self._changed:
            self._ready.clear()

    def peek(self) -> StateLayout | None:
        """Return the ready sub-group that the next forward needs first; None if the queue is empty."""
        with self._changed:
            return self._ready[min(self._ready)] if self._ready else None

    def choose(self, gradients: GradientSource) -> StateLayout | None:
        """Return the ready sub-group that the next forward needs first, of those with all gradients arrived. If there
        is none, return the one that became ready first; None if the queue is empty."""
        with self._changed:
            for index in sorted(self._ready):
                layout = self._ready[index]
                if all(gradients.has_arrived(segment.unit) for segment in layout.subgroup.segments):
                    return layout
            return next(iter(self._ready.values()), None)  # its gradients arrive first

    def take(self, layout: StateLayout) -> None:
        """Remove `layout` if it is still in the queue."""
        with self._changed:
            self._ready.pop(layout.subgroup.index, None)

    def take_among(self, subgroups: Collection[int]) -> list[StateLayout]:
        """Remove and return the ready ones of `subgroups` (indices), in the order of `subgroups`."""
        with self._changed:
            if not self._ready:
                return []
            return [self._ready.pop(index) for index in list(subgroups) if index in self._ready]

    def take_skipped(self) -> list[StateLayout]:
        with self._changed:
            skipped, self._skipped = self._skipped, []
            return skipped

    def has_ended(self) -> bool:
        """Return whether the queue is closed and empty."""
        with self._changed:
            return self._closed and not self._ready

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a sub-group is ready, and return True. Return False once the queue is closed and empty, or after
        `timeout_s`."""
        with self._changed:
            while not (self._ready or self._closed) and self._changed.wait(timeout_s):
                pass
            return bool(self._ready)


@dataclass(frozen=True, kw_only=True)
class UpdateJob:
    """The input of one update.

    `groups`: copies of the param groups' values. `after`: parameters on the device are written after this transfer,
    because earlier work of compute may read them. `after_of`: index of a sub-group -> the transfer that replaces
    `after`. `unit_updates`: unit index -> the `UnitUpdate` to complete. `param_kind`: the slots for new parameters:
    "param", or "param_back" for a delayed update. `every_subgroup`: whether to also write the parameters of sub-groups
    without a gradient. `queue`: the sub-groups to update; None: all that have a gradient. `on_device`: True updates
    only sub-groups with state on the device, False only the others, None all. `computed`: completes when every
    sub-group is computed, or when the job fails."""

    gradients: GradientSource
    grad_scale: float
    groups: Sequence[Mapping[str, Any]]
    after: Transfer
    after_of: dict[int, Transfer] = field(default_factory=dict)
    unit_updates: dict[int, UnitUpdate] = field(default_factory=dict)
    param_kind: str = "param"
    every_subgroup: bool = False
    queue: ReadyQueue | None = None
    on_device: bool | None = None
    computed: Completion = field(default_factory=Completion)

    def fail(self, error: BaseException) -> None:
        """Make every wait for the update of a unit that is not written yet raise `error`."""
        for unit_update in list(self.unit_updates.values()):  # a copy: the driver may add some
            unit_update.fail(error)


def has_gradient(subgroup: SubGroup, gradients: GradientSource) -> bool:
    for segment in subgroup.segments:
        for piece in segment.pieces:
            if gradients.has(segment.unit, piece.param):
                return True
    return False


class UpdatePipeline:
    """Updates sub-groups, one step at a time, on the thread that calls `step`. With state on NVMe, as many sub-groups
    are under way as there are staging buffers."""

    def __init__(
        self,
        view: StateView,
        runtime: Runtime,
        params: ParameterSink,
        gradient_dtypes: Mapping[int, torch.dtype] | None = None,
    ) -> None:
        """`gradient_dtypes`: index of a unit with gradients on NVMe -> their dtype."""
        self.view = view
        self._rule = view.rule
        self.runtime = runtime
        self._io = SubGroupIO(view.inventory, runtime, view.staging, params, gradient_dtypes or {})
        self.io = SubGroupIO(view.inventory, runtime, view.staging, params)
        """Reads and writes sub-groups for saves and loads; its staging buffers hold no gradients."""
        self._prefetcher = Prefetcher(self._io, self._open_nowait)
        self._stages = view.staging is not None
        self._held: Mapping[int, Transfer] = {}
        """Index of a sub-group -> the transfer that ends when a save has read its state."""
        self._reading: Transfer = COMPLETED

    @cached_property
    def has_device_state(self) -> bool:
        """Whether the state of any sub-group rests on the device. Cached, because state never moves to another tier."""
        return any(self._io.updates_on_device(layout.subgroup) for layout in self.view.layouts)

    @cached_property
    def _reads(self) -> bool:
        """Whether the update of any sub-group reads from a tier."""
        return any(map(self._io.reads, self.view.layouts))

    def freeze_groups(self) -> list[dict[str, Any]]:
        """Return copies of the param groups for one update: schedulers may change the groups while it runs. Then
        advance, in the groups themselves, what the rule changes in each step, such as a count of steps."""
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
        """Set what updates wait for while a save reads state in place. `until`: index of a sub-group -> the transfer
        after which it may be updated. `reading`: ends when the save has read everything; never fails. Called on the
        thread that updates."""
        self._held, self._reading = until, reading

    def wait_held(self) -> None:
        """Wait until the running save has read everything. Called before state or parameters change, or buffers are
        freed."""
        self._reading.wait()

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, job: UpdateJob) -> None:
        """Update every sub-group that has a gradient, and return when everything is written. Raises TransferError or
        CorruptionError if a sub-group cannot be read intact: it is unchanged then, but sub-groups before it are
        updated. After any error every `UnitUpdate` that is not complete fails."""
        step = _Step(job, job.queue or self._queue_all(job), self.view.layouts)
        reads_ahead = self._stages and not job.on_device
        if reads_ahead:
            self._prefetcher.begin_step(job.param_kind)
        try:
            while step.opened or step.written or step.queue.wait():
                self._begin(step)
                self._work(step)
                self._retire(step)
            step.count_skipped(step.queue.take_skipped())
        except BaseException as error:
            job.fail(error)
            self._io.cancel([*step.opened, *step.written])
            self._prefetcher.cancel()
            raise
        if reads_ahead:
            self._prefetcher.end_step()

    def _begin(self, step: _Step) -> None:
        """Begin to read ready sub-groups: first the prefetched ones, then others as long as buffers are free."""
        step.count_skipped(step.queue.take_skipped())
        if self._reads:
            for prefetched in map(self._prefetcher.take, step.queue.take_among(self._prefetcher.subgroups)):
                step.opened.append(prefetched)
                self._read_gradients(prefetched, step.job)
        # with nothing to read, begin only one: a sub-group that is needed sooner may become ready during its update
        while self._reads or not step.opened:
            # in backward gradients may be under way: prefer a sub-group with all gradients arrived
            layout = step.queue.peek() if step.job.queue is None else step.queue.choose(step.job.gradients)
            if layout is None:
                return
            work = self._open_nowait(layout, step.job.param_kind)
            if work is not None:
                step.queue.take(layout)
                self._prefetcher.note_begun(work)
                step.opened.append(work)
                self._read_gradients(work, step.job)
            elif step.opened or not self._prefetcher.evict_last():
                return

    def _read_gradients(self, work: SubGroupWork, job: UpdateJob) -> None:
        """Start to read gradients from NVMe. In backward do nothing: gradients are read once they have arrived."""
        if job.queue is None:
            self._io.read_gradients(work, job.gradients)

    def _work(self, step: _Step) -> None:
        """Take the first of `step.opened`: wait for its reads, update it, and start its writes."""
        if not step.opened:
            return
        work, job = step.opened[0], step.job
        for segment in work.layout.subgroup.segments:
            job.gradients.wait_transfers(segment.unit)
        self._io.read_gradients(work, job.gradients)
        for read in work.reads:
            self._io.wait(read, work)
        if (held := self._held.get(work.layout.subgroup.index)) is not None and not held.done():
            self._io.wait(held, work)
        self._update(work, job)
        self._io.write(work, job.unit_updates, job.after_of.get(work.layout.subgroup.index, job.after))
        step.count_computed(work.layout.subgroup)
        step.written.append(step.opened.popleft())

    def _retire(self, step: _Step) -> None:
        """Release the buffers of written sub-groups, oldest first, and read ahead into free buffers. Wait for a write
        only at the end of the step, or if a ready sub-group needs its buffer."""
        ended = not step.opened and step.queue.has_ended()
        if ended:  # count the sub-groups skipped last: forward waits for them
            step.count_skipped(step.queue.take_skipped())
            step.job.computed.complete()
        reads_ahead = self._stages and not step.job.on_device
        if reads_ahead:
            self._prefetch(step)
        must_wait = ended
        if self._stages and not (ended or step.opened) and (ready := step.queue.peek()) is not None:
            must_wait = not (self._io.num_free or ready.subgroup.index in self._prefetcher.subgroups)
        while step.written and (must_wait or step.written[0].is_written()):
            self._io.finish(step.written[0])
            self._prefetcher.note_ended(step.written[0])
            step.count_written(step.written.popleft().layout.subgroup)
            must_wait = False
        if reads_ahead:
            self._prefetch(step)
        if step.written and not (ended or step.opened):  # a slow write must not delay sub-groups that become ready
            step.queue.wait(POLL_S)

    def _prefetch(self, step: _Step) -> None:
        if step.queue.peek() is None:
            if step.queue.has_ended():
                self._prefetcher.expect_next_step()
            self._prefetcher.read()

    def _queue_all(self, job: UpdateJob) -> ReadyQueue:
        ready: list[StateLayout] = []
        skipped: list[StateLayout] = []
        for layout in self.view.layouts:
            todo = job.every_subgroup or has_gradient(layout.subgroup, job.gradients)
            if job.on_device is not None:
                todo &= self._io.updates_on_device(layout.subgroup) == job.on_device
            (ready if todo else skipped).append(layout)
        queue = ReadyQueue(ready, skipped)
        queue.close()
        return queue

    def _open_nowait(self, layout: StateLayout, param_kind: str) -> SubGroupWork | None:
        return self._io.open_nowait(layout, param_kind, initialized=self.view.scalars.has_state(layout))

    def _update(self, work: SubGroupWork, job: UpdateJob) -> None:
        with (
            self.runtime.recorder.span("update", "update", f"sub-group {work.layout.subgroup.index}"),
            self._gradients(work, job.gradients) as grads,
        ):
            self._step_runs(work, job, grads)

    @contextmanager
    def _gradients(self, work: SubGroupWork, gradients: GradientSource) -> Iterator[list[torch.Tensor]]:
        """A context manager that yields the gradients of each segment. If the state is on the device, gradients in host
        memory are copied there for the block."""
        segments = work.layout.subgroup.segments
        read = work.grads or [None] * len(segments)
        grads = [gradients.part(s) if part is None else part for s, part in zip(segments, read, strict=True)]
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

    def _step_runs(self, work: SubGroupWork, job: UpdateJob, grads: Sequence[torch.Tensor]) -> None:
        layout, gradients = work.layout, job.gradients
        scalars = dict(self.view.scalars.of(layout))
        if not self.view.scalars.has_state(layout):
            layout.initialize(work.raw)
            self.view.initialize(layout, work.raw, layout.subgroup.pieces, job.groups)
        runs: list[Run] = []
        stepped: list[list[ParamPiece]] = []
        masters = layout.master(work.raw)
        unstepped: list[tuple[torch.Tensor, torch.Tensor]] = []
        views = layout.views(work.raw)
        self._io.bind_outputs(work)
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
                runs.append(
                    Run(
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
        self._rule.update(runs)
        for run, pieces in zip(runs, stepped, strict=True):
            for piece in pieces:
                scalars[piece.index] = run.scalars
        self.view.scalars.replace(layout, scalars)

    def _spans(self, segment: Segment, gradients: GradientSource, scalars: PieceScalars) -> list[list[ParamPiece]]:
        """Group the segment's pieces (parts of parameters) with gradients, one list for each `Run`: neighbours in one
        param group that share one object of scalars, or a single piece if the rule is not elementwise."""
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


class _Step:
    """The progress of one step. `opened`: sub-groups being read. `written`: sub-groups being written. Completes the
    `UnitUpdate` of each unit, once all sub-groups with a part of the unit are computed or written."""

    def __init__(self, job: UpdateJob, queue: ReadyQueue, layouts: Sequence[StateLayout]) -> None:
        self.job, self.queue = job, queue
        self.opened: deque[SubGroupWork] = deque()
        self.written: deque[SubGroupWork] = deque()
        self._uncomputed: Counter[int] = Counter()
        """Unit index -> the number of the unit's parts that are not computed."""
        for layout in layouts:
            for segment in layout.subgroup.segments:
                self._uncomputed[segment.unit.index] += 1
        self._unwritten = self._uncomputed.copy()
        for index, unit_update in list(job.unit_updates.items()):  # a copy: the driver may add some
            if not self._unwritten[index]:
                unit_update.complete()

    def count_skipped(self, layouts: Sequence[StateLayout]) -> None:
        for layout in layouts:
            self.count_computed(layout.subgroup)
            self.count_written(layout.subgroup)

    def count_computed(self, subgroup: SubGroup) -> None:
        for segment in subgroup.segments:
            index = segment.unit.index
            self._uncomputed[index] -= 1
            if self._uncomputed[index]:
                continue
            if not self.job.on_device:  # the job for the other tiers runs last and releases them
                self.job.gradients.release(segment.unit)
            if index in self.job.unit_updates:
                self.job.unit_updates[index].computed.complete()

    def count_written(self, subgroup: SubGroup) -> None:
        for segment in subgroup.segments:
            index = segment.unit.index
            self._unwritten[index] -= 1
            if not self._unwritten[index] and index in self.job.unit_updates:
                self.job.unit_updates[index].complete()


# -- reads ahead -----------------------------------------------------------------------------------------------------


class Prefetcher:
    """Reads sub-groups ahead into free staging buffers, in the order of the last step. It leaves one buffer free. Used
    by one thread at a time: the one that updates, and between steps the driver.

    [Note: Reading ahead] While an update waits for gradients, the disk reads the state that the update will need. Once
    a step has begun all of its sub-groups, the first ones of the next step are read: during the last writes, the
    forward, and the beginning of backward. Code that changes state between two steps calls `cancel` first."""

    def __init__(self, io: SubGroupIO, open_nowait: Callable[[StateLayout, str], SubGroupWork | None]) -> None:
        self._io = io
        self._open_nowait = open_nowait
        self._param_kind = "param"
        self._works: dict[int, SubGroupWork] = {}
        """Index of a sub-group that was read ahead -> its work, in the order of the reads."""
        self._expected: deque[StateLayout] = deque()
        """The sub-groups to read ahead next, in order."""
        self._order: list[StateLayout] = []
        """The sub-groups that the last step read, in the order in which it began them."""
        self._begun: set[int] = set()
        """Indices of the sub-groups that this step has begun."""
        self._ended: list[StateLayout] = []
        """The sub-groups that this step has read and written, in order."""
        self._all_begun = False
        """Whether this step has begun all of its sub-groups."""

    @property
    def subgroups(self) -> Collection[int]:
        """The indices of the sub-groups that were read ahead. Their reads may still be under way."""
        return self._works.keys()

    def read(self) -> None:
        """Start to read the next expected sub-groups, as long as more than one buffer is free. If a read cannot start,
        stop: the step reads the sub-group again and raises the error."""
        with suppress(TieredZeroError):
            while self._io.num_free > 1 and (layout := self._next()) is not None:
                if (work := self._open_nowait(layout, self._param_kind)) is None:
                    return
                self._works[layout.subgroup.index] = work

    def _next(self) -> StateLayout | None:
        while self._expected:
            layout = self._expected.popleft()
            # masters that are computed from parameters: a delayed update swaps the homes of these before
            is_fixed = self._param_kind == "param" or not layout.masters.needs_params
            if is_fixed and layout.subgroup.index not in self._begun:
                return layout
        return None

    def evict_last(self) -> bool:
        """Drop the sub-group that was read ahead last, which frees its buffer. Return False if there is none."""
        if not self._works:
            return False
        _, last = self._works.popitem()
        self._expected.appendleft(last.layout)
        self._io.cancel([last])
        return True

    def cancel(self) -> None:
        """Drop all sub-groups that were read ahead. Must be called before state changes."""
        self._begun.clear()
        self._expected = deque(self._order)
        for index, work in list(self._works.items()):
            self._io.cancel([work])
            del self._works[index]

    # -- what a step does ----------------------------------------------------------------------------------------------

    def begin_step(self, param_kind: str) -> None:
        if param_kind != self._param_kind:
            self.cancel()
        self._param_kind = param_kind
        self._ended, self._all_begun = [], False

    def take(self, layout: StateLayout) -> SubGroupWork:
        """Remove and return the `SubGroupWork` of a sub-group that was read ahead: the step begins to update it."""
        self._begun.add(layout.subgroup.index)
        return self._works.pop(layout.subgroup.index)

    def note_begun(self, work: SubGroupWork) -> None:
        """Record that the step has begun a sub-group that was not read ahead."""
        self._begun.add(work.layout.subgroup.index)

    def note_ended(self, work: SubGroupWork) -> None:
        """Record that a sub-group is written. Sub-groups are written in the order in which they were begun."""
        if work.lease is None or not work.reads or work.on_device:
            return
        self._ended.append(work.layout)
        if self._all_begun:
            self._expected.append(work.layout)

    def expect_next_step(self) -> None:
        """Expect the sub-groups of the next step, in the order of this step. Called when this step has begun all of its
        own."""
        if not self._all_begun:
            self._all_begun = True
            self.cancel()
            self._expected = deque(self._ended)

    def end_step(self) -> None:
        self.expect_next_step()
        if self._ended:
            self._order = self._ended
        else:  # the step was aborted or read nothing
            self._expected = deque(self._order)
        self.read()
