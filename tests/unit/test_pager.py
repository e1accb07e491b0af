"""Which units are on the device: states, the hard cap, prefetching, views, failures. Over a tier of log entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tiered_zero
from tests.fakes.pager_world import World
from tests.support.configs import config_of
from tests.support.inspection import held_nbytes
from tests.support.inspection.insides import UnitUpdate
from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import BudgetError, ModelError, ParameterOffloadedError, TransferError
from tiered_zero.unit.driver import Phase
from tiered_zero.unit.saved_views import SavedView
from tiered_zero.unit.unit import UnitState


def test_the_four_states_and_back() -> None:
    world = World([1, 1], prefetch=1)
    world.pager.phase.now = Phase.FORWARD
    assert world.state(0) is UnitState.OFFLOADED
    world.check_guarded(0)
    for _ in range(2):
        world.use(0, 1)
    with world.frame([world.units[0]]):
        assert (world.state(0), world.state(1)) == (UnitState.IN_USE, UnitState.FETCHING)
        world.check_guarded(1)  # its bytes are there or on their way, but nobody has waited for them
        assert world.live_pages == 2
    assert world.state(0) is UnitState.OFFLOADED
    world.check_guarded(0)


def test_nested_frames_hold_until_the_last_ends() -> None:
    world = World([1, 1])
    outer, inner = world.units
    with world.frame([outer]):
        with world.frame([outer, inner]):
            world.check_in_use(0)
            world.check_in_use(1)
        world.check_in_use(0)
        world.check_guarded(1)
    world.check_guarded(0)
    assert world.fetches() == [0, 1]


def test_updates_end_before_anything_is_written_by_hand() -> None:
    world = World([1])
    world.pager.offloaded_params.store = lambda unit, flat: world.calls.append("store")  # type: ignore[method-assign]
    with tiered_zero.gathered(world.params[0][0], modify=True):
        assert world.calls == ["read"]
    assert world.calls == ["read", "write", "store"] and world.changed == [0]


# -- the entry points -------------------------------------------------------------------------------------------------


def test_functional_use_inside_a_frame_holds_until_it_ends() -> None:
    world = World([1, 1])
    world.pager.phase.now = Phase.FORWARD
    with world.frame([world.units[0]]):
        assert torch.equal((world.params[1][0] * 1).detach(), world.values[1][: world.params[1][0].numel()])
        assert world.state(1) is UnitState.IN_USE
    assert world.state(1) is UnitState.OFFLOADED


def test_functional_use_between_steps_is_refused_by_name() -> None:
    world = World([1])
    with pytest.raises(
        ParameterOffloadedError, match=r"mul needs the bytes of parameter 'u0\.p1', .* tier nvme .*gathered"
    ):
        world.params[0][1] * 1
    assert world.fetches() == []


def test_two_parameters_of_one_call_do_not_evict_each_other() -> None:
    world = World([1, 1], live=2)
    with world.frame():
        total = world.params[0][1] + world.params[1][1]
    assert total.isfinite().all()
    tight = World([1, 1], live=1)
    with tight.frame(), pytest.raises(BudgetError, match=r"Unit u1 needs .*on it: u0"):
        tight.params[0][1] + tight.params[1][1]


def test_backward_finds_the_saved_view_wherever_the_bytes_are() -> None:
    world = World([1])
    storage = world.pager.storage(world.units[0])
    with world.frame(world.units):
        saved = world.pager.saved_views.pack(world.params[0][0].detach().view(-1))
    assert isinstance(saved, SavedView)
    assert not storage.is_full
    world.pager.phase.now = Phase.BACKWARD
    found = world.pager.saved_views.unpack(saved)
    assert torch.equal(found, world.values[0][: found.numel()])
    assert world.state(0) is UnitState.IN_USE


# -- the cap -----------------------------------------------------------------------------------------------------------


def test_the_cap_is_hard() -> None:
    world = World([2, 1, 1], live=3)
    first, second, third = world.units
    with world.frame([first]), world.frame([second]):
        with pytest.raises(BudgetError, match=r"Unit u2 needs .* already fill .*on it: u0, u1.*stage3_max_live"):
            world.pager.begin_gather(world.pager.units.by_unit[third])
        assert world.live_pages == 3
    world.use(2)
    assert world.peak_pages == 3


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    slack=st.integers(0, 6),
    prefetch=st.integers(0, 8),
    reuse=st.integers(0, 8),
    latency=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
)
def test_any_order_of_use_stays_under_the_cap_and_sees_the_right_bytes(
    sizes: list[int], slack: int, prefetch: int, reuse: int, latency: int, order: object
) -> None:
    world = World(sizes, live=max(sizes) + slack, prefetch=prefetch, reuse=reuse)
    world.tier.latency = latency
    uses = [order.randrange(len(sizes)) for _ in range(8)]  # type: ignore[attr-defined]
    for _ in range(3):
        world.pager.phase.now = Phase.FORWARD
        world.use(*uses)
        world.pager.end_pass()
        world.pager.phase.now = Phase.BACKWARD
        world.use(*reversed(uses))
        world.pager.end_pass()
        world.pager.phase.now = Phase.IDLE
        world.pager.invalidate()
        assert world.live_pages == 0
    assert world.peak_pages <= max(sizes) + slack


# -- prefetching and reuse ---------------------------------------------------------------------------------------------


def test_prefetching_stays_within_its_bucket() -> None:
    for bucket, ahead in ((0, []), (1, [1]), (2, [1, 2]), (3, [1, 2])):
        world = World([1, 1, 2, 1], prefetch=bucket if bucket < 3 else 2)
        world.pager.phase.now = Phase.FORWARD
        for _ in range(2):
            world.use(0, 1, 3, 2)
        if bucket in (2, 3):
            ahead = [1, 3]
        with world.frame([world.units[0]]):
            ready = [index for index in range(4) if world.state(index) is UnitState.FETCHING]
            assert ready == ahead, f"bucket of {bucket}"


def test_the_next_unit_is_prefetched_even_where_it_is_larger_than_the_bucket() -> None:
    world = World([3, 4, 5, 3], prefetch=1, live=9)
    world.pager.phase.now = Phase.FORWARD
    for _ in range(2):
        world.use(0, 1, 2, 3)
    for index, ahead in ((0, 1), (1, 2), (2, 3)):
        with world.frame([world.units[index]]):
            ready = [other for other in range(4) if world.state(other) is UnitState.FETCHING]
            assert ready == [ahead], "one ahead, and no more than one"
    assert world.peak_pages == 9, "charged, within the window"


def test_nothing_that_the_step_changes_is_fetched_ahead_across_it() -> None:
    """Its home is about to be written: the bytes would be thrown away, and read while they change."""
    ahead = {}
    for step_follows in (False, True):
        world = World([1, 1, 1, 1, 1], live=3, prefetch=9, frozen=[0])
        world.pager.phase.step_follows = step_follows
        for _ in range(2):
            for phase, order in ((Phase.FORWARD, (0, 1, 2, 3, 4)), (Phase.BACKWARD, (1, 2, 3, 4))):
                world.pager.phase.now = phase
                before = len(world.fetches())
                world.use(*order)
                world.pager.end_pass()
            ahead[step_follows] = world.fetches()[before:]
            world.pager.invalidate()
    assert ahead == {False: [3, 4, 0, 1], True: [3, 4, 0]}


def test_prefetching_evicts_only_what_is_used_later() -> None:
    world = World([1, 1, 1], live=2, prefetch=2, reuse=9)
    world.pager.phase.now = Phase.FORWARD
    for _ in range(3):
        world.use(0, 1, 2)
    num_fetches = len(world.fetches())
    world.use(0, 1, 2)
    assert len(world.fetches()) - num_fetches <= 3, "never fetched twice for one use"
    assert world.peak_pages == 2


def test_what_is_expected_soon_is_kept() -> None:
    for reuse, num_fetches in ((0, 6), (1, 5)):
        world = World([1, 1], reuse=reuse)
        world.pager.phase.now = Phase.FORWARD
        world.use(0, 1, 0, 1, 0, 1)  # after the fourth use the next ones are known
        assert len(world.fetches()) == num_fetches


def test_a_wrong_guess_costs_nothing_but_time() -> None:
    world = World([1, 1, 1], live=2, prefetch=1)
    world.pager.phase.now = Phase.FORWARD
    for _ in range(2):
        world.use(0, 1, 2)
    world.tier.refusing.add(("fetch", "u9"))
    with world.frame([world.units[0]]):
        assert world.state(1) is UnitState.FETCHING
    world.use(2)  # not 1
    assert world.peak_pages == 2


def test_backward_holds_a_unit_until_its_gradients_are_there() -> None:
    world = World([1, 1])
    world.pager.phase.now = Phase.BACKWARD
    world.use(0)
    assert world.state(0) is UnitState.IN_USE, "later nodes of the same unit are likely"
    world.pager.finish_gradients(world.units[0])
    assert world.state(0) is UnitState.OFFLOADED
    world.use(1)
    world.pager.end_pass()
    assert world.state(1) is UnitState.OFFLOADED


# -- views -------------------------------------------------------------------------------------------------------------


def test_a_storage_that_is_viewed_keeps_its_memory() -> None:
    world = World([1, 1], live=1)
    with world.frame([world.units[0]]):
        view = world.params[0][1].detach()
    assert world.state(0) is UnitState.OFFLOADED
    assert torch.equal(view, world.values[0][world.units[0].entries[1].start :][:372])
    with pytest.raises(BudgetError):
        world.pager.begin_gather(world.pager.units.by_unit[world.units[1]])
    assert torch.equal(view, world.values[0][world.units[0].entries[1].start :][:372]), "not for any other's sake"
    world.use(0)  # read again in place
    with world.frame([world.units[0]]):
        assert view.data_ptr() == world.params[0][1].data_ptr()


def test_memory_is_found_again_once_its_last_view_is_gone() -> None:
    world = World([1, 1], live=1)
    with world.frame([world.units[0]]):
        view = world.params[0][1].detach()
    del view
    world.use(1)
    assert world.peak_pages == 1


def test_a_viewed_unit_stops_a_prefetch_and_raises_nothing() -> None:
    world = World([1, 1], live=1, prefetch=1)
    world.pager.phase.now = Phase.FORWARD
    for _ in range(2):
        world.use(0, 1)
    with world.frame([world.units[0]]):
        view = world.params[0][1].detach()
        assert world.state(1) is UnitState.OFFLOADED
    world.use(0)
    del view
    world.use(1)


# -- steps, failures and ends ------------------------------------------------------------------------------------------


def test_invalidate_evicts_the_trainable_ones() -> None:
    world = World([1, 1], reuse=9, frozen=[1])
    world.pager.phase.now = Phase.FORWARD
    world.use(0, 1, 0, 1, 0, 1)
    assert [world.state(index) for index in (0, 1)] == [UnitState.CACHED, UnitState.CACHED]
    world.pager.invalidate()
    assert [world.state(index) for index in (0, 1)] == [UnitState.OFFLOADED, UnitState.CACHED]
    with world.frame([world.units[0]]), pytest.raises(ModelError, match=r"u0 is in use by tiered_zero\.gathered"):
        world.pager.invalidate()


def test_abort_ends_every_frame_and_empties_every_unit() -> None:
    world = World([1, 1, 1], prefetch=1)
    world.pager.phase.now = Phase.FORWARD
    for _ in range(2):
        world.use(0, 1, 2)
    world.pager.enter_frame([world.units[0]])
    world.pager.enter_frame([world.units[1]])
    world.pager.abort()
    assert not world.pager.is_running()
    assert [world.state(index) for index in range(3)] == [UnitState.OFFLOADED] * 3
    assert world.live_pages == 0
    world.use(0, 1, 2)


def test_abort_leaves_what_is_gathered() -> None:
    world = World([1, 1])
    paged = world.pager.units.by_param[world.params[0][0]]
    world.pager.begin_gather(paged)
    world.pager.enter_frame([world.units[1]])
    world.pager.abort()
    world.check_in_use(0)
    world.check_guarded(1)
    world.pager.end_gather(paged)
    assert world.live_pages == 0


def test_a_gather_that_fails_leaves_no_user_while_its_error_is_kept() -> None:
    world = World([1, 1])
    world.tier.failing.add(("fetch", "u0"))
    with pytest.raises(TransferError) as failed, tiered_zero.gathered(world.params[0][0]):
        pass
    assert failed.tb is not None
    assert not world.pager.units.by_param[world.params[0][0]].num_users
    world.tier.failing.clear()
    world.pager.invalidate()


@pytest.mark.parametrize("how", ["failing", "refusing"])
def test_a_failed_fetch_raises_and_leaves_nothing_behind(how: str) -> None:
    world = World([1, 1], live=1)
    getattr(world.tier, how).add(("fetch", "u0"))
    for _ in range(2):
        with pytest.raises(TransferError), world.frame([world.units[0]]):
            pytest.fail("in use without its bytes")
        assert world.state(0) is UnitState.OFFLOADED
        world.check_guarded(0)
        world.use(1)  # the room is there again, once the error's frames are gone
    world.pager.abort()
    assert world.live_pages == 0
    getattr(world.tier, how).clear()
    world.use(0)


def fail_fills(monkeypatch: pytest.MonkeyPatch, world: World, index: int, times: int) -> list[str]:
    """The next `times` allocations for the unit fail as the device's allocator does; returns the log of events."""
    storage, accelerator = world.pager.storage(world.units[index]), world.runtime.accelerator
    fill, log = storage.fill, []

    def failing() -> None:
        log.append("fill")
        if log.count("fill") <= times:
            raise torch.OutOfMemoryError("CUDA out of memory")
        fill()

    monkeypatch.setattr(storage, "fill", failing)
    monkeypatch.setattr(accelerator, "release_cached_memory", lambda: log.append(f"release at {world.live_pages}"))
    return log


