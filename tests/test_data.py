"""The training loader gives what DataLoader gives, and after a resume exactly the batches that were not taken."""

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import tiered_zero
from tests.support.inspection.insides import from_json, to_json
from tiered_zero.data import TrainingLoader
from tiered_zero.deepspeed.utils import RepeatingLoader
from tiered_zero.errors import StoreError


class Numbers(Dataset[Any]):
    """0, 1, 2, ...; with `noisy` each with draws from three generators."""

    def __init__(self, length: int, noisy: bool = False) -> None:
        self.length = length
        self.noisy = noisy

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return (index, random.random(), numpy.random.rand(), torch.rand(2)) if self.noisy else index


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for index in range(first, self.length, step):
            torch.rand(1), random.random()
            yield index


def saved(loader: TrainingLoader) -> Any:
    """The state after a way through a file."""
    return from_json(json.loads(json.dumps(to_json(loader.state_dict(), "loader"))))


def rows(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def all_states() -> list[Any]:
    return [
        random.getstate(),
        numpy.random.get_state(legacy=False)["state"]["key"].tolist(),
        torch.get_rng_state().tolist(),
    ]


@pytest.mark.parametrize("length", [0, 1, 6, 7])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_batches_order_and_draws_are_dataloaders(length: int, drop_last: bool, batch_size: int | None) -> None:
    options = {"drop_last": drop_last} if batch_size else {}
    found = []
    for make in (DataLoader, TrainingLoader):
        torch.manual_seed(3)
        loader = make(Numbers(length, noisy=True), batch_size, **options)  # type: ignore[operator]
        passes = [[str(batch) for batch in loader] for _ in range(2)] if length else []
        found.append((passes, len(loader), loader.batch_size, loader.drop_last, torch.get_rng_state().tolist()))
    random.seed(0)
    assert isinstance(loader, DataLoader)
    plain, own = found
    assert plain[1:] == own[1:]
    assert len(plain[0]) == len(own[0])


def test_noisy_samples_are_dataloaders() -> None:
    found = []
    for make in (DataLoader, TrainingLoader):
        torch.manual_seed(3), random.seed(4), numpy.random.seed(5)
        loader = make(Numbers(7, noisy=True), batch_size=2)
        found.append([str(batch) for _ in range(2) for batch in loader])
    assert found[0] == found[1]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(-3, 2**40),
    taken=st.integers(0, 40),
)
def test_the_rest_of_the_order_follows(
    length: int, batch_size: int, drop_last: bool, shuffle: bool, seed: int, taken: int
) -> None:
    """An endless loop over passes, cut anywhere, between two batches and between two passes."""

    def make() -> TrainingLoader:
        return TrainingLoader(Numbers(length), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def forever(loader: TrainingLoader) -> Iterator[Any]:
        while True:
            yield "begin"
            yield from rows_of(loader)

    def rows_of(loader: TrainingLoader) -> Iterator[Any]:
        for batch in loader:
            yield batch.tolist()

    loader = make()
    events = forever(loader)
    before = [next(events) for _ in range(taken)]
    state = saved(loader)
    after = [next(events) for _ in range(30)]
    resumed = make()
    resumed.load_state_dict(state)
    assert to_json(saved(resumed), "") == to_json(state, "")
    again = forever(resumed)
    if before:
        assert next(again) == "begin"  # of the pass that was under way
    assert [next(again) for _ in range(30)] == after
    assert len(resumed) == len(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_have_read_ahead_does_not_count(num_workers: int, shuffle: bool, persistent: bool) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "shuffle": shuffle, "seed": 9}
    options["persistent_workers"] = persistent and num_workers > 0
    loader = TrainingLoader(Numbers(20), 2, **options)
    first = rows(loader)
    batches = iter(loader)
    taken = [next(batches).tolist() for _ in range(3)]
    state = saved(loader)
    assert state["num_batches"] == 3 and state["num_samples"] == 6 and state["pass"] == 1
    rest = rows(batches)
    assert sorted(number for batch in taken + rest for number in batch) == list(range(20))
    assert (first == taken + rest) != shuffle
    resumed = TrainingLoader(Numbers(20), 2, **options)
    resumed.load_state_dict(state)
    assert rows(resumed) == rest
    assert rows(resumed) == rows(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_pass_draws_nothing_and_seeds_workers_alike(num_workers: int) -> None:
    torch.manual_seed(1)
    loader = TrainingLoader(Numbers(8), 2, num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    torch.rand(5)
    state, drawn = saved(loader), torch.get_rng_state()
    resumed = TrainingLoader(Numbers(8), 2, num_workers=num_workers)
    resumed.load_state_dict(state)
    before = all_states()
    again = iter(resumed)
    assert all_states() == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert again.batches._base_seed == batches.batches._base_seed  # type: ignore[attr-defined]
    assert next(again).tolist() == [2, 3]
    assert all_states() == before


def test_noise_without_workers_is_resumed() -> None:
    torch.manual_seed(3), random.seed(4), numpy.random.seed(5)
    loader = TrainingLoader(Numbers(9, noisy=True), 2)
    batches = iter(loader)
    next(batches)
    state, states = saved(loader), (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
    rest = [str(batch) for batch in batches]
    resumed = TrainingLoader(Numbers(9, noisy=True), 2)
    resumed.load_state_dict(state)
    random.setstate(states[0]), numpy.random.set_state(states[1]), torch.set_rng_state(states[2])
    assert [str(batch) for batch in resumed] == rest


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_read_again(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    loader = TrainingLoader(Stream(20), 2, num_workers=num_workers)
    whole = rows(loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = saved(loader)
    resumed = TrainingLoader(Stream(20), 2, num_workers=num_workers)
    resumed.load_state_dict(state)
    before = all_states()
    with caplog.at_level(logging.WARNING):
        again = iter(resumed)
    assert all_states() == before
    assert "read again up to batch 3" in caplog.text
    assert rows(again) == rows(batches) == whole[3:]
    assert rows(resumed) == whole


def test_a_pass_that_was_left_is_over() -> None:
    loader = TrainingLoader(Numbers(8), 2, shuffle=True)
    for _ in loader:
        break
    assert saved(loader)["pass"] == 1 and saved(loader)["num_batches"] == 0
    resumed = TrainingLoader(Numbers(8), 2, shuffle=True)
    resumed.load_state_dict(saved(loader))
    assert rows(resumed) == rows(loader)


def test_the_last_batch_taken_leaves_an_empty_pass() -> None:
    loader = TrainingLoader(Numbers(4), 2)
    batches = iter(loader)
    next(batches), next(batches)
    resumed = TrainingLoader(Numbers(4), 2)
    resumed.load_state_dict(saved(loader))
    assert rows(resumed) == []
    assert rows(resumed) == [[0, 1], [2, 3]]
    again = TrainingLoader(Numbers(4), 2)
    again.load_state_dict(saved(loader))
    endless = RepeatingLoader(again)
    assert [next(endless).tolist() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]


def test_two_iterators_keep_their_own_order() -> None:
    loader = TrainingLoader(Numbers(6), 1, shuffle=True)
    first, second = iter(loader), iter(loader)
    alone = TrainingLoader(Numbers(6), 1, shuffle=True)
    expected = [rows(alone), rows(alone)]
    pairs = [(next(first).tolist(), next(second).tolist()) for _ in range(6)]
    assert [[pair[0] for pair in pairs], [pair[1] for pair in pairs]] == expected


def test_a_state_that_was_loaded_and_not_used_is_saved_again() -> None:
    loader = TrainingLoader(Numbers(8), 2, shuffle=True)
    batches = iter(loader)
    next(batches)
    second = TrainingLoader(Numbers(8), 2, shuffle=True)
    second.load_state_dict(saved(loader))
    third = TrainingLoader(Numbers(8), 2, shuffle=True)
    third.load_state_dict(saved(second))
    assert rows(third) == rows(second) == rows(batches)


def test_another_batch_size_goes_on_at_the_sample() -> None:
    loader = TrainingLoader(Numbers(10), 4)
    batches = iter(loader)
    next(batches)
    resumed = TrainingLoader(Numbers(10), 3)
    resumed.load_state_dict(saved(loader))
    assert rows(resumed) == [[4, 5, 6], [7, 8, 9]]


def test_another_dataset_begins_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    loader = TrainingLoader(Numbers(10), 4)
    batches = iter(loader)
    next(batches)
    resumed = TrainingLoader(Numbers(11), 4)
    resumed.load_state_dict(saved(loader))
    assert "11 samples and had 10: pass 1 over it begins anew" in caplog.text
    assert rows(resumed)[0] == [0, 1, 2, 3]


def test_the_order_of_the_checkpoint_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    loader = TrainingLoader(Numbers(10), 4, shuffle=True, seed=5)
    batches = iter(loader)
    next(batches)
    resumed = TrainingLoader(Numbers(10), 4)
    resumed.load_state_dict(saved(loader))
    assert "shuffle=True, seed=5" in caplog.text
    assert rows(resumed) == rows(batches)


@pytest.mark.parametrize("option", ["sampler", "batch_sampler", "generator"])
def test_options_that_decide_the_order_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        TrainingLoader(Numbers(3), **{option: None})
    with pytest.raises(TypeError, match="IterableDataset"):
        TrainingLoader(Stream(3), shuffle=True)


@pytest.mark.parametrize(
    "change",
    [
        {"pass": -1}, {"pass": True}, {"pass": 2**63}, {"num_batches": 1.0}, {"num_samples": 99}, {"length": "8"},
        {"random_state": None}, {"random_state": torch.zeros(3, dtype=torch.uint8)}, {"random_state": torch.ones(9)},
        {"random_state": 5}, {"shuffle": 1}, {"seed": 2**64}, {"seed": None}, {"more": 1}, {"pass": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_hostile_state_is_refused(change: dict[str, Any]) -> None:
    loader = TrainingLoader(Numbers(8), 2)
    batches = iter(loader)
    next(batches)
    other = TrainingLoader(Numbers(8), 2)
    for state in ({**saved(loader), **change}, None, [], {}):
        with pytest.raises(StoreError):
            other.load_state_dict(state)  # type: ignore[arg-type]
    assert rows(other) == rows(TrainingLoader(Numbers(8), 2))


def test_initialize_returns_one_and_takes_one() -> None:
    def initialize(data: Any) -> Any:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "tiered_zero": {"device": "cpu"},
        }
        engine, _, loader, _ = tiered_zero.initialize(model=torch.nn.Linear(3, 1), training_data=data, config=config)
        engine.close()
        return loader

    data = TensorDataset(torch.ones(5, 3))
    loader = initialize(data)
    assert isinstance(loader, TrainingLoader) and len(loader) == 3 and loader.batch_size == 2
    own = TrainingLoader(data, 2, shuffle=True)
    assert initialize(own) is own


@given(st.integers(0, 23), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
def test_ranks_split_the_data(length: int, num_ranks: int, size: int, shuffle: bool, drop_last: bool) -> None:
    """Every rank has as many samples as the others; together they are the order of one rank, its start repeated."""
    loaders = [
        TrainingLoader(Numbers(length), size, shuffle=shuffle, seed=5, drop_last=drop_last)
        for _ in range(num_ranks + 1)
    ]
    for rank in range(num_ranks):
        loaders[rank].split(rank, num_ranks)
    *parts, whole = [[index for batch in loader for index in batch.tolist()] for loader in loaders]
    assert len({len(part) for part in parts}) == 1
    assert [len(loader) for loader in loaders[:-1]] == [len(loaders[0])] * num_ranks
    together = [index for row in zip(*parts, strict=True) for index in row]
    order = list(TrainingLoader(Numbers(length), None, shuffle=shuffle, seed=5))
    if drop_last:
        assert together == order[: len(together)] and length - len(together) < num_ranks * size
    else:
        assert together[:length] == order and len(together) - length < num_ranks
        assert together[length:] == (order * num_ranks)[: len(together) - length]
        assert whole == order


@settings(max_examples=60)
@given(
    num_samples=st.integers(1, 40),
    batch=st.integers(1, 3),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    taken=st.integers(0, 8),
    shuffle=st.booleans(),
)
def test_another_number_of_ranks_goes_on_behind_the_samples_that_were_taken(
    num_samples: int, batch: int, before: int, after: int, taken: int, shuffle: bool
) -> None:
    """Each sample once in a pass, but for those that fill up the last batch, and those that `after` does not divide."""
    data = TensorDataset(torch.arange(num_samples))

    def make(num_ranks: int) -> list[TrainingLoader]:
        loaders = [TrainingLoader(data, batch, shuffle=shuffle, seed=3) for _ in range(num_ranks)]
        for rank, loader in enumerate(loaders):
            loader.split(rank, num_ranks)
        return loaders

    first: list[int] = []
    states = []
    for loader in make(before):
        batches = iter(loader)
        first += [int(sample) for _, (samples,) in zip(range(taken), batches, strict=False) for sample in samples]
        states.append(loader.state_dict())
        del batches
    assert all(state["num_samples"] == states[0]["num_samples"] for state in states)
    rest: list[int] = []
    lengths = set()
    for loader in make(after):
        loader.load_state_dict(loader.resplit(states[0], before))
        own = [int(sample) for (samples,) in loader for sample in samples]
        lengths.add(len(own))
        rest += own
    assert set(first) | set(rest) == set(range(num_samples))
    assert len(lengths) == 1, "every rank makes as many steps"
    num_left = max(0, num_samples - states[0]["num_samples"] * before)
    assert num_left <= len(rest) <= num_left + 2 * (after - 1)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_other_ranks_go_on_behind_the_last_sample_taken(before: int, after: int, shuffle: bool) -> None:
    """No sample of the pass is lost, and fewer come twice than there are ranks."""
    data = TensorDataset(torch.arange(60))

    def loaders(num_ranks: int) -> list[TrainingLoader]:
        found = [TrainingLoader(data, 2, shuffle=shuffle) for _ in range(num_ranks)]
        for rank, loader in enumerate(found):
            loader.split(rank, num_ranks)
        return found

    taken: list[int] = []
    saved: dict[str, Any] = {}
    for loader in loaders(before):
        batches = iter(loader)
        taken += [int(index) for _ in range(4) for index in next(batches)[0]]
        saved = saved or loader.state_dict()
    for loader in loaders(after):
        loader.load_state_dict(loader.resplit(saved, before))
        taken += [int(index) for (batch,) in loader for index in batch]
    assert set(taken) == set(range(60))
    assert len(taken) - 60 < after + before
