"""Average gradients over ranks, in buckets (arrays with gradients of one or more units), in the order of
`layout.buckets`.

Buckets are reduced in backward if each rank keeps only its shard of gradients, or with `overlap_comm` and gradients on
the device; else in step(). Backward has passed a unit when it will produce no more gradients of the unit. A bucket that
is reduced in backward waits until backward has passed all its units, or ends.

Ranks first agree on the buckets to reduce. All ranks reduce and gather in the same order, because the order does not
depend on when a gradient or a transfer is complete. See [Note: Places of reductions] and [Note: Order of sums over
ranks]."""

from __future__ import annotations

import json
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, final
from weakref import WeakSet
from zlib import crc32

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import RankError
from tiered_zero.grads.check import NONE_BAD, GradCheck, check_squares, span_squares
from tiered_zero.grads.gradient import UnitGradients
from tiered_zero.grads.store import GradientStore
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.buckets import Bucket
from tiered_zero.layout.flat import Unit

_CALL = struct.Struct("<cqqq")
_SQUARES = struct.Struct("<dqI")
_BACKWARD, _STEP = b"b", b"s"

NO_MARK = 1 << 62
"""A number that stands for no mark. It is greater than the `number` of every `UseMark`."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How gradients are reduced. `buckets`: all buckets, in the order of their reduction. `gathers`: whether every rank
    gets the whole average, not only its shards of it. `predivisor`: divides gradients before the sum. `postdivisor`:
    divides the sums. `dtype`: the dtype of the sums; None: the dtype of the gradients. `overlaps`: whether backward
    goes on while a bucket is reduced. `shards_params`: whether parameters are sharded, and gathered in backward.
    `in_backward`: whether unsharded gradients are reduced in the last backward of a step; if False, in step()."""

    buckets: Sequence[Bucket]
    gathers: bool
    predivisor: float
    postdivisor: float = 1.0
    dtype: torch.dtype | None = None
    overlaps: bool = True
    shards_params: bool = False
    in_backward: bool = False


