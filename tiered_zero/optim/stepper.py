"""Read i+1 | update i | write i-1: the optimizer's way through the sub-groups."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tiered_zero.hardware.accelerator import Event
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.hardware.staging import Lease, StagingPool
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import Piece, Segment, SubGroup
from tiered_zero.optim.ready import ReadyQueue
from tiered_zero.optim.rule import Run, UpdateRule
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.publication import Publication
from tiered_zero.tiers.step_gradients import StepGradients
from tiered_zero.tiers.tier import as_bytes


@dataclass(frozen=True)
class UpdateJob:
    """One optimizer step, with everything that may change before it is done.

    `groups`: the param groups' values as they were when the step was taken. `param_kind`: which home of a unit takes
    the new parameters ("param", or "param_back" behind the scenes). `publications`: unit index -> what to complete when
    the unit's parameters are written. `every_subgroup`: also those without a gradient, whose parameters are written
    anew. `queue`: sub-groups that become ready one by one; None: all those with a gradient are. `on_device`: only those
    whose state rests on the device (True) or does not (False); the others count as written.
    """

    gradients: StepGradients
    grad_scale: float
    groups: Sequence[Mapping[str, Any]]
    publications: dict[int, Publication]
    param_kind: str = "param"
    every_subgroup: bool = False
    queue: ReadyQueue | None = None
    on_device: bool | None = None


@dataclass(frozen=True)
class Window:
    """A part of a lease as a host buffer of its own."""

    tensor: torch.Tensor
    memory: memoryview


@dataclass
class Work:
    """One sub-group on its way. `raw`: [n] uint8, its state, in place or staged. `lease`: staged state, then the staged
    16-bit parameters. `reads`: the transfers that fill the state and, where masters need them, the parameters."""

    subgroup: SubGroup
    layout: StateLayout
    raw: torch.Tensor
    lease: Lease | None
    reads: list[Event] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    writes: list[Event] = field(default_factory=list)


class StreamingStepper:
    """Steps sub-groups in order; with state on nvme as many are on their way as there are staging buffers.

    `device_flat`: the flat of a unit that lives on the device. A staging buffer holds one sub-group's state and, where
    parameters are not updated in place, its 16-bit parameters. One step at a time, on the thread that calls `step`.
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
        self._inventory = inventory
        self._runtime = runtime
        self._staging = staging
        self._device_flat = device_flat
        self._scalars: dict[tuple[int, int], dict[str, Any]] = {}
        self._born: set[int] = set()
        self._order: list[StateLayout] = []
        """As the last step began them, those that pass through a staging buffer."""
        self._ahead: dict[int, Work] = {}
        """Sub-group -> what `read_ahead` has begun, the soonest first."""

    @cached_property
    def has_device_state(self) -> bool:
        """Whether the state of some sub-group rests on the device. Homes of state never change."""
        return any(self._updates_on_device(layout.subgroup) for layout in self._layouts)

    def take_over(self, scalars: Mapping[tuple[int, int], dict[str, Any]]) -> None:
        """State that was written to the sub-groups' homes beforehand: (sub-group, piece) -> its scalars."""
        self._scalars.update(scalars)
        self._born.update(index for index, _ in scalars)

    # -- ahead of the step ---------------------------------------------------------------------------------------------

    def read_ahead(self) -> None:
        """Start to read what the last step began with, as far as staging buffers are free, all but one: the next step
        will most likely begin with it too. While no step runs.
        """
        if self._staging is None or self._ahead:
            return
        for layout in self._order[: max(0, self._staging.num_free - 1)]:
            if (work := self._open_nowait("param", layout)) is None:
                return
            self._ahead[layout.subgroup.index] = work

    def forget_ahead(self) -> None:
        """What was read ahead is not, or not any more, what the next step needs. While no step runs."""
        works = list(self._ahead.values())
        self._ahead.clear()
        self._abandon(works)

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, job: UpdateJob) -> None:
        """One update of every sub-group that has a gradient; returns when all of it is written.

        Raises TransferError or CorruptionError before a sub-group is changed from bytes that cannot be trusted; what
        was stepped before that stays stepped. A failure reaches every publication that is not complete.
        """
        queue = job.queue or self._queue_all(job)
        progress = _Progress(job.publications, [layout.subgroup for layout in self._layouts])
        order: list[StateLayout] = []
        opened: deque[Work] = deque()
        written: deque[Work] = deque()
        try:
            for skipped in queue.take_skipped():
                progress.count_skipped(skipped.subgroup)
            while opened or written or queue.wait():
                while (layout := queue.peek()) is not None and (work := self._open(job, layout)) is not None:
                    queue.take(layout)
                    opened.append(work)
                    if work.lease is not None:
                        order.append(layout)
                if opened:
                    work = opened[0]
                    for event in work.reads:
                        self._wait(event, "wait_state", work.subgroup)
                    self._update(work, job)
                    self._write(work, job)
                    progress.count_made(work.subgroup)
                    written.append(opened.popleft())
                # with nothing else to do, or no buffer free, one write is waited for; otherwise they are only looked at
                must_wait = not opened
                while written and (must_wait or all(event.done() for event in written[0].writes)):
                    self._finish(written[0], progress)
                    written.popleft()
                    must_wait = False
            for skipped in queue.take_skipped():
                progress.count_skipped(skipped.subgroup)
        except BaseException as error:
            progress.fail(error)
            self._abandon([*opened, *written])
            raise
        finally:
            if not job.on_device:  # the sub-groups that are staged are still to come
                self.forget_ahead()
                self._order = order

    def _queue_all(self, job: UpdateJob) -> ReadyQueue:
        ready: list[StateLayout] = []
        skipped: list[StateLayout] = []
        for layout in self._layouts:
            todo = job.every_subgroup or has_gradient(layout.subgroup, job.gradients)
            if job.on_device is not None:
                todo &= self._updates_on_device(layout.subgroup) == job.on_device
            (ready if todo else skipped).append(layout)
        queue = ReadyQueue(ready, skipped)
        queue.close()
        return queue

    def _abandon(self, works: Sequence[Work]) -> None:
        """After a failure: what still uses the staging buffers ends, well or badly, and the buffers go back."""
        for work in works:
            for event in (*work.reads, *work.writes):
                with suppress(Exception):
                    self._wait(event, "wait_state", work.subgroup)
            if work.lease is not None:
                work.lease.release()

    def _open(self, job: UpdateJob, layout: StateLayout) -> Work | None:
        """A sub-group with its read under way; None while no staging buffer is free."""
        if job.param_kind != "param":
            self.forget_ahead()
        elif (work := self._ahead.pop(layout.subgroup.index, None)) is not None:
            return work
        while (work := self._open_nowait(job.param_kind, layout)) is None and self._ahead:
            _, last = self._ahead.popitem()  # another order than last time: what waits for later makes room
            self._abandon([last])
        return work

    def _open_nowait(self, param_kind: str, layout: StateLayout) -> Work | None:
        home = self._inventory.home(layout.subgroup, "state")
        raw = home.tier.view(home.slot)
        lease: Lease | None = None
        if raw is None or self._out_nbytes(param_kind, layout.subgroup):
            assert self._staging is not None, "staged sub-groups are planned with staging buffers"
            nbytes = self._staging_nbytes(param_kind, layout)
            lease = self._staging.lease_nowait(nbytes, f"sub-group {layout.subgroup.index}")
            if lease is None:
                return None
        staged = raw is None
        if raw is None:
            assert lease is not None
            raw = lease.tensor[: layout.nbytes]
        work = Work(layout.subgroup, layout, raw, lease)
        try:
            if staged and lease is not None:
                stored = layout.nbytes if layout.subgroup.index in self._born else layout.master_nbytes
                work.reads.append(home.tier.read(home.slot, Window(raw[:stored], lease.memory[:stored])))
            if layout.masters.needs_params:
                self._read_params(work, param_kind)
        except BaseException:
            self._abandon([work])
            raise
        return work

    def _read_params(self, work: Work, param_kind: str) -> None:
        """The old parameters to where the new ones will stand; they are there already where those replace them."""
        for segment, window in self._staged_outs(work, param_kind):
            home = self._inventory.find(segment.unit, "param")
            if home is None:
                continue  # on the device, and updated there
            if window is not None:
                work.reads.append(home.tier.read(home.slot, window, segment.unit_start * segment.unit.dtype.itemsize))
            elif param_kind != "param":
                old, new = (self._out_view(kind, work.subgroup, segment) for kind in ("param", param_kind))
                assert old is not None and new is not None, "both homes of a unit are on one tier"
                new.copy_(old)

    def _update(self, work: Work, job: UpdateJob) -> None:
        for segment in work.subgroup.segments:
            job.gradients.land(segment.unit)
        with (
            self._runtime.recorder.span("update", "update", f"sub-group {work.subgroup.index}"),
            self._gradients(work, job.gradients) as grads,
        ):
            self._step_runs(work, job, grads)

    @contextmanager
    def _gradients(self, work: Work, gradients: StepGradients) -> Iterator[list[torch.Tensor]]:
        """Each segment's gradients, beside the state. Those of a unit whose state is split over tiers rest in host
        memory: for the part on the device they go back there, into the room of gradients in flight, all landed by now.
        """
        segments = work.subgroup.segments
        grads = [self._slice(gradients.flat(segment.unit), segment) for segment in segments]
        on_device = self._updates_on_device(work.subgroup)
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

    def _step_runs(self, work: Work, job: UpdateJob, grads: Sequence[torch.Tensor]) -> None:
        layout, gradients = work.layout, job.gradients
        if work.subgroup.index not in self._born:
            self._give_birth(work, job)
        runs: list[Run] = []
        members: list[list[Piece]] = []
        master, settle = layout.master(work.raw), layout.masters.settle
        work.outs = self._make_outs(work, job)
        for segment, out, grad in zip(work.subgroup.segments, work.outs, grads, strict=True):
            position = 0  # in the segment, as are `first` and `last`
            for pieces in self._stretches(work, segment, gradients):
                first, last = pieces[0].start - segment.start, pieces[-1].stop - segment.start
                run = self._run(work, job, pieces)
                run.grad, run.grad_scale = grad[first:last].view(run.master.shape), job.grad_scale
                run.out = out[first:last].view(run.master.shape)
                runs.append(run)
                members.append(pieces)
                # what is not stepped (padding, no gradient) stays what its master says
                settle(master[segment.start + position : segment.start + first], out[position:first])
                position = last
            settle(master[segment.start + position : segment.stop], out[position:])
        self._rule.update(runs)
        for run, pieces in zip(runs, members, strict=True):
            self._scalars.update(dict.fromkeys(((work.subgroup.index, piece.index) for piece in pieces), run.scalars))

    def _stretches(self, work: Work, segment: Segment, gradients: StepGradients) -> Iterator[list[Piece]]:
        """Neighbouring pieces with a gradient, the same group and the same history."""
        current: list[Piece] = []
        for piece in segment.pieces:
            if not gradients.has(segment.unit, piece.param):
                continue
            if current and not self._joins(work.subgroup, current[-1], piece):
                yield current
                current = []
            current.append(piece)
        if current:
            yield current

    def _joins(self, subgroup: SubGroup, left: Piece, right: Piece) -> bool:
        """Scalars are shared, as objects, by pieces that were stepped together from the start."""
        return (
            self._rule.elementwise
            and right.index == left.index + 1
            and left.group == right.group
            and self._scalars.get((subgroup.index, left.index)) is self._scalars.get((subgroup.index, right.index))
        )

    def _run(self, work: Work, job: UpdateJob, pieces: Sequence[Piece]) -> Run:
        """A run over neighbouring pieces, its gradient and output still to be set."""
        first, start, stop = pieces[0], pieces[0].start, pieces[-1].stop
        master = work.layout.master(work.raw)[start:stop]
        if not self._rule.elementwise:
            master = master.view(first.param.shape)
        state = work.layout.state(work.raw, first, start, stop)
        scalars = dict(self._scalars.get((work.subgroup.index, first.index), {}))
        return Run(master, master, state, scalars, job.groups[first.group])

    def _give_birth(self, work: Work, job: UpdateJob) -> None:
        """Before its first step a sub-group has no state on its tier: make it here, zeros first."""
        work.raw[work.layout.master_nbytes :].zero_()
        for piece in work.subgroup.pieces:
            self._rule.init_state(self._run(work, job, [piece]))
        self._born.add(work.subgroup.index)

    # -- parameters out ------------------------------------------------------------------------------------------------

    def _staging_nbytes(self, param_kind: str, layout: StateLayout) -> int:
        """What one staging buffer must hold for this sub-group."""
        home = self._inventory.home(layout.subgroup, "state")
        state_nbytes = layout.nbytes if home.tier.view(home.slot) is None else 0
        return state_nbytes + self._out_nbytes(param_kind, layout.subgroup)

    def _out_nbytes(self, param_kind: str, subgroup: SubGroup) -> int:
        return sum(_nbytes(s) for s in subgroup.segments if self._out_view(param_kind, subgroup, s) is None)

    def _out_view(self, param_kind: str, subgroup: SubGroup, segment: Segment) -> torch.Tensor | None:
        """The parameters' final place, [numel] of their dtype, where the update can write it directly."""
        unit = segment.unit
        on_device = self._updates_on_device(subgroup)
        home = self._inventory.find(unit, param_kind)
        if home is None:
            return self._slice(self._device_flat(unit), segment) if on_device else None
        raw = home.tier.view(home.slot)
        return None if raw is None or on_device else self._slice(raw[: unit.nbytes].view(unit.dtype), segment)

    @staticmethod
    def _slice(flat: torch.Tensor, segment: Segment) -> torch.Tensor:
        return flat[segment.unit_start : segment.unit_start + segment.numel]

    def _updates_on_device(self, subgroup: SubGroup) -> bool:
        return self._inventory.home(subgroup, "state").tier.name == "device"

    def _staged_outs(self, work: Work, param_kind: str) -> Iterator[tuple[Segment, Window | None]]:
        """Each segment with its part of the lease, or None where it is written in place."""
        home = self._inventory.home(work.subgroup, "state")
        start = work.layout.nbytes if home.tier.view(home.slot) is None else 0
        for segment in work.subgroup.segments:
            if self._out_view(param_kind, work.subgroup, segment) is not None:
                yield segment, None
                continue
            assert work.lease is not None
            stop = start + _nbytes(segment)
            yield segment, Window(work.lease.tensor[start:stop], work.lease.memory[start:stop])
            start = stop

    def _make_outs(self, work: Work, job: UpdateJob) -> list[torch.Tensor]:
        """Where the rule writes each segment's parameters: [numel] of the unit's dtype, beside the state."""
        outs = []
        for segment, window in self._staged_outs(work, job.param_kind):
            view = self._out_view(job.param_kind, work.subgroup, segment)
            if view is None and self._updates_on_device(work.subgroup):
                view = torch.empty(segment.numel, dtype=segment.unit.dtype, device=work.raw.device)
            elif view is None:
                assert window is not None, "a segment without a view is staged"
                view = window.tensor.view(segment.unit.dtype)
            outs.append(view)
        return outs

    def _write(self, work: Work, job: UpdateJob) -> None:
        """Start the way home of the state and of the parameters."""
        home = self._inventory.home(work.subgroup, "state")
        if home.tier.view(home.slot) is None:
            assert work.lease is not None
            nbytes = work.layout.nbytes
            work.writes.append(home.tier.write(home.slot, Window(work.raw, work.lease.memory[:nbytes])))
        for (segment, window), out in zip(self._staged_outs(work, job.param_kind), work.outs, strict=True):
            if window is not None:
                self._send(work, job, segment, window, out)

    def _send(self, work: Work, job: UpdateJob, segment: Segment, window: Window, out: torch.Tensor) -> None:
        accelerator = self._runtime.accelerator
        if self._updates_on_device(work.subgroup):
            target = window.tensor
            accelerator.lane("update").submit(
                lambda: accelerator.copy(target, as_bytes(out)), after=[accelerator.record_compute()], holds=[out]
            ).wait()
        home = self._inventory.find(segment.unit, job.param_kind)
        if home is not None:
            offset = segment.unit_start * segment.unit.dtype.itemsize
            work.writes.append(home.tier.write(home.slot, window, offset))
            if (publication := job.publications.get(segment.unit.index)) is not None:
                publication.hand_over(offset, window.tensor, accelerator.copy)
            return
        target = as_bytes(self._slice(self._device_flat(segment.unit), segment))
        event = accelerator.lane("update").submit(
            lambda: accelerator.copy(target, window.tensor), after=[accelerator.record_compute()], holds=[target]
        )
        work.writes.append(event)

    def _finish(self, work: Work, progress: _Progress) -> None:
        """Wait until the work is written, give its buffer back, and publish the units that are complete with it."""
        for event in work.writes:
            self._wait(event, "wait_state", work.subgroup)
        if work.lease is not None:
            work.lease.release()
        progress.count_written(work.subgroup)

    def _wait(self, event: Event | None, cause: str, subgroup: SubGroup) -> None:
        if event is not None:
            with self._runtime.recorder.span("update", cause, f"sub-group {subgroup.index}"):
                event.wait()