def test_a_unit_that_finds_no_memory_is_charged_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([1, 1], live=1)
    fail_fills(monkeypatch, world, 0, times=8)
    for _ in range(4):
        with pytest.raises(torch.OutOfMemoryError), world.frame([world.units[0]]):
            pytest.fail("in use without memory")
        assert world.live_pages == 0 and world.pager.cache._live_nbytes == 0
        assert world.state(0) is UnitState.OFFLOADED
    world.use(0, 1)  # there is memory again, and all of the budget


def test_a_unit_that_finds_no_memory_is_fetched_once_idle_ones_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([1, 1, 1], reuse=9)
    world.pager.phase.now = Phase.FORWARD
    for _ in range(2):
        world.use(0, 1)
    assert world.live_pages > 0, "kept, for it is expected again soon"
    log = fail_fills(monkeypatch, world, 2, times=1)
    with world.frame([world.units[2]]):
        world.check_in_use(2)
    assert log == ["fill", "release at 0", "fill"]


def test_a_prefetch_that_finds_no_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([1, 1], prefetch=1)
    world.pager.phase.now = Phase.FORWARD
    for _ in range(2):
        world.use(0, 1)
    log = fail_fills(monkeypatch, world, 1, times=1)
    with world.frame([world.units[0]]):
        assert log == ["fill"] and world.state(1) is UnitState.OFFLOADED
    world.use(1)
    assert log == ["fill", "fill"]


