"""Load training data in a fixed order, and save and restore the position in that order: `TrainingLoader`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tiered_zero.errors import StoreError
from tiered_zero.hardware.random_states import kept_random_states

logger = logging.getLogger("tiered_zero")

_COUNT = range(1 << 63)


class TrainingLoader(DataLoader[Any]):
    """A DataLoader that can save its position in the data, and later continue with the next batch.

    `initialize(training_data=...)` accepts and returns one; checkpoints then save its position. Samples come in the
    dataset's order; with `shuffle` the order depends only on `seed` and the number of the pass. A pass is one `iter()`
    over the data. `options`: arguments of DataLoader, except sampler, batch_sampler and generator.

    * A batch is counted when the user takes it.
    * A pass ends early if its iterator is dropped, as after `break`. The next pass begins at the first sample.
    * If a state from the middle of a pass is loaded, the next `iter()` yields the rest of that pass. The rest is empty
      if the state was saved after the last batch and before StopIteration.
    * Loading does not change random generators. If samples use random numbers, a resumed run gets the same samples only
      if the loader has no workers.
    * An IterableDataset cannot seek: after a load, the batches taken before are read again and dropped.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int | None = 1, *, shuffle: bool = False, seed: int = 0, **options: Any
    ) -> None:
        """Build the loader. Raises TypeError if `options` decide the order of samples, and for `shuffle` with an
        IterableDataset."""
        if fixed := options.keys() & {"sampler", "batch_sampler", "generator"}:
            raise TypeError(f"TrainingLoader decides the order of samples itself; leave out {', '.join(sorted(fixed))}")
        self._order = None if isinstance(dataset, IterableDataset) else _Order(cast(Sized, dataset), shuffle, seed)
        if self._order is not None:
            options["sampler"] = self._order
        elif shuffle:
            raise TypeError("TrainingLoader cannot shuffle an IterableDataset; shuffle inside the dataset")
        self._place = _Place(number=0)
        self._current: weakref.ref[_Pass] | None = None
        """A weak reference to the iterator that moves `_place`; None: the next `iter()` continues from `_place`."""
        super().__init__(dataset, batch_size, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader's own iterator cannot count
        if self._current is not None:
            self._end_pass()
        place = self._place
        begun = _Pass(self, place)
        if place.random_state is None:
            random_state = torch.get_rng_state()  # before the line below draws seeds
            begun.batches = super().__iter__()
            place.random_state = random_state
        else:
            with kept_random_states():
                torch.set_rng_state(place.random_state)  # workers get the seeds that they had in this pass
                begun.batches = super().__iter__()
                if self._order is None and place.num_batches:
                    logger.warning("training_data is read again up to batch %d, for it has no index", place.num_batches)
                    for _, _batch in zip(range(place.num_batches), begun.batches, strict=False):
                        pass
        self._current = weakref.ref(begun)
        return begun

    def split(self, rank: int, num_ranks: int) -> None:
        """Give this rank every `num_ranks`-th sample, from sample `rank` on. All ranks get the same number of
        samples: with `drop_last` the last samples are left out, else the first ones come again at the end. An
        IterableDataset must split itself."""
        if self._order is not None:
            self._order.rank, self._order.num_ranks, self._order.drops = rank, num_ranks, self.drop_last

    def state_dict(self) -> dict[str, Any]:
        """Return this loader's position and the settings of its sample order, as plain values and one tensor."""
        if self._current is not None and self._current() is None:
            self._end_pass()
        place, order = self._place, self._order
        return {
            "pass": place.number,
            "num_batches": place.num_batches,
            "num_samples": place.num_samples,
            "random_state": place.random_state.clone() if place.random_state is not None else None,
            "length": len(order) if order is not None else None,
            "shuffle": order is not None and order.shuffle,
            "seed": order.seed if order is not None else 0,
        }

    def check_state_dict(self, state: Any) -> None:
        """Raise StoreError if `state`, from a file, does not have the form that `state_dict()` returns."""
        names = {"pass", "num_batches", "num_samples", "random_state", "length", "shuffle", "seed"}
        if type(state) is not dict or state.keys() != names:
            raise StoreError(f"A loader's state was expected to have {', '.join(sorted(names))}; found {state!a:.200}.")
        counts = [state[name] for name in ("pass", "num_batches", "num_samples")]
        length, random_state = state["length"], state["random_state"]
        if (
            not all(type(count) is int and count in _COUNT for count in counts)
            or type(state["shuffle"]) is not bool
            or type(state["seed"]) is not int
            or not -(1 << 63) <= state["seed"] + state["pass"] < 1 << 63
            or not (length is None or (type(length) is int and counts[2] <= length))
            or (random_state is None and any(counts[1:]))
        ):
            raise StoreError(f"A loader's state is not what was saved: {state!a:.300}.")
        if random_state is not None:
            try:
                torch.Generator().set_state(random_state)
            except (RuntimeError, TypeError) as error:
                raise StoreError(f"A loader's random_state is not what was saved: {error}.") from None

    def resplit(self, state: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
        """Convert `state`, saved with `num_ranks` ranks, to this loader's number of ranks. If the state is from the
        middle of a pass, the loader may give again the samples that were taken last. Their number is less than this
        loader's number of ranks."""
        order, length = self._order, state["length"]
        if order is None or num_ranks == order.num_ranks or length != order.length_of(num_ranks):
            return dict(state)
        num_samples = min(state["num_samples"] * num_ranks // order.num_ranks, len(order))
        num_batches = -(-num_samples // (self.batch_size or 1))
        return {**state, "num_samples": num_samples, "num_batches": num_batches, "length": len(order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next `iter()` continue from `state`. If the dataset's length has changed, the saved pass begins
        again, with a warning. Raises StoreError, with nothing changed, if `state` is not the state of a loader."""
        self.check_state_dict(state)
        order = self._order
        self._current = None
        self._place = _Place(
            number=state["pass"],
            num_batches=state["num_batches"],
            num_samples=state["num_samples"],
            random_state=state["random_state"],
        )
        if state["length"] != (length := len(order) if order is not None else None):
            self._place = _Place(number=state["pass"])
            logger.warning(
                "training_data has %s samples and had %s: pass %d over it begins anew",
                "unknown many" if length is None else length,
                "unknown many" if state["length"] is None else state["length"],
                state["pass"] + 1,
            )
        if order is not None and (order.shuffle, order.seed) != (state["shuffle"], state["seed"]):
            logger.warning(
                "training_data goes on in the order of the checkpoint: shuffle=%s, seed=%d",
                state["shuffle"],
                state["seed"],
            )
            order.shuffle, order.seed = state["shuffle"], state["seed"]

    def _seek(self, place: _Place) -> None:
        """Set the sampler to `place`; the sampler's next iterator begins there."""
        if self._order is not None:
            self._order.number, self._order.start = place.number, place.num_samples

    def _take(self, place: _Place) -> None:
        """Count one batch that a pass at `place` has given to its user."""
        place.num_batches += 1
        if self._order is not None:
            place.num_samples = min(place.num_samples + (self.batch_size or 1), len(self._order))

    def _end(self, ended: _Pass) -> None:
        if self._current is not None and self._current() is ended:
            self._end_pass()

    def _end_pass(self) -> None:
        self._current = None
        self._place = _Place(number=self._place.number + 1)


@final
@dataclass(kw_only=True)
class _Place:
    """A place in the data. `number`: the number of the pass, counted from 0. `num_batches`, `num_samples`: how many the
    user has taken in this pass. `random_state`: the state of torch's generator when the pass began; None: the pass has
    not begun."""

    number: int
    num_batches: int = 0
    num_samples: int = 0
    random_state: torch.Tensor | None = None


@final
class _Pass(Iterator[Any]):
    """Iterates over the batches of one pass, and counts in the pass's `_Place` the batches that the user takes."""

    batches: Iterator[Any]

    def __init__(self, loader: TrainingLoader, place: _Place) -> None:
        self._loader, self._place = loader, place
        self._is_untouched = True
        loader._seek(place)

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._is_untouched:  # torch asks the sampler now; with workers it has asked before
            self._loader._seek(self._place)
            self._is_untouched = False
        try:
            batch = next(self.batches)
        except StopIteration:
            self._loader._end(self)
            raise
        self._loader._take(self._place)
        return batch


@final
class _Order(Sampler[int]):
    """Yields the indices of one rank's samples in pass `number` over the data, from position `start` on. `drops`: what
    happens if the ranks cannot get equally many samples. True: the last samples are left out. False: the first samples
    come again at the end."""

    rank, num_ranks, drops = 0, 1, False

    def __init__(self, data: Sized, shuffle: bool, seed: int) -> None:
        self._data = data
        self.shuffle = shuffle
        self.seed = seed
        self.number = 0
        self.start = 0

    def __len__(self) -> int:
        return self.length_of(self.num_ranks)

    def length_of(self, num_ranks: int) -> int:
        """Return the number of samples that one rank gets if the data is split over `num_ranks` ranks."""
        num_samples = len(self._data)
        return num_samples // num_ranks if self.drops else -(-num_samples // num_ranks)

    def __iter__(self) -> Iterator[int]:
        num_samples = len(self._data)
        own = range(self.start, len(self))
        if not self.shuffle:
            return ((self.rank + place * self.num_ranks) % num_samples for place in own)
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.number)
        order = torch.randperm(num_samples, generator=generator)
        places = (torch.arange(own.start, max(own.start, own.stop)) * self.num_ranks + self.rank) % max(1, num_samples)
        return iter(order[places].tolist())
