"""fp32: four steps give plain PyTorch's bits, wherever parameters, gradients and optimizer state rest.

Which of the many combinations run: all nine placements, each with the four rows of the orthogonal array over
{accumulation 1, 3} x {clipping off, on} x {one, two backwards a step}, so that every placement meets every pair of
those three. Every other axis is then set, one after another, to the value that brings most pairs not met yet; the first
test counts that no pair of values of any two axes is left out (but stages below 3 with parameters that move,
which the config refuses). Loss, gradient norm, learning rates of a schedule, and all weights and buffers are compared.
"""

import functools
import itertools
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

from tests.support.models import ParityGPT, batch, groups
from tests.support.trainers import PLACEMENTS, Plain, Record, assert_same_bits, follow, tiered, train

OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=3e-3),
    "sgd": lambda model: torch.optim.SGD(groups(model), lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda model: torch.optim.RMSprop(groups(model), lr=1e-3, centered=True),
}

AXES: dict[str, tuple[Any, ...]] = {
    "stage": (3, 2, 1, 0),
    "sub_group": (2048, 5000, None, 10**9),
    "persistence": (0, 100, None),
    "unit_cap": (None, 3000),
    "prefetch": (None, 0, 4000),
    "max_live": (None, 0),
    "update": (None, "overlapped", "barrier"),
    "optimizer": tuple(OPTIMIZERS),
}
"""Set row by row. None leaves the key out: the default, or "auto"."""


@dataclass(frozen=True)
class Row:
    """One run. `sub_group` 2048 is the smallest there is and cuts every matrix; `max_live` 0 leaves room for the units
    in use only.
    """

    placement: tuple[str, str]
    accumulation: int
    clipping: float
    backwards: int
    stage: int
    sub_group: int | None
    persistence: int | None
    unit_cap: int | None
    prefetch: int | None
    max_live: int | None
    update: str | None
    optimizer: str

    def pairs(self) -> set[tuple[Any, ...]]:
        items = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return set(itertools.combinations(items, 2))

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self)).replace("('", "").replace("')", "")


BASES: dict[str, tuple[Any, ...]] = {"accumulation": (1, 3), "clipping": (0.0, 0.5), "backwards": (1, 2)}
ORTHOGONAL = ((1, 0.0, 1), (1, 0.5, 2), (3, 0.0, 2), (3, 0.5, 1))
"""(accumulation, clipping, backwards a step): every pair of values of any two of them."""


def feasible_pairs() -> set[tuple[Any, ...]]:
    axes = {"placement": PLACEMENTS, **BASES, **AXES}
    return {
        ((left, one), (right, other))
        for (left, ones), (right, others) in itertools.combinations(axes.items(), 2)
        for one, other in itertools.product(ones, others)
        if not (left == "placement" and right == "stage" and one[0] != "none" and other != 3)
    }


def fill(missing: set[tuple[Any, ...]], **chosen: Any) -> Row:
    """A row with the values `chosen`, and of every other axis the one that is in most pairs of `missing`."""
    names = [field.name for field in fields(Row)]
    for name, values in {"placement": PLACEMENTS, **BASES, **AXES}.items():
        if name in chosen:
            continue
        if name == "stage" and chosen["placement"][0] != "none":
            values = (3,)
        if name == "placement" and chosen.get("stage", 3) != 3:
            values = PLACEMENTS[:3]

        def met(value: Any, name: str = name) -> int:
            own, others = names.index(name), ((names.index(other), (other, of)) for other, of in chosen.items())
            item = (name, value)
            return sum(((item, other) if own < at else (other, item)) in missing for at, other in others)

        chosen[name] = max(values, key=met)
    return Row(**chosen)


def covering_rows() -> list[Row]:
    """Rows for every placement and base; then as many more as pairs are still missing."""
    rows: list[Row] = []
    missing = feasible_pairs()
    for placement, base in itertools.product(PLACEMENTS, ORTHOGONAL):
        rows.append(fill(missing, placement=placement, **dict(zip(BASES, base, strict=True))))
        missing -= rows[-1].pairs()
    while missing:
        rows.append(fill(missing, **dict(min(missing, key=str))))
        missing -= rows[-1].pairs()
    return rows


ROWS = covering_rows()


def test_every_pair_of_values_is_met():
    assert not feasible_pairs() - set().union(*(row.pairs() for row in ROWS))


def build() -> ParityGPT:
    torch.manual_seed(0)
    return ParityGPT()


def data(number: int) -> tuple[Any, ...]:
    return (*batch(number), number % 5 == 1)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)


@functools.cache
def reference(optimizer: str, accumulation: int, clipping: float, backwards: int) -> Record:
    trainer = Plain(build(), OPTIMIZERS[optimizer], accumulation, clipping, schedule)
    return follow(lambda own: train(own, data, 4, accumulation, backwards), trainer)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_four_steps_give_the_bits_of_plain_torch(row, swap_path):
    engine = tiered(
        build(),
        swap_path,
        row.placement,
        OPTIMIZERS[row.optimizer],
        row.accumulation,
        row.clipping,
        schedule,
        zero={
            "stage": row.stage,
            "sub_group_size": row.sub_group,
            "stage3_param_persistence_threshold": row.persistence,
            "stage3_prefetch_bucket_size": row.prefetch,
            "stage3_max_live_parameters": row.max_live,
        },
        runtime={"unit_size_cap": row.unit_cap, "update": row.update},
    )
    found = follow(lambda own: train(own, data, 4, row.accumulation, row.backwards), engine)
    assert_same_bits(reference(row.optimizer, row.accumulation, row.clipping, row.backwards), found)


def test_one_forward_with_two_losses(swap_path):
    """retain_graph: the saved weights are asked for twice."""

    def script(trainer):
        seen = []
        for number in range(4):
            tokens, targets = batch(number)
            loss = trainer(tokens, targets)
            trainer.backward(loss * 0.5, retain_graph=True)
            trainer.backward(loss.square())
            trainer.step()
            seen += [loss.detach(), trainer.get_global_grad_norm()]
        return seen

    assert_same_bits(follow(script, Plain(build())), follow(script, tiered(build(), swap_path)))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_a_gradient_that_is_not_finite_does_what_it_does_in_plain_torch(bad, clipping, swap_path):
    """In fp32 nothing is skipped: `clip_grad_norm_` makes zeros of the finite gradients beside an infinite one."""

    def script(trainer):
        for number in range(3):
            loss = trainer(*batch(number))
            trainer.backward(loss * bad if number == 1 else loss)
            trainer.step()
        return [trainer.get_global_grad_norm()]

    plain = follow(script, Plain(build(), clipping=clipping))
    assert_same_bits(plain, follow(script, tiered(build(), swap_path, ("cpu", "cpu"), clipping=clipping)))


def test_the_first_bits_are_the_models(swap_path):
    """Before any step, from every placement, buffers and the uint8 parameter included."""
    expected = Record([], {name: value.clone() for name, value in build().state_dict().items()})
    for placement in PLACEMENTS:
        assert_same_bits(expected, follow(lambda _: [], tiered(build(), swap_path, placement)))