def test_no_unit_gets_memory_that_a_failed_fetch_may_still_write_to() -> None:
    """A read that is stuck in the disk is raised after a while, and its buffer is not forgotten by the disk."""
    world = World([512, 512])
    storage = world.pager.storage(world.units[0])
    world.use(0)
    storage.fill()
    assert storage.flat.isnan().all(), "memory is kept from unit to unit, poisoned here"
    storage.empty()
    world.tier.failing.add(("fetch", "u1"))
    with pytest.raises(TransferError):
        world.pager.begin_gather(world.pager.units.by_unit[world.units[1]])
    storage.fill()
    assert not storage.flat.any(), "what the fetch was given went to the system"
    storage.empty()


def test_a_prefetch_that_failed_raises_where_the_unit_is_used() -> None:
    world = World([1, 1], prefetch=1)
    world.pager.phase.now = Phase.FORWARD
    for _ in range(2):
        world.use(0, 1)
    world.tier.failing.add(("fetch", "u1"))
    world.use(0)
    with pytest.raises(TransferError, match="fetch of u1 failed"):
        world.use(1)


def test_evicting_a_prefetch_that_failed_says_nothing() -> None:
    world = World([1, 1], prefetch=1)
    world.pager.phase.now = Phase.FORWARD
    for _ in range(2):
        world.use(0, 1)
    world.tier.failing.add(("fetch", "u1"))
    world.use(0)
    world.pager.invalidate()
    assert world.live_pages == 0


