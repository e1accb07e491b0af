"""Where gradients go: one crossing, sums in order, back-pressure, and what is refused."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.inspection import held_nbytes
from tests.support.inspection.insides import Inventory, UnitUpdate
from tests.support.tier_rig import make_runtime
from tests.support.units import make_params, make_unit
from tiered_zero.concurrency.transfer import Completion
from tiered_zero.errors import ModelError
from tiered_zero.grads import gradient
from tiered_zero.grads.check import OverflowGuard
from tiered_zero.grads.gradient import NUM_KEPT, SUM_CHUNK_NUMEL, InFlightGradients, UnitGradients
from tiered_zero.grads.store import GradientStore
from tiered_zero.hardware.device.accelerator import LaneTransfer
from tiered_zero.hardware.memory.host_memory import HostArena, StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.native.norms import GradNorm
from tiered_zero.sizes import MIB

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class World:
    """A store over units of 1-D parameters. `sums`: planned with fp32 homes. `rank`: whose shards are kept; None: whole
    units."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        on_device: bool = False,
        sums: bool = False,
        in_flight: int = MIB,
        spare: bool = False,
        runtime: Runtime | None = None,
        rank: int | None = None,
    ) -> None:
        self.units = list(units)
        self.runtime = runtime or make_runtime()
        self.params = [make_params(unit) for unit in units]
        members = {
            param: (unit, entry)
            for unit, params in zip(units, self.params, strict=True)
            for param, entry in zip(params, unit.entries, strict=True)
        }

        def home(unit: Unit) -> UnitGradients:
            shard = None if rank is None else unit.shard(rank)
            numel = unit.numel if shard is None else len(shard)
            flats = [torch.zeros(numel, dtype=torch.float32 if sums else unit.dtype) for _ in range(1 + spare)]
            return UnitGradients(
                unit=unit, flat=flats[0], spare=flats[1] if spare else None, on_device=on_device, shard=shard
            )

        self.homes = homes = [home(unit) for unit in units]
        self.inventory = Inventory()
        arena = HostArena(MIB, self.runtime.accelerator, False, self.runtime.ledger)
        staging = StagingPool(arena, 8192, 1, "staging", self.runtime.recorder, 5.0)
        norms = GradNorm(None)
        transfers = InFlightGradients(self.runtime, in_flight, staging, norms)
        overflow = OverflowGuard(None, checks=False)
        self.store = GradientStore(members, homes, self.inventory, self.runtime, transfers, norms, overflow)

    def give(self, param: nn.Parameter, grad: torch.Tensor) -> Unit | None:
        param.grad = grad
        completed = self.store.accumulate(param)
        assert param.grad is None, "moved to its home"
        return completed

    def sums(self) -> dict[int, torch.Tensor]:
        self.store.wait_transfers()
        return {spec.index: grad.clone() for spec, grad in present(self.store)}


def present(store: GradientStore) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
    """The parameters with a gradient, and its [numel] view, in the order of the model."""
    for gradients, entry in store._found():
        yield entry.param, gradients.flat[entry.start : entry.stop]


def randn(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel).to(dtype)