class _Progress:
    """A unit's publication is made, and complete, when the last sub-group with a part of the unit is."""

    def __init__(self, publications: Mapping[int, Publication], subgroups: Sequence[SubGroup]) -> None:
        self._publications = publications
        self._unmade = Counter(segment.unit.index for subgroup in subgroups for segment in subgroup.segments)
        self._unwritten = self._unmade.copy()
        for index, publication in list(publications.items()):  # the driver adds to them meanwhile
            if not self._unwritten[index]:
                publication.complete()

    def count_skipped(self, subgroup: SubGroup) -> None:
        self.count_made(subgroup)
        self.count_written(subgroup)

    def count_made(self, subgroup: SubGroup) -> None:
        for publication in self._ended(self._unmade, subgroup):
            publication.finish_making()

    def count_written(self, subgroup: SubGroup) -> None:
        for publication in self._ended(self._unwritten, subgroup):
            publication.complete()

    def _ended(self, missing: Counter[int], subgroup: SubGroup) -> Iterator[Publication]:
        for segment in subgroup.segments:
            missing[segment.unit.index] -= 1
            if not missing[segment.unit.index] and segment.unit.index in self._publications:
                yield self._publications[segment.unit.index]

    def fail(self, error: BaseException) -> None:
        for publication in list(self._publications.values()):
            publication.fail(error)


def has_gradient(subgroup: SubGroup, gradients: StepGradients) -> bool:
    return any(gradients.has(s.unit, piece.param) for s in subgroup.segments for piece in s.pieces)


def _nbytes(segment: Segment) -> int:
    return segment.numel * segment.unit.dtype.itemsize