@final
class GradientReducer:
    """Averages the gradients of all ranks, bucket by bucket. Used on the driver thread, or on autograd's while the
    driver waits.

    After a reduction each rank's shard of a unit's flat holds the average. In step(), a parameter with a gradient on
    any rank gets one on all ranks, because ranks without one add zeros.

    [Note: Gradients of shards] If each rank keeps only its shards of gradients, every backward reduces buckets, in
    order:
    * If parameters are whole, a bucket is reduced once this rank's gradients of the bucket's units are complete.
    * If backward gathers parameters, a bucket is reduced once backward has passed the bucket's units.
    * When backward ends, the remaining buckets are reduced as they are.

    A gradient that comes after its bucket was reduced waits for step(), or for the next backward, which reduces it
    first.

    [Note: Whole gradients in backward] With `overlap_comm` and gradients on the device, the last backward of a step
    reduces buckets in the same way. The buckets are filled from flats, which hold sums over micro-batches. Afterwards
    this rank's shard of a reduced unit holds the average. A gradient that comes after its bucket was reduced waits for
    a later reduction of this step, which adds the gradient's average."""

    def __init__(
        self,
        store: GradientStore,
        units: Sequence[UnitGradients],
        runtime: Runtime,
        memory: Sequence[torch.Tensor],
        reduction: Reduction,
    ) -> None:
        """`units`: the gradients of all trainable units, in static order. `memory`: arrays, [n] uint8, for one bucket
        each."""
        self._store = store
        self._units = {each.unit: each for each in units}
        self._runtime = runtime
        self._collectives = runtime.collectives
        self._reduction = reduction
        self._accelerator = runtime.accelerator
        self._memory = BucketMemory(memory, runtime)
        self._own_spans: dict[Unit, list[range]] = {}
        """Unit -> the parts into which buckets divide this rank's shard. Squares are summed part by part."""
        for bucket in reduction.buckets:
            for part in bucket.parts:
                self._own_spans.setdefault(part.unit, []).append(part.spans[self._collectives.rank])
        self._names = {entry.param.index: entry.param.name for each in units for entry in each.unit.entries}
        self.is_sharded = any(each.shard is not None for each in units)
        self.shards_params = reduction.shards_params
        self._queue: deque[Bucket] = deque()
        """Buckets that this backward still has to reduce."""
        self._receiving: frozenset[Unit] = frozenset()
        """The units that this backward, or step(), reduces."""
        self._adding: frozenset[Unit] = frozenset()
        """Units in `_receiving` that already hold sums from earlier reductions of this step."""
        self._sources: dict[Unit, Mapping[int, torch.Tensor]] = {}
        """Unit -> parameter index -> this rank's gradient [numel], from which the unit's buckets are filled."""
        self.uses = UnitUses()
        """Decides when a bucket is reduced if parameters are whole. The function `on_met` given to `uses.note` must
        call `pass_mark`."""
        self.order = UseOrder()
        """Decides when a bucket is reduced if parameters are gathered in backward."""
        parts = [part for bucket in reduction.buckets for part in bucket.parts]
        self._bucket_order = [part.unit for part in parts if part.is_first]
        self._wide: frozenset[Unit] = frozenset()
        """Units for which some rank sums gradients of several backwards. They are reduced in fp32, unless
        `Reduction.dtype` is set."""
        self.is_open = False
        """Whether a backward that reduces gradients is running."""
        self._is_last = False
        """Whether the running reductions are the last ones of the step, made in its last backward or in step()."""
        self._num_backwards = self._num_steps = 0
        """`_num_backwards`: the number of backwards that have begun to reduce gradients since `check` last returned.
        `_num_steps`: the number of calls of `check` that have returned."""

    def close(self) -> None:
        """Drop the memory of gradients and buckets."""
        self._units.clear()
        self._memory = BucketMemory((), self._runtime)

    # -- in backward ---------------------------------------------------------------------------------------------------

    def note_backward(self, unit: Unit) -> None:
        """Record that a backward begins to use a gathered unit. Reduce the next buckets, up to the first one with a
        unit that this backward has not passed."""
        self.order.note_backward(unit)
        while self._queue and not any(map(self.order.is_awaited, self._queue[0].units)):
            self._reduce(self._queue.popleft())

    @property
    def reduces_in_backward(self) -> bool:
        """Whether a backward may reduce gradients. If so, every rank must run each backward."""
        return self.is_sharded or self._reduction.in_backward

    def begin_backward(self, *, is_last: bool) -> None:
        """Agree with the other ranks which units this backward reduces. Do nothing inside another backward, or if this
        backward reduces nothing. `is_last`: whether it is the step's last backward; equal on all ranks. Raises
        RankError if ranks make different calls."""
        if self.is_open or not (self.is_sharded or (is_last and self._reduction.in_backward)):
            return
        self.is_open = True
        self._is_last = False
        units = self._units.values()
        is_expected = self.order.is_expected if self.shards_params else self.uses.is_expected
        flags = [is_expected(unit) for unit in self._units]
        flags += [each.is_unreduced or (each.shard is None and each.holds_sums) for each in units]
        self._num_backwards += 1
        either = self._agree((_BACKWARD, self._num_steps, self._num_backwards), flags)
        used = [unit for unit, is_used in zip(self._units, either, strict=False) if is_used]
        self._widen(has_more and not self.is_sharded for has_more in either[len(units) :])
        if self.is_sharded:  # gradients of each backward are averaged separately
            self._reduce_all(unit for unit, is_late in zip(self._units, either[len(units) :], strict=True) if is_late)
        self._receive_next(used)
        for each in units:
            if each.unit in self._receiving and (each.num_sums or each.unit in self._wide):
                self._store.promote(each)
        self._is_last = is_last
        self._queue = deque(bucket for bucket in self._reduction.buckets if bucket.units & self._receiving)
        self.order.begin_backward(unit for unit in self._bucket_order if unit in self._receiving)

    def pass_mark(self, mark: UseMark) -> None:
        """Record that the backward has reached `mark`, which `UnitUses.note` has set. Then reduce the next complete
        buckets."""
        self.uses.meet(mark)
        self.reduce_complete()

    def reduce_complete(self) -> None:
        """Reduce the next buckets, in order, up to the first one that waits for gradients of this rank."""
        if self.shards_params:  # `note_backward` reduces
            return
        while self._queue and all(map(self._is_complete, self._queue[0].units & self._receiving)):
            self._reduce(self._queue.popleft())

    def end_backward(self) -> None:
        """End a backward: reduce all remaining buckets with the gradients that have arrived."""
        while self._queue:
            self._reduce(self._queue.popleft())
        self.is_open = False
        self.uses.end_backward(self._units.values())

    def abort(self) -> None:
        """Drop the backward that is under way, if any. Called when the step is dropped."""
        self._queue.clear()
        self._sources.clear()
        self.uses.abort()
        self.order.end_step()
        self.is_open = False

    def _is_complete(self, unit: Unit) -> bool:
        # in `_sources`: an earlier bucket has taken the gradients
        return unit in self._sources or self.uses.is_complete(self._units[unit])

    def _waits_apart(self, unit: Unit) -> bool:
        """Return whether the unit's gradients wait for their buckets in `UnitGradients.waiting`, not in the unit's
        flat."""
        return self._units[unit].shard is not None or unit in self._adding

    def _receive_next(self, units: Iterable[Unit]) -> None:
        """Set the units that the next reductions average. Other units in the same buckets are reduced as zeros."""
        self._receiving = frozenset(units)
        self._adding = frozenset(unit for unit in self._receiving if self._units[unit].num_sums)

    def _widen(self, flags: Iterable[bool]) -> None:
        """Set `_wide` to the units whose flag is true: some rank sums their gradients of several backwards. `flags`:
        one for each unit, equal on all ranks."""
        self._wide = frozenset(unit for unit, is_wide in zip(self._units, flags, strict=True) if is_wide)

    # -- in step() -----------------------------------------------------------------------------------------------------

    def check(
        self,
        micro_steps: int,
        global_steps: int,
        loss_scale: float,
        max_norm: float,
        group_values: Sequence[Mapping[str, str]] = (),
    ) -> GradCheck:
        """Reduce the remaining gradients of this step, and check the averages. The result is equal on all ranks.
        `group_values`: the values of param groups. Raises RankError if these, or the counts of steps, differ between
        ranks."""
        with self._runtime.recorder.span("compute", "reduce_ranks"):
            self._is_last = True
            self._reduce_all(self._agree_on_presence(micro_steps, global_steps))
            self._memory.finish_all()
            for each in self._units.values():
                if not each.on_device:
                    each.wait_transfers()  # the host reads the gradients
            own, bad = self._sum_squares()
            squares, bad = self._add_squares(own, bad, json.dumps(group_values).encode())
        self.uses.end_step()
        self.order.end_step()
        self._num_backwards = 0
        self._num_steps += 1
        return check_squares(squares, self._names.get(bad), loss_scale, max_norm)

    def _sum_squares(self) -> tuple[float, int]:
        """Return the fp64 sum of squares of the averages in this rank's shards, and the index of the first parameter
        whose gradient is not finite (or NONE_BAD). The host waits for the device once."""
        found: list[tuple[int, list[torch.Tensor]]] = []
        for each in self._units.values():
            if not each.present:
                continue
            squares = each.squares
            if not squares:
                with each.opened() as flat:
                    for span in self._own_spans.get(each.unit, ()):
                        values = flat[span.start - each.start : span.stop - each.start]
                        for index, more in span_squares(values, span, each.unit).items():
                            squares.setdefault(index, []).extend(more)
            order = [entry.param.index for entry in each.unit.entries if entry.param.index in each.present]
            found += [(index, squares[index]) for index in order if index in squares]
        numbers = iter(_on_host([square for _, squares in found for square in squares]))
        total, bad = 0.0, NONE_BAD
        for index, parts in found:
            total += (of_param := sum(next(numbers) for _ in parts))
            if not of_param < float("inf"):
                bad = index if bad == NONE_BAD else min(bad, index)
        return total, bad

    def _agree_on_presence(self, micro_steps: int, global_steps: int) -> frozenset[Unit]:
        """Agree with the other ranks which parameters have a gradient, and which units hold sums of several backwards.
        Return the units that have, on some rank, gradients that no bucket has copied yet."""
        entries = [(each, entry) for each in self._units.values() for entry in each.unit.entries]
        flags = [entry.param.index in each.present for each, entry in entries]
        units = self._units.values()
        flags += [each.is_unreduced for each in units]
        flags += [each.holds_sums for each in units]
        either = self._agree((_STEP, global_steps, micro_steps), flags)
        present = {entry.param.index for (_, entry), has in zip(entries, either, strict=False) if has}
        reduced = frozenset(unit for unit, has in zip(self._units, either[len(entries) :], strict=False) if has)
        self._widen(either[len(entries) + len(units) :])
        for each in units:
            absent = [e for e in each.unit.entries if e.param.index in present and e.param.index not in each.present]
            each.present.update(entry.param.index for entry in absent)
            if each.unit in self._wide and (each.shard is None or each.unit in reduced):
                self._store.promote(each)
            if not absent or each.num_sums:
                continue
            if each.shard is None:
                self._store.wait_update(each.unit)
                for entry in absent:
                    each.flat[entry.start : entry.stop] = 0
            elif each.unit not in reduced:  # on other ranks zero_grad() has set these gradients to 0
                self._store.wait_update(each.unit)
                with each.opened() as flat:
                    flat.zero_()
        return reduced

    # -- calls of all ranks --------------------------------------------------------------------------------------------

    def _agree(self, call: tuple[bytes, int, int], flags: Sequence[bool]) -> list[bool]:
        """Exchange `flags` with all ranks. Return for each flag whether any rank has set it.

        `call`: (_STEP, step, micro-batch), or (_BACKWARD, step, number of the backward). Raises RankError on every rank
        if two ranks make different calls, or have made different numbers of reductions in this step."""
        kind, number, part = call
        bits = sum(flag << place for place, flag in enumerate(flags))
        packed = bits.to_bytes((len(flags) + 7) // 8, "little")
        own = _CALL.pack(*call, sum(each.num_sums for each in self._units.values()))
        what = f"step {number}" if kind == _STEP else f"backward {part} after step {number}"
        found = self._collectives.exchange(own + packed, what, kind="step or backward")
        calls = [_CALL.unpack_from(message) for message in found]
        if len(set(calls)) > 1 or len({len(message) for message in found}) > 1:
            counts = len({each[:3] for each in calls}) == 1  # else their steps and backwards differ, which says enough
            texts = ", ".join(f"rank {rank} {_text(each, counts)}" for rank, each in enumerate(calls))
            raise RankError(
                f"engine.backward() and engine.step() were expected in the same order on every rank; {texts}. Give "
                "every rank the same number of batches (a distributed sampler does), and let none leave a step out."
            )
        either = 0
        for message in found:
            either |= int.from_bytes(message[_CALL.size :], "little")
        return [bool(either >> place & 1) for place in range(len(flags))]

    def _add_squares(self, squares: float, bad: int, group_values: bytes) -> tuple[float, int]:
        """Return the sum of all ranks' `squares`, added in rank order, and the lowest `bad`. `bad`: the index of this
        rank's first parameter whose gradient is not finite, or NONE_BAD. `group_values`: the values of param groups, as
        JSON. Raises RankError if they differ between ranks."""
        message = _SQUARES.pack(squares, bad, crc32(group_values))
        found = [_SQUARES.unpack(each) for each in self._collectives.exchange(message, "the gradient norm")]
        if len({values for _, _, values in found}) > 1:
            raise _other_values(self._collectives.exchange(group_values, "values of param groups"))
        named = [index for _, index, _ in found if index != NONE_BAD]
        return sum(each for each, _, _ in found), min(named, default=NONE_BAD)

    # -- one bucket ----------------------------------------------------------------------------------------------------

    def _reduce_all(self, units: Iterable[Unit]) -> None:
        """Reduce all buckets of `units`. `units`: equal on every rank."""
        self._receive_next(units)
        for bucket in self._reduction.buckets:
            if bucket.units & self._receiving:
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        """Start to reduce a bucket and to move its sums to their homes. If `Reduction.overlaps` is False, also wait
        until the sums are at their homes."""
        for unit in bucket.units & self._receiving:
            if self._waits_apart(unit) and unit not in self._sources:
                self._sources[unit] = self._units[unit].take_waiting()
        dtype = self._dtype(bucket)
        memory = self._memory.take()
        typed = memory[: bucket.nbytes(dtype.itemsize)].view(dtype)
        packed, room = typed[: bucket.numel], typed[bucket.numel :]
        name = bucket.parts[0].unit.name
        with self._runtime.recorder.span("compute", "reduce", name, packed.nbytes):
            self._pack(bucket, packed)
        what, bounds = f"the gradients of {name}", bucket.bounds
        after = [self._accelerator.record_compute()] if self._memory.on_device else []
        done = self._collectives.reduce_scatter(packed, room, what, after=after, bounds=bounds)
        if self._reduction.gathers:
            row = bucket.row(self._collectives.rank)
            total = packed[row.start : row.stop]
            done = self._collectives.all_gather(packed, total, what, after=[done], bounds=bounds)
        self._memory.hold(memory, self._receive(bucket, packed, done))
        if not self._reduction.overlaps:
            self._memory.finish_all()

    def _dtype(self, bucket: Bucket) -> torch.dtype:
        """Return the dtype in which ranks sum the bucket: `Reduction.dtype`, if it is set. Otherwise return fp32 if any
        rank has added up gradients of several backwards for a unit of the bucket, else the dtype of the units."""
        if self._reduction.dtype is not None:
            return self._reduction.dtype
        own: torch.dtype = bucket.parts[0].unit.dtype
        return torch.float32 if bucket.units & self._wide else own

    def _pack(self, bucket: Bucket, packed: torch.Tensor) -> None:
        """Fill a bucket with this rank's gradients, divided by `Reduction.predivisor`. Write zeros where there is no
        gradient."""
        for part in bucket.parts:
            unit, is_apart = part.unit, self._waits_apart(part.unit)
            if part.is_first and unit in self._receiving and not is_apart:
                self._sources[unit] = self._units[unit].entries_present()
            sources = self._sources.get(unit, {})
            for span, start in zip(part.spans, part.starts, strict=True):
                self._fill(packed[start : start + len(span)], unit, span, sources)
            if part.is_last and self._sources.pop(unit, None) is not None and is_apart:
                self._store.free_taken(sources)

    def _fill(self, out: torch.Tensor, unit: Unit, span: range, sources: Mapping[int, torch.Tensor]) -> None:
        """Fill `out` with elements `span` of the unit's gradients. `sources`: index of a parameter -> its gradient; a
        parameter without one gets zeros."""
        position = span.start
        for entry in unit.entries:
            first, stop = max(entry.start, span.start), min(entry.stop, span.stop)
            if first >= stop or (source := sources.get(entry.param.index)) is None:
                continue
            out[position - span.start : first - span.start].zero_()
            values = source[first - entry.start : stop - entry.start]
            self._divide(values, out[first - span.start : stop - span.start])
            position = stop
        out[position - span.start :].zero_()

    def _divide(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write `values`, divided by `Reduction.predivisor`, to `out`. Divide in the wider of the two dtypes."""
        if values.device != out.device:
            values = values.to(out.device)
        if out.itemsize > values.itemsize:
            values = out.copy_(values)
        torch.div(values, self._reduction.predivisor, out=out)

    def _receive(self, bucket: Bucket, packed: torch.Tensor, done: Transfer) -> Transfer:
        """Start to move a bucket's sums from `packed` to their homes, once the transfer `done` has reduced them. Return
        the last transfer."""
        rank = self._collectives.rank
        for part in bucket.parts:
            if part.unit not in self._receiving:
                continue
            each = self._units[part.unit]
            if part.is_first:
                each.squares = {}  # drop the squares of an earlier sum
            adds, divisor = part.unit in self._adding, self._reduction.postdivisor
            spans = list(zip(part.spans, part.starts, strict=True))
            for owner, (span, start) in enumerate(spans) if self._reduction.gathers else [(rank, spans[rank])]:
                done = self._store.receive(
                    each,
                    span,
                    packed[start : start + len(span)],
                    adds=adds,
                    after=done,
                    divisor=divisor,
                    measures=owner == rank and (self._is_last or self._memory.on_device),
                )
            each.num_sums += part.is_first
        return done  # transfers complete in order


def _on_host(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of 0-d tensors, in their order. Copy the values on the device to the host in one copy."""
    on_device = [number for number in numbers if not number.is_cpu]
    came = iter(torch.stack(on_device).tolist() if on_device else ())
    return [float(number) if number.is_cpu else next(came) for number in numbers]


@final
class BucketMemory:
    """The memory of buckets: arrays [n] uint8. Each array is free, or holds a bucket that is being reduced. Used on the
    reducer's threads."""

    def __init__(self, memory: Sequence[torch.Tensor], runtime: Runtime) -> None:
        self._runtime = runtime
        self.on_device = any(not each.is_cpu for each in memory)
        self._free = deque(memory)
        self._under_way: deque[tuple[torch.Tensor, Transfer]] = deque()
        """The array of each bucket that is being reduced, and the transfer after which it is free, oldest first."""

    def take(self) -> torch.Tensor:
        """Return an array for one bucket; if none is free, wait for the oldest bucket."""
        if not self._free:
            self._finish_oldest()  # every rank has started to reduce it
        return self._free.popleft()

    def hold(self, memory: torch.Tensor, received: Transfer) -> None:
        """Keep a bucket's array `memory` in use until the transfer `received` has moved the bucket's sums to their
        homes."""
        self._under_way.append((memory, received))

    def finish_all(self) -> None:
        """Wait until the sums of every bucket are at their homes. For buckets on the device, compute's stream waits
        instead of the host."""
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait until the sums of the oldest bucket are at their homes, and free its array. For a bucket on the device,
        compute's stream waits instead of the host."""
        memory, received = self._under_way.popleft()
        with self._runtime.recorder.span("compute", "wait_grad"):
            if self.on_device:
                self._runtime.accelerator.wait_on_compute(received)  # compute fills the array next
            else:
                received.wait()
        self._free.append(memory)


def _text(call: tuple[bytes, int, int, int], counts: bool) -> str:
    kind, number, part, num_sums = call
    where = f"is at step {number}, micro-batch {part}" if kind == _STEP else f"runs backward {part} after step {number}"
    return f"{where}, with {num_sums} sums of gradients" if counts else where


def _other_values(messages: Sequence[bytes]) -> RankError:
    """Return the error for a value of param groups that differs between ranks. `messages`: each rank's values, as
    JSON."""
    ranks = [json.loads(message) for message in messages]
    for index, groups in enumerate(zip(*ranks, strict=True)):
        for name in groups[0]:
            if len({group.get(name) for group in groups}) > 1:
                texts = ", ".join(f"{group.get(name)} on rank {rank}" for rank, group in enumerate(groups))
                return RankError(
                    f"Every rank was expected to have the same values in optimizer.param_groups, as each updates its "
                    f"part of the weights; {name} of group {index} is {texts}. Set it alike: a scheduler that follows "
                    "a loss, as ReduceLROnPlateau does, needs that of all ranks, which engine.exchange() gives."
                )
    return RankError("Every rank was expected to have the same values in optimizer.param_groups; found others.")


# -- when a backward has passed a unit ---------------------------------------------------------------------------------


@final
class UseMark:
    """A hook on an input of one call of a module. It runs when backward has passed the call, and exists as long as the
    call's graph. `number`: the hook's place in the order of calls. `is_met`: whether a backward has reached the
    hook."""

    __torch_unserializable__ = True  # users may save a tensor that has the hook

    def __init__(self, number: int, on_met: Callable[[UseMark], None]) -> None:
        self.number = number
        self.is_met = False
        self._on_met = on_met

    def __call__(self, _grad: torch.Tensor) -> None:
        self._on_met(self)


@final
class UnitUses:
    """Decides when backward has passed a unit, that is, will produce no more gradients of the unit. Serves parameters
    that are whole on each rank. Used on the driver thread or autograd's.

    [Note: Marks of uses] Autograd runs nodes in the reverse order of forward if it can. So a hook on a module's input
    runs after all gradients of the module's parameters. `note` puts such a hook, a mark, on an input of each call of a
    module that owns units. A backward that meets a mark has passed that call and all later ones. A unit is passed when
    backward has passed all of its calls.

    A call has no mark if autograd has computed none of its inputs, for example token ids. A unit with such a call is
    passed once all of its parameters that ever had a gradient have one in this backward. A use of a parameter outside
    of its module is not noted. A gradient that comes later waits in the gradient store, which costs only memory and
    time."""

    def __init__(self) -> None:
        self._numbers = count()
        self._marks: dict[Unit, WeakSet[UseMark]] = {}
        """Unit -> the marks of its uses in graphs that still exist."""
        self._unmarked: set[Unit] = set()
        """Units of modules that were called without a mark since the last step(). See [Note: Marks of uses]."""
        self._front = NO_MARK
        """The lowest number of a mark that the running backward has reached; NO_MARK if it has reached none."""
        self._seen: dict[Unit, set[int]] = {}
        """Unit -> indices of its parameters that ever had a gradient."""

    def note(self, units: Iterable[Unit], inputs: Sequence[Any], on_met: Callable[[UseMark], None]) -> None:
        """Record that the forward of a module that owns `units` begins. Put a mark on the first tensor in `inputs`, the
        module's arguments, that autograd has computed. A backward that reaches the mark calls `on_met`."""
        # an input that autograd has computed: hooks of leaves do not run in the order of forward
        marked = next((each for each in inputs if isinstance(each, torch.Tensor) and each.grad_fn is not None), None)
        if marked is not None:
            mark = UseMark(next(self._numbers), on_met)
            marked.register_hook(mark)  # type: ignore[no-untyped-call]
            for unit in units:
                self._marks.setdefault(unit, WeakSet()).add(mark)
        else:
            self._unmarked.update(units)

    def meet(self, mark: UseMark) -> None:
        """Record that a backward has reached `mark`, which `note` has put on an input of a module."""
        mark.is_met = True
        self._front = min(self._front, mark.number)

    def is_expected(self, unit: Unit) -> bool:
        """Return whether a backward can still produce gradients of the unit."""
        return bool(self._marks.get(unit)) or unit in self._unmarked

    def is_complete(self, each: UnitGradients) -> bool:
        """Return whether the running backward will produce no more gradients of the unit on this rank."""
        unit = each.unit
        if not self.is_expected(unit) or len(each.arrived) == len(unit.entries):
            return True
        marks = list(self._marks.get(unit, ()))  # a copy: garbage collection may end graphs at any time
        if marks and unit not in self._unmarked:
            last = max(mark.number for mark in marks)
            return last >= self._front and all(mark.is_met or mark.number > self._front for mark in marks)
        expected = self._seen.get(unit)
        return expected is not None and expected <= each.arrived

    def end_backward(self, units: Iterable[UnitGradients]) -> None:
        for each in units:
            if each.arrived:
                self._seen.setdefault(each.unit, set()).update(each.arrived)
        self._front = NO_MARK

    def end_step(self) -> None:
        self._unmarked.clear()

    def abort(self) -> None:
        """Forget all recorded uses of units, and their marks. Called when the step is dropped and no backward runs any
        more."""
        self._front = NO_MARK
        self._marks.clear()
        self.end_step()


@final
class UseOrder:
    """Decides when backward has passed a unit. The decision depends only on the order in which units are used. Serves
    parameters that are gathered in backward. Used on the driver thread, or on autograd's while the driver waits.

    [Note: Places of reductions] At stage 3 gathers and reductions are collectives of one group, so every rank must call
    them in the same order. All ranks gather units in the same order ([Note: Order of gathers]). But ranks may get
    different gradients, at different times, for example with experts. So the arrival of a gradient does not start a
    reduction. A unit's buckets are reduced when backward begins to use a unit of another module, before the gather of
    this other unit. Gradients that come later wait for the next backward or step().

    A unit is passed once backward has used it as often as forward did, and begins to use a unit of another module. A
    unit of the same module does not count, because units of one module take turns. A unit that backward does not use is
    passed together with a later unit in the order of buckets. The buckets of all other units are reduced at the end of
    backward."""

    def __init__(self) -> None:
        self._left: Counter[Unit] = Counter()
        """Unit -> the number of its uses in forward that backward has not repeated yet. Has a key for each unit used
        since the last step()."""
        self._awaited: deque[Unit] = deque()
        """Units to reduce in this backward that backward has not passed yet (see the class), in the order of
        buckets."""
        self._used: set[Unit] = set()
        """Units that this backward has used."""

    def note_forward(self, unit: Unit) -> None:
        """Record that a forward begins to use the unit. Called for a forward that autograd records or will
        recompute."""
        self._left[unit] += 1

    def is_expected(self, unit: Unit) -> bool:
        """Return whether a backward can still produce gradients of the unit."""
        return unit in self._left

    def begin_backward(self, units: Iterable[Unit]) -> None:
        """Begin a backward. `units`: the units whose gradients it reduces, in the order of their buckets."""
        self._awaited = deque(units)
        self._used.clear()

    def note_backward(self, unit: Unit) -> None:
        """Record that the backward begins to use the unit."""
        if self._left[unit]:
            self._left[unit] -= 1
        self._used.add(unit)
        num_passed = 0
        for number, awaited in enumerate(self._awaited, start=1):
            if awaited not in self._used:
                continue
            if awaited.module == unit.module or self._left[awaited]:
                break
            num_passed = number
        for _ in range(num_passed):
            self._awaited.popleft()

    def is_awaited(self, unit: Unit) -> bool:
        """Return whether this backward reduces the unit and has not passed it yet."""
        return unit in self._awaited

    def end_step(self) -> None:
        self._left.clear()
