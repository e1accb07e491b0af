"""Read i+1 | update i | write i-1: the optimizer's way through the sub-groups."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tiered_zero.hardware.runtime import Runtime
from tiered_zero.hardware.staging import StagingPool
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import ParamPiece, Segment, SubGroup
from tiered_zero.optim.rule import Run, UpdateRule
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.step_gradients import StepGradients
from tiered_zero.tiers.unit_update import UnitUpdate
from tiered_zero.update.prefetch import ReadAhead
from tiered_zero.update.ready import ReadyQueue
from tiered_zero.update.subgroup_io import SubGroupIO, SubGroupWork

_POLL_S = 0.002
"""How often writes are looked at while gradients are waited for."""


@dataclass(frozen=True)
class UpdateJob:
    """One optimizer step, with everything that may change before it is done.

    `groups`: the param groups' values as they were when the step was taken. `param_kind`: which home of a unit takes
    the new parameters ("param", or "param_back" behind the scenes). `unit_updates`: unit index -> what to complete when
    the unit's parameters are written. `every_subgroup`: also those without a gradient, whose parameters are written
    anew. `queue`: sub-groups that become ready one by one; None: all those with a gradient are. `on_device`: only those
    whose state rests on the device (True) or does not (False); the others count as written. `made`: set once every
    update is computed, while the last are still written, or when it breaks off.
    """

    gradients: StepGradients
    grad_scale: float
    groups: Sequence[Mapping[str, Any]]
    unit_updates: dict[int, UnitUpdate]
    param_kind: str = "param"
    every_subgroup: bool = False
    queue: ReadyQueue | None = None
    on_device: bool | None = None
    made: threading.Event = field(default_factory=threading.Event)


class StreamingStepper:
    """Steps sub-groups in order; with state on nvme as many are on their way as there are staging buffers.

    `device_flat`: the flat of a unit that lives on the device. One step at a time, on the thread that calls `step`.
    """

    def __init__(
        self,
        layouts: Sequence[StateLayout],
        rule: UpdateRule,
        inventory: Inventory,
        runtime: Runtime,
        staging: StagingPool | None,
        device_flat: Callable[[Unit], torch.Tensor],
    ) -> None:
        self._layouts = layouts
        self._rule = rule
        self._runtime = runtime
        self._passage = SubGroupIO(inventory, runtime, staging, device_flat)
        self._ahead = ReadAhead(self._passage, self._open_nowait)
        self._scalars: dict[tuple[int, int], dict[str, Any]] = {}
        self._born: set[int] = set()
        self._ending = threading.Event()

    @cached_property
    def has_device_state(self) -> bool:
        """Whether the state of some sub-group rests on the device. Homes of state never change."""
        return any(self._passage.updates_on_device(layout.subgroup) for layout in self._layouts)

    # -- while no step runs and nothing is read ahead ------------------------------------------------------------------

    def has_state(self, layout: StateLayout) -> bool:
        """Whether the sub-group's home holds state beside its masters."""
        return layout.subgroup.index in self._born

    def scalars(self, subgroup: SubGroup, piece: ParamPiece) -> Mapping[str, Any]:
        """The piece's `Run.scalars`; empty before its first step."""
        return self._scalars.get((subgroup.index, piece.index), {})

    def replace_scalars(self, subgroup: SubGroup, scalars: Mapping[int, dict[str, Any]]) -> None:
        """The sub-group's state was written to its home by hand. `scalars`: piece index -> its scalars; pieces without
        any start anew. Neighbours may share an object: they are stepped together then."""
        for piece in subgroup.pieces:
            self._scalars.pop((subgroup.index, piece.index), None)
        self._scalars.update({(subgroup.index, index): values for index, values in scalars.items()})
        self._born.add(subgroup.index)

    def freeze_groups(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The values of the live param groups as they are now, for the step that is taken: schedulers change them while
        an update runs. The live groups get what the step itself makes of them."""
        frozen = [
            {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in groups
        ]
        self._rule.advance_groups(groups, frozen)
        return frozen

    # -- ahead of the step ---------------------------------------------------------------------------------------------

    def read_ahead(self) -> None:
        """Start to read what the next step will most likely begin with, if that was not done or is forgotten. While no
        step runs."""
        self._ahead.read()

    def cancel_prefetch(self) -> None:
        """What was read ahead is not, or not any more, what the next step needs. While no step runs."""
        self._ahead.forget()

    def end(self) -> None:
        """The engine ends, and state and parameters off the device are not read again: give up what only makes
        those, of a step under way too. Any thread."""
        self._ending.set()

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, job: UpdateJob) -> None:
        """One update of every sub-group that has a gradient; returns when all of it is written.

        Raises TransferError or CorruptionError before a sub-group is changed from bytes that cannot be trusted; what
        was stepped before that stays stepped. A failure reaches every unit_update that is not complete.
        """
        queue = job.queue or self._queue_all(job)
        progress = _Progress(job.unit_updates, [layout.subgroup for layout in self._layouts])
        opened: deque[SubGroupWork] = deque()
        written: deque[SubGroupWork] = deque()
        staged = job.on_device is not True
        if staged:
            self._ahead.begin_step(job.param_kind)
        try:
            while opened or written or queue.wait():
                if self._ending.is_set():
                    progress.count_skipped(self._give_up_unseen(queue, opened))
                progress.count_skipped(queue.take_skipped())
                self._open_ready(job, queue, opened)
                if opened:
                    work = opened[0]
                    for event in work.reads:
                        self._passage.wait(event, work)
                    self._update(work, job)
                    self._passage.write(work, job.unit_updates)
                    progress.count_made(work.layout.subgroup)
                    written.append(opened.popleft())
                all_made = not opened and queue.has_ended()
                if all_made:
                    job.made.set()
                if staged:
                    self._read_ahead(queue)
                # a write is waited for where nothing goes on without its buffer, or nothing else is to come; otherwise
                # they are only looked at
                must_wait = all_made or (not opened and queue.peek() is not None)
                while written and (must_wait or all(event.done() for event in written[0].writes)):
                    self._passage.end(written[0])
                    if staged:
                        self._ahead.note_ended(written[0])
                    progress.count_written(written.popleft().layout.subgroup)
                    must_wait = False
                if staged:
                    self._read_ahead(queue)
                if written and not opened:
                    queue.wait(_POLL_S)
            progress.count_skipped(queue.take_skipped())
        except BaseException as error:
            progress.fail(error)
            self._passage.abandon([*opened, *written])
            self._ahead.cancel_all()
            raise
        if self._ending.is_set():
            self._ahead.cancel_all()
        elif staged:
            self._ahead.end_step()

    def _give_up_unseen(self, queue: ReadyQueue, opened: deque[SubGroupWork]) -> list[StateLayout]:
        """Returns the sub-groups of which nothing rests on the device, as far as they are not updated yet."""
        seen = {x.subgroup.index for x in self._layouts if self._passage.outlasting(x.subgroup).segments}
        unseen = [work for work in opened if work.subgroup.index not in seen]
        self._passage.abandon(unseen)
        for work in unseen:
            opened.remove(work)
        return [*(work.layout for work in unseen), *queue.clear(keep=seen)]

    def _queue_all(self, job: UpdateJob) -> ReadyQueue:
        ready: list[StateLayout] = []
        skipped: list[StateLayout] = []
        for layout in self._layouts:
            todo = job.every_subgroup or has_gradient(layout.subgroup, job.gradients)
            if job.on_device is not None:
                todo &= self._passage.updates_on_device(layout.subgroup) == job.on_device
            (ready if todo else skipped).append(layout)
        queue = ReadyQueue(ready, skipped)
        queue.close()
        return queue

    def _open_ready(self, job: UpdateJob, queue: ReadyQueue, opened: deque[SubGroupWork]) -> None:
        """Begin what is ready: first what was read ahead, whatever its turn; then in turn, as buffers are free."""
        opened.extend(map(self._ahead.take, queue.take_among(self._ahead.subgroups)))
        while (layout := queue.peek()) is not None:
            work = self._open_nowait(layout, job.param_kind)
            if work is not None:
                queue.take(layout)
                self._ahead.note_begun(work)
                opened.append(work)
            elif opened or not self._ahead.evict_last():
                return

    def _read_ahead(self, queue: ReadyQueue) -> None:
        """Into buffers that nothing needs which is ready."""
        if queue.peek() is None and not self._ending.is_set():
            if queue.has_ended():
                self._ahead.expect_next_step()
            self._ahead.read()

    def _open_nowait(self, layout: StateLayout, param_kind: str) -> SubGroupWork | None:
        part = self._passage.outlasting(layout.subgroup) if self._ending.is_set() else None
        return self._passage.open_nowait(layout, param_kind, born=layout.subgroup.index in self._born, part=part)

    def _update(self, work: SubGroupWork, job: UpdateJob) -> None:
        for segment in work.subgroup.segments:
            job.gradients.wait_transfers(segment.unit)
        with (
            self._runtime.recorder.span("update", "update", f"sub-group {work.subgroup.index}"),
            self._gradients(work, job.gradients) as grads,
        ):
            self._step_runs(work, job, grads)

    @contextmanager
    def _gradients(self, work: SubGroupWork, gradients: StepGradients) -> Iterator[list[torch.Tensor]]:
        """Each segment's gradients, beside the state. Those of a unit whose state is split over tiers rest in host
        memory: for the part on the device they go back there, into the room of gradients in flight, all landed by now.
        """
        segments = work.subgroup.segments
        grads = [segment.part_of(gradients.flat(segment.unit)) for segment in segments]
        on_device = self._passage.updates_on_device(work.subgroup)
        away = [i for i, segment in enumerate(segments) if on_device and not gradients.on_device(segment.unit)]
        if not away:
            yield grads
            return
        nbytes = sum(grads[index].nbytes for index in away)
        self._runtime.ledger.charge("device", "gradient_in_flight", nbytes)
        try:
            for index in away:
                grads[index] = grads[index].to(work.raw.device, copy=True)
            yield grads
        finally:
            self._runtime.ledger.discharge("device", "gradient_in_flight", nbytes)

    def _step_runs(self, work: SubGroupWork, job: UpdateJob, grads: Sequence[torch.Tensor]) -> None:
        layout, gradients = work.layout, job.gradients
        if work.subgroup.index not in self._born:
            self.materialize_model(work, job)
        runs: list[Run] = []
        members: list[list[ParamPiece]] = []
        master, copy_unstepped = layout.master(work.raw), layout.masters.copy_unstepped
        self._passage.make_outs(work)
        for segment, out, grad in zip(work.subgroup.segments, work.outs, grads, strict=True):
            position = 0  # in the segment, as are `first` and `last`
            for pieces in self._stretches(work, segment, gradients):
                first, last = pieces[0].start - segment.start, pieces[-1].stop - segment.start
                run = self._run(work, job, pieces)
                run.grad, run.grad_scale = self._shaped(pieces[0], grad[first:last]), job.grad_scale
                run.out = self._shaped(pieces[0], out[first:last])
                runs.append(run)
                members.append(pieces)
                # what is not stepped (padding, no gradient) stays what its master says
                copy_unstepped(master[segment.start + position : segment.start + first], out[position:first])
                position = last
            copy_unstepped(master[segment.start + position : segment.stop], out[position:])
        self._rule.update(runs)
        for run, pieces in zip(runs, members, strict=True):
            self._scalars.update(dict.fromkeys(((work.subgroup.index, piece.index) for piece in pieces), run.scalars))

    def _stretches(self, work: SubGroupWork, segment: Segment, gradients: StepGradients) -> Iterator[list[ParamPiece]]:
        """Neighbouring pieces with a gradient, the same group and the same history."""
        current: list[ParamPiece] = []
        for piece in segment.pieces:
            if not gradients.has(segment.unit, piece.param):
                continue
            if current and not self._joins(work.subgroup, current[-1], piece):
                yield current
                current = []
            current.append(piece)
        if current:
            yield current

    def _joins(self, subgroup: SubGroup, left: ParamPiece, right: ParamPiece) -> bool:
        """Scalars are shared, as objects, by pieces that were stepped together from the start."""
        return (
            self._rule.elementwise
            and right.index == left.index + 1
            and left.group == right.group
            and self._scalars.get((subgroup.index, left.index)) is self._scalars.get((subgroup.index, right.index))
        )

    def _run(self, work: SubGroupWork, job: UpdateJob, pieces: Sequence[ParamPiece]) -> Run:
        """A run over neighbouring pieces, its gradient and output still to be set."""
        first, start, stop = pieces[0], pieces[0].start, pieces[-1].stop
        master = self._shaped(first, work.layout.master(work.raw)[start:stop])
        state = work.layout.state(work.raw, first, start, stop)
        scalars = dict(self._scalars.get((work.subgroup.index, first.index), {}))
        return Run(master, master, state, scalars, job.groups[first.group])

    def _shaped(self, piece: ParamPiece, memory: torch.Tensor) -> torch.Tensor:
        """As the rule takes it: [n] of neighbouring parameters, or one whole parameter."""
        return memory if self._rule.elementwise else piece.param.view(memory)

    def materialize_model(self, work: SubGroupWork, job: UpdateJob) -> None:
        """Before its first step a sub-group has no state on its tier: make it here, zeros first."""
        work.raw[work.layout.master_nbytes :].zero_()
        for piece in work.subgroup.pieces:
            self._rule.init_state(self._run(work, job, [piece]))
        self._born.add(work.subgroup.index)


class _Progress:
    """A unit's unit_update is made, and complete, when the last sub-group with a part of the unit is."""

    def __init__(self, unit_updates: Mapping[int, UnitUpdate], subgroups: Sequence[SubGroup]) -> None:
        self._publications = unit_updates
        self._unmade = Counter(segment.unit.index for subgroup in subgroups for segment in subgroup.segments)
        self._unwritten = self._unmade.copy()
        for index, unit_update in list(unit_updates.items()):  # the driver adds to them meanwhile
            if not self._unwritten[index]:
                unit_update.complete()

    def count_skipped(self, layouts: Sequence[StateLayout]) -> None:
        for layout in layouts:
            self.count_made(layout.subgroup)
            self.count_written(layout.subgroup)

    def count_made(self, subgroup: SubGroup) -> None:
        for unit_update in self._ended(self._unmade, subgroup):
            unit_update.computed.complete()

    def count_written(self, subgroup: SubGroup) -> None:
        for unit_update in self._ended(self._unwritten, subgroup):
            unit_update.complete()

    def _ended(self, missing: Counter[int], subgroup: SubGroup) -> Iterator[UnitUpdate]:
        for segment in subgroup.segments:
            missing[segment.unit.index] -= 1
            if not missing[segment.unit.index] and segment.unit.index in self._publications:
                yield self._publications[segment.unit.index]

    def fail(self, error: BaseException) -> None:
        for unit_update in list(self._publications.values()):
            unit_update.fail(error)


def has_gradient(subgroup: SubGroup, gradients: StepGradients) -> bool:
    return any(gradients.has(s.unit, piece.param) for s in subgroup.segments for piece in s.pieces)