def test_memory_stays_while_a_transfer_still_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the wait for a unit: the transfer goes on as if the unit were prefetched, and its next use waits."""
    world = World([1])
    world.pager.phase.now = Phase.FORWARD
    accelerator = world.runtime.accelerator
    wait = accelerator.wait_on_compute

    def interrupted(event: Transfer) -> None:
        monkeypatch.setattr(accelerator, "wait_on_compute", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(accelerator, "wait_on_compute", interrupted)
    with pytest.raises(KeyboardInterrupt), world.frame([world.units[0]]):
        pass
    assert (world.state(0), world.live_pages) == (UnitState.FETCHING, 1)
    world.use(0)
    assert world.tier.log == [("fetch", "u0"), ("fetch done", "u0")]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_of_the_wait_for_a_prefetch_is_not_the_prefetchs_own(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefetch goes on: its unit stays, with its memory, until a wait ends with it."""
    world = World([1, 1], prefetch=1)
    world.pager.phase.now = Phase.FORWARD
    for _ in range(2):
        world.use(0, 1)
    world.tier.latency = 100
    world.use(0)
    accelerator = world.runtime.accelerator
    wait = accelerator.wait_on_compute

    def interrupted(event: Transfer) -> None:
        monkeypatch.setattr(accelerator, "wait_on_compute", wait)
        raise error

    monkeypatch.setattr(accelerator, "wait_on_compute", interrupted)
    with pytest.raises(error):
        world.pager.invalidate()
    assert (world.state(1), world.live_pages) == (UnitState.FETCHING, 1)
    world.pager.invalidate()
    assert (world.state(1), world.live_pages) == (UnitState.OFFLOADED, 0)
    assert world.tier.log[-1] == ("fetch done", "u1")
    world.use(1)