def added(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """As plain PyTorch adds them: the first, plus the second, plus the third, in fp32."""
    total = grads[0].to(torch.float32)
    for grad in grads[1:]:
        total = total + grad
    return total


class OnAccelerator(torch.Tensor):
    """A tensor of the CPU that says it is none of it."""

    is_cpu = False


def test_norms_are_launched_where_gradients_are_computed_and_no_copy_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One wait of the host a step for all norms, and none for a gradient."""
    world = World([make_unit(0, [5, 700, 3])])
    events: list[str] = []
    norm, copy = torch._foreach_norm, world.runtime.accelerator.copy
    monkeypatch.setattr(torch, "_foreach_norm", lambda *args, **how: events.append("norms") or norm(*args, **how))

    def record_copy(target: torch.Tensor, source: torch.Tensor, finish: bool = False) -> None:
        events.append("copy and wait" if finish else "copy")
        copy(target, source)

    monkeypatch.setattr(world.runtime.accelerator, "copy", record_copy)
    grads = [randn(param.numel()) for param in world.params[0]]
    world.store.begin_backward(is_last=True)
    for param, grad in zip(world.params[0], grads, strict=True):
        world.give(param, grad.as_subclass(OnAccelerator))
    world.store.wait_transfers()
    assert events == ["norms", "copy", "copy", "copy"]
    assert [found for _, found in world.store.norms()] == [torch.linalg.vector_norm(grad) for grad in grads]
    # a second backward adds up in host memory, where its norms are taken; two parts may be on their way
    world.store.end_backward()
    world.give(world.params[0][1], grads[1].as_subclass(OnAccelerator))
    world.store.wait_transfers()
    [_, (_, found), _] = world.store.norms()
    assert found == torch.linalg.vector_norm(grads[1] + grads[1]) and events[4:] == ["copy"]
    world.runtime.accelerator.close()


@settings(max_examples=20)
@given(
    numels=st.lists(st.integers(0, 5000), min_size=1, max_size=4).filter(any),
    num_passes=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    on_device=st.booleans(),
    sums=st.booleans(),
    in_flight=st.sampled_from([0, 5000, MIB]),
)
def test_sums_are_plain_pytorchs(
    numels: list[int], num_passes: int, dtype: torch.dtype, on_device: bool, sums: bool, in_flight: int
) -> None:
    runtime = make_runtime(seed=3)
    try:
        world = World(
            [make_unit(0, numels, dtype)], on_device=on_device, sums=sums, in_flight=in_flight, runtime=runtime
        )
        given_grads: dict[int, list[torch.Tensor]] = {}
        for _ in range(num_passes):
            for index, param in enumerate(world.params[0]):
                grad = randn(param.numel(), dtype)
                given_grads.setdefault(index, []).append(grad.clone())
                world.give(param, grad)
            world.store.end_backward()
        for index, grad in world.sums().items():
            expected = added(given_grads[index])
            assert torch.equal(grad, expected.to(grad.dtype))
            assert grad.dtype == (torch.float32 if sums or num_passes > 1 else dtype)
    finally:
        runtime.accelerator.close()


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    runtime = make_runtime()
    yield runtime
    runtime.accelerator.close()


def test_long_gradients_cross_in_pieces(runtime: Runtime) -> None:
    numel = 3 * SUM_CHUNK_NUMEL + 17
    world = World([make_unit(0, [numel], torch.bfloat16)], sums=True, runtime=runtime)
    grads = [randn(numel, torch.bfloat16) for _ in range(3)]
    for grad in grads:
        world.give(world.params[0][0], grad.clone())
    assert torch.equal(world.sums()[0], added(grads))


@pytest.mark.parametrize("on_device", [True, False])
def test_several_backwards_are_promoted_to_fp32_with_one_warning(
    on_device: bool, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    units = [make_unit(0, [100], torch.bfloat16), make_unit(1, [100], torch.bfloat16)]
    world = World(units, on_device=on_device, runtime=runtime)
    tier = "device" if on_device else "host"
    grads = [[randn(100, torch.bfloat16) for _ in range(3)] for _ in units]
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            for index in range(2):
                world.give(world.params[index][0], grads[index][number].clone())
    assert [record.message for record in caplog.records if "fp32" in record.message][1:] == []
    assert "backward() called again before step(): gradients accumulate in fp32 (+16.0 KiB on" in caplog.text
    assert runtime.ledger.by_kind()[tier]["gradient_sums"][0] == 2 * 4 * units[0].numel
    sums = world.sums()
    for index in range(2):
        assert torch.equal(sums[10_000 * index], added(grads[index]))
    world.store.discard()
    world.give(world.params[0][0], grads[0][0].clone())  # the next step begins anew, and is charged for no more
    assert torch.equal(world.sums()[0], grads[0][0].to(torch.float32))
    assert runtime.ledger.by_kind()[tier]["gradient_sums"][0] == 2 * 4 * units[0].numel
    world.store.close()
    assert runtime.ledger.by_kind()[tier]["gradient_sums"][0] == 0


def test_single_gradients_stay_in_16_bit(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    world = World([make_unit(0, [100], torch.bfloat16)], runtime=runtime)
    for _ in range(3):
        grad = randn(100, torch.bfloat16)
        world.give(world.params[0][0], grad.clone())
        assert torch.equal(world.sums()[0], grad)
        assert world.sums()[0].dtype == torch.bfloat16
        world.store.discard()
    assert caplog.text == ""


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send each gradient in a batch of its own."""
    monkeypatch.setattr(gradient, "BATCH_NBYTES", 1)


def test_small_gradients_of_a_unit_go_together(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the unit is complete, the next unit begins, somebody waits, or the batch is full."""
    monkeypatch.setattr(gradient, "BATCH_NBYTES", 3000)
    lane, names = runtime.accelerator.lane("reduce"), []
    submit = lane.submit

    def count(*args: Any, **kwargs: Any) -> LaneTransfer:
        names.append(len(kwargs["holds"]))
        return submit(*args, **kwargs)

    monkeypatch.setattr(lane, "submit", count)
    world = World([make_unit(0, [100] * 3), make_unit(1, [100] * 3), make_unit(2, [400] * 3)], runtime=runtime)
    grads = [randn(param.numel()) for params in world.params for param in params]
    params = [param for params in world.params for param in params]
    for index in (0, 1, 3, 2, 4):
        world.give(params[index], grads[index].clone())
    assert names == [2, 1, 1], "the batch of the second unit is open"
    world.homes[1].wait_transfers()
    for index in (5, 6, 7, 8):
        world.give(params[index], grads[index].clone())
    assert names == [2, 1, 1, 1, 1, 2, 1]
    assert all(map(torch.equal, world.sums().values(), grads))


def test_autograd_waits_while_too_much_is_on_its_way(runtime: Runtime, one_by_one: None) -> None:
    """Three gradients of 4000 bytes with room for two: the third waits for the first."""
    world = World([make_unit(0, [1000] * 4)], in_flight=8000, runtime=runtime)
    gate, ledger = threading.Event(), runtime.ledger
    runtime.accelerator.lane("reduce").submit(gate.wait)
    waited = threading.Thread(target=lambda: [world.give(param, randn(1000)) for param in world.params[0]], daemon=True)
    waited.start()
    deadline_s = time.monotonic() + 60
    try:
        while held_nbytes(ledger, "device") != 8000 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        waited.join(0.1)
        stalled, on_its_way = waited.is_alive(), ledger.by_kind()["device"]["gradient_in_flight"]
    finally:
        gate.set()
    waited.join(300)
    assert stalled and on_its_way == (8000, 8000)
    world.store.wait_transfers()
    assert ledger.by_kind()["device"]["gradient_in_flight"] == (0, 8000), "never more than the plan has"
    assert len(world.sums()) == 4


def test_a_gradient_larger_than_the_room_goes_alone(runtime: Runtime) -> None:
    world = World([make_unit(0, [1000] * 3)], in_flight=100, runtime=runtime)
    for param in world.params[0]:
        world.give(param, randn(1000))
    world.store.wait_transfers()
    assert runtime.ledger.by_kind()["device"]["gradient_in_flight"] == (0, 4000)


@pytest.mark.parametrize("end", ["finish_transfers", "wait_transfers", "discard", "close"])
def test_the_oldest_gradients_are_freed_first_and_the_last_at_the_end(
    end: str, runtime: Runtime, one_by_one: None
) -> None:
    world = World([make_unit(0, [1000] * 9)], runtime=runtime)
    alive = []
    for param in world.params[0]:
        grad = randn(1000)
        alive.append(weakref.ref(grad.untyped_storage()))
        world.give(param, grad)
        del grad
        runtime.accelerator.synchronize()
    assert [ref() is not None for ref in alive] == [False] * (9 - NUM_KEPT - 1) + [True] * (NUM_KEPT + 1)
    getattr(world.store, end)()
    assert not any(ref() for ref in alive)
    assert runtime.ledger.by_kind()["device"]["gradient_in_flight"][0] == 0


def test_gradients_that_fail_to_cross_are_forgotten_all(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([make_unit(0, [1000] * 3)], runtime=runtime)
    gate = threading.Event()
    runtime.accelerator.lane("reduce").submit(gate.wait)

    def fail(*_: object, **__: object) -> None:
        raise OSError("the link is down")

    with monkeypatch.context() as patch:
        patch.setattr(GradNorm, "fuses", fail)
        for param in world.params[0]:
            world.give(param, randn(1000))
        gate.set()
        with pytest.raises(OSError, match="the link is down"):
            world.store.discard()
    assert world.sums() == {}
    assert runtime.ledger.by_kind()["device"]["gradient_in_flight"][0] == 0
    grad = randn(1000)
    world.give(world.params[0][0], grad.clone())
    assert torch.equal(world.sums()[0], grad)


def test_sparse_gradients_are_refused_by_name(runtime: Runtime) -> None:
    world = World([make_unit(0, [8])], runtime=runtime)
    with pytest.raises(ModelError, match=r"u0\.p0 is sparse.*sparse=False"):
        world.give(world.params[0][0], torch.ones(8).to_sparse())
    assert world.sums() == {}


@pytest.mark.parametrize("on_device", [True, False])
def test_gradients_of_any_layout(on_device: bool, runtime: Runtime) -> None:
    unit = make_unit(0, [64])
    for grad in (torch.randn(8, 8).t(), torch.randn(1).expand(8, 8), torch.randn(16, 8)[::2]):
        world = World([unit], on_device=on_device, runtime=runtime)
        param = world.params[0][0]
        param.data = param.data.view(8, 8)
        world.give(param, grad)
        assert torch.equal(world.sums()[0], grad.reshape(-1))


def test_an_empty_parameter_in_no_unit_is_let_go(runtime: Runtime) -> None:
    """A module of empty parameters only has no unit; autograd may give them gradients all the same."""
    world = World([make_unit(0, [8])], runtime=runtime)
    stray = nn.Parameter(torch.empty(0))
    stray.grad = torch.empty(0)
    world.store.accumulate(stray)
    assert stray.grad is None and world.sums() == {}


def test_no_gradient_is_not_a_gradient(runtime: Runtime) -> None:
    world = World([make_unit(0, [8, 8])], runtime=runtime)
    world.store.accumulate(world.params[0][0])
    world.give(world.params[0][1], torch.zeros(8))
    assert list(world.sums()) == [1], "a zero gradient is one"


def test_present_is_in_the_order_of_the_model(runtime: Runtime) -> None:
    world = World([make_unit(1, [8, 8]), make_unit(0, [8, 8])], runtime=runtime)
    for params in reversed(world.params):
        for param in reversed(params):
            world.give(param, randn(8))
    assert list(world.sums()) == [0, 1, 10_000, 10_001]


def test_a_unit_is_complete_when_all_its_gradients_of_this_backward_are_there(runtime: Runtime) -> None:
    world = World([make_unit(0, [8, 8]), make_unit(1, [8])], sums=True, runtime=runtime)
    everything = [*itertools.chain(*world.params)]
    for _ in range(2):
        completed = [world.give(param, randn(8)) for param in everything]
        assert completed == [None, world.units[0], world.units[1]]
        world.store.end_backward()
    assert world.give(everything[0], randn(8)) is None
    world.store.end_backward()
    assert world.give(everything[1], randn(8)) is None, "half of one backward and half of the next make no whole"


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduced_gradients_reach_the_home_of_a_shard(on_device: bool, dtype: torch.dtype, runtime: Runtime) -> None:
    """Whole gradients wait for a bucket; the shard's home gets what comes of it, once it is there, and adds in fp32."""
    unit = make_unit(0, [100, 60], dtype, world_size=2)
    world, grads = World([unit], on_device=on_device, runtime=runtime, rank=1), [randn(40, dtype), randn(40, dtype)]
    own = world.homes[0]
    first = world.params[0][0]
    assert world.give(first, randn(100, dtype)) is None
    assert world.give(world.params[0][1], randn(60, dtype)) is unit
    assert runtime.ledger.by_kind()["device"]["gradient_in_flight"][0] == 160 * dtype.itemsize
    taken = own.take_waiting()
    assert [len(values) for values in taken.values()] == [100, 60] and not own.waiting
    world.store.free_taken(taken)
    assert runtime.ledger.by_kind()["device"]["gradient_in_flight"][0] == 0
    start = unit.shard(1).start + 20
    reduced = [Completion(), Completion()]
    received = []
    for grad, after in zip(grads, reduced, strict=True):
        received.append(
            world.store.receive(own, range(start, start + len(grad)), grad, adds=bool(received), after=after)
        )
        assert not received[-1].done()
        after.complete()
        received[-1].wait()
    world.store.wait_transfers()
    share = world.store.detach_step().shares[unit]
    assert share.start == unit.shard(1).start and share.flat.numel() == len(unit.shard(1))
    assert torch.equal(share.flat[20:60], added(grads)) and share.flat.dtype == torch.float32
    assert share.present == {entry.param.index for entry in unit.entries}


def test_gradients_that_wait_for_a_bucket_are_dropped_with_the_step(runtime: Runtime) -> None:
    world = World([make_unit(0, [8], world_size=2)], runtime=runtime, rank=0)
    world.give(world.params[0][0], randn(8))
    world.store.discard()
    assert runtime.ledger.by_kind()["device"]["gradient_in_flight"][0] == 0
    assert not world.homes[0].waiting and not world.store.has_gradients


def test_a_gradient_waits_until_the_last_update_has_read_the_one_before(runtime: Runtime) -> None:
    world = World([make_unit(0, [8]), make_unit(1, [8])], runtime=runtime)
    update = UnitUpdate()
    world.inventory.set_last_update(world.units[0], update)
    world.give(world.params[1][0], randn(8))  # another unit's, at once
    giving = threading.Thread(target=world.give, args=(world.params[0][0], randn(8)), daemon=True)
    giving.start()
    giving.join(0.2)
    assert giving.is_alive()
    update.computed.complete()
    giving.join(300)
    assert not giving.is_alive() and len(world.sums()) == 2


def test_discard_drops_the_step(runtime: Runtime) -> None:
    world = World([make_unit(0, [8])], sums=True, runtime=runtime)
    world.give(world.params[0][0], randn(8))
    world.store.discard()
    assert world.sums() == {} and not world.store.norms()
    grad = randn(8)
    world.give(world.params[0][0], grad.clone())
    assert torch.equal(world.sums()[0], grad)


@pytest.mark.parametrize("spare", [True, False])
def test_handed_gradients_stay_while_the_next_step_begins(spare: bool, runtime: Runtime) -> None:
    world = World([make_unit(0, [8, 8])], spare=spare, runtime=runtime)
    unit, grads = world.units[0], [randn(8) for _ in range(3)]
    world.give(world.params[0][0], grads[0].clone())
    world.store.wait_transfers()
    handed = world.store.detach_step()
    assert handed.shares[unit].present == {unit.entries[0].param.index}
    assert world.sums() == {}
    if spare:
        world.give(world.params[0][0], grads[1].clone())
        world.store.wait_transfers()
    assert torch.equal(handed.shares[unit].flat[:8], grads[0])
    if spare:
        second = world.store.detach_step()
        world.give(world.params[0][0], grads[2].clone())
        world.store.wait_transfers()
        assert torch.equal(second.shares[unit].flat[:8], grads[1]), "the two flats take turns"
        assert torch.equal(handed.shares[unit].flat[:8], grads[2])


@pytest.mark.parametrize("num_passes", [1, 2])
def test_norms_taken_on_arrival_are_those_of_the_sums(num_passes: int, runtime: Runtime) -> None:
    world = World([make_unit(0, [5000, 1, 0])], sums=True, runtime=runtime)
    for number in range(num_passes):
        world.store.begin_backward(is_last=number == num_passes - 1)
        for param in world.params[0]:
            world.give(param, randn(param.numel()))
    sums = world.sums()
    norms = {spec.index: norm for spec, norm in world.store.norms()}
    assert norms.keys() == sums.keys()
    for index, grad in sums.items():
        assert norms[index] == torch.linalg.vector_norm(grad)


def test_a_norm_that_became_old_is_forgotten(runtime: Runtime) -> None:
    world = World([make_unit(0, [8])], sums=True, runtime=runtime)
    for is_last in (True, False):
        world.store.begin_backward(is_last=is_last)
        world.give(world.params[0][0], randn(8))
        world.store.wait_transfers()
        assert world.store.norms()[0][1] == torch.linalg.vector_norm(world.sums()[0])