def test_close_keeps_what_lives_on_the_device_and_ends_the_rest() -> None:
    world = World([1, 1], resident=[0])
    world.pager.close()
    world.check_in_use(0)
    assert held_nbytes(world.runtime.ledger, "device") == 0
    with pytest.raises(ParameterOffloadedError, match="closed"):
        world.params[1][0] * 1


# -- updates beside the next forward -----------------------------------------------------------------------------------


def test_use_waits_for_the_units_own_update() -> None:
    world = World([1, 1])
    unit_updates = [UnitUpdate(), UnitUpdate()]
    for unit, unit_update in zip(world.units, unit_updates, strict=True):
        world.inventory.set_last_update(unit, unit_update)
    world.pager.block_for_update()
    unit_updates[0].complete()
    world.use(0)
    with pytest.raises(RuntimeError, match="the update broke"):
        unit_updates[1].fail(RuntimeError("the update broke"))
        world.use(1)


def test_a_unit_on_the_device_is_guarded_until_its_update_and_then_free_between_steps_too() -> None:
    world = World([1], resident=[0])
    unit_update = UnitUpdate()
    world.inventory.set_last_update(world.units[0], unit_update)
    world.pager.block_for_update()
    world.check_guarded(0)
    unit_update.complete()
    assert (world.params[0][0] * 1).isfinite().all()  # outside of any frame
    world.check_in_use(0)


# -- copies and changes ------------------------------------------------------------------------------------------------


def test_copies_come_from_wherever_the_bytes_are() -> None:
    world = World([1, 1, 1], resident=[2])
    # this tier's slots have no views and OffloadedParams no buffers: what is on the device is copied from there
    with world.frame([world.units[0]]):
        for index in (0, 2):
            for entry, param in zip(world.units[index].entries, world.params[index], strict=True):
                copied = world.pager.copies.take(param)
                assert torch.equal(copied, world.values[index][entry.start : entry.stop])
                assert copied.data_ptr() != param.data_ptr()
        assert world.pager.copy_of(world.params[0][0]) is None
        world.pager.copies.start(world.before_weights_read, [])
        world.pager.copies.start(world.before_weights_read, [])
        first = world.pager.copy_of(world.params[0][0])
        assert first is world.pager.copy_of(world.params[0][0]), "tied names get one tensor"
        world.pager.copies.stop()
        world.pager.copies.stop()
        assert world.calls == ["read"]
        assert world.pager.copy_of(world.params[0][0]) is None


@pytest.mark.parametrize("name", ["data", "T"])
def test_an_attribute_is_named_as_the_user_wrote_it(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    config = config_of(zero, optimizer=optimizer)
    engine, *_ = tiered_zero.initialize(model=model, config=config)
    with engine, pytest.raises(ParameterOffloadedError, match=rf"^\.{name} needs the bytes of parameter '0\.weight'"):
        getattr(model[0].weight, name)
