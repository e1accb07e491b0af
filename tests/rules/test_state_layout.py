"""Where masters and state lie in a sub-group's slot: apart, at pages, in the right shapes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.units import make_unit
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import QUANTIZED_BLOCK_NUMEL, SubGroup, cut_subgroups
from tiered_zero.rules.native_rules import AdamRule
from tiered_zero.rules.quantized import QuantizedAdam
from tiered_zero.rules.rule import Slice, StateField, UpdateRule
from tiered_zero.rules.state_layout import RemainderMasters, StateLayout
from tiered_zero.rules.torch_rule import TorchRule
from tiered_zero.sizes import PAGE_NBYTES


class Fields(UpdateRule):
    """Elementwise or not; `hyper["fields"]` names the state, all fp32 but `b...`, which are bytes."""

    name = "fields"

    def __init__(self, elementwise: bool) -> None:
        self.elementwise = elementwise

    def state_fields(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> list[StateField]:
        return [
            StateField(name=n, shape=shape, dtype=torch.uint8 if n[0] == "b" else torch.float32)
            for n in hyper["fields"]
        ]

    def init_state(self, state: Any, hyper: Any) -> None: ...

    def update(self, runs: Sequence[Slice]) -> None: ...


def subgroups_of(units: Sequence[Unit], groups: Mapping[str, int], size: int, elementwise: bool) -> list[SubGroup]:
    group_of = {entry.param.name: groups.get(entry.param.name, 0) for unit in units for entry in unit.entries}
    return cut_subgroups(list(units), group_of, size, elementwise=elementwise)


@given(
    numels=st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    size=st.integers(1, 9000),
    elementwise=st.booleans(),
    fields=st.lists(st.sampled_from(["m", "v", "bits"]), unique=True),
)
def test_no_two_things_share_a_byte(numels: list[int], size: int, elementwise: bool, fields: list[str]) -> None:
    groups = [{"fields": fields}, {"fields": fields[:1]}]
    for subgroup in subgroups_of([make_unit(0, numels)], {"u0.p1": 1}, size, elementwise):
        layout = StateLayout(subgroup, Fields(elementwise), groups)
        assert layout.nbytes % PAGE_NBYTES == 0
        raw = torch.zeros(layout.nbytes, dtype=torch.uint8)
        assert layout.master(raw).shape == (subgroup.numel,)
        views = [layout.master(raw)[piece.start : piece.stop] for piece in subgroup.pieces]
        for piece in subgroup.pieces:
            state = layout.state(raw, piece)
            assert list(state) == groups[piece.group]["fields"]
            for name, view in state.items():
                assert view.dtype == (torch.uint8 if name == "bits" else torch.float32)
                assert view.shape == ((piece.numel,) if elementwise else piece.param.shape)
                views.append(view)
        for number, view in enumerate(views):
            view.fill_(number % 251)
        for number, view in enumerate(views):
            assert (view == number % 251).all(), "written through another view"


def test_every_array_starts_at_a_page() -> None:
    (subgroup,) = subgroups_of([make_unit(0, [3000, 5000])], {}, 10**6, True)
    layout = StateLayout(subgroup, Fields(True), [{"fields": ["m", "bits", "v"]}])
    assert [array.offset for array in layout.arrays] == [4 * subgroup.numel, 8 * subgroup.numel, 9 * subgroup.numel]
    assert layout.nbytes == 13 * subgroup.numel


def test_a_run_over_several_pieces_is_one_slice() -> None:
    (subgroup,) = subgroups_of([make_unit(0, [100, 200])], {}, 10**6, True)
    layout = StateLayout(subgroup, Fields(True), [{"fields": ["m"]}])
    raw = torch.zeros(layout.nbytes, dtype=torch.uint8)
    first, second = subgroup.pieces
    both = layout.state(raw, first, second.stop)["m"]
    both.copy_(torch.arange(both.numel()))
    alone = layout.state(raw, second)["m"]
    assert alone[0] == second.start - first.start and alone.data_ptr() == both[second.start :].data_ptr()


def test_a_field_that_only_some_groups_have_exists_for_all_and_is_given_to_those() -> None:
    (subgroup,) = subgroups_of([make_unit(0, [100, 200])], {"u0.p1": 1}, 10**6, True)
    groups = [{"momentum": 0.0, "lr": 0.1}, {"momentum": 0.9, "lr": 0.1}]
    rule = TorchRule(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    full = {**torch.optim.SGD([torch.zeros(1)], lr=0.1).defaults}
    layout = StateLayout(subgroup, rule, [{**full, **group} for group in groups])
    raw = torch.zeros(layout.nbytes, dtype=torch.uint8)
    plain, heavy = (layout.state(raw, piece) for piece in subgroup.pieces)
    assert (list(plain), list(heavy)) == ([], ["momentum_buffer"])


@pytest.mark.parametrize(
    ("optimizer", "per_element"),
    [(torch.optim.SGD, 4), (torch.optim.AdamW, 12), (torch.optim.Adagrad, 8), (torch.optim.RMSprop, 8)],
)
def test_bytes_an_element(optimizer: type[torch.optim.Optimizer], per_element: int) -> None:
    (subgroup,) = subgroups_of([make_unit(0, [50_000])], {}, 10**6, True)
    source = optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # type: ignore[call-arg]
    layout = StateLayout(subgroup, TorchRule(source), source.param_groups)
    assert layout.nbytes == per_element * subgroup.numel


def test_remainders_come_first_and_the_array_with_their_marks_next() -> None:
    (subgroup,) = subgroups_of(
        [make_unit(0, [3000], torch.bfloat16), make_unit(1, [5000], torch.bfloat16)], {}, 10**6, True
    )
    layout = StateLayout(subgroup, AdamRule(decoupled=True, kernel=None), [{}], RemainderMasters())
    numel, (_, second) = subgroup.numel, subgroup.segments
    assert {array.field.name: array.offset for array in layout.arrays} == {
        "exp_avg_sq": 2 * numel,
        "exp_avg": 6 * numel,
    }
    assert (layout.master_nbytes, layout.nbytes) == (6 * numel, 10 * numel)
    assert layout.master(torch.zeros(layout.nbytes, dtype=torch.uint8)).shape == (numel,)
    assert layout.master_spans(second) == [
        (2 * second.start, 2 * second.numel, torch.int16),
        (2 * numel + 4 * second.start, 4 * second.numel, torch.float32),
    ]


def test_a_scale_for_each_block_of_a_parameter_and_none_for_two() -> None:
    (subgroup,) = subgroups_of([make_unit(0, [1, 100, 31, 64, 3000])], {}, 10**6, True)
    layout = StateLayout(subgroup, QuantizedAdam(AdamRule(decoupled=True, kernel=None)), [{}])
    raw = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for number, piece in enumerate(subgroup.pieces, start=1):
        scales = layout.state(raw, piece)["exp_avg_scale"]
        assert scales.numel() == -(-piece.numel // QUANTIZED_BLOCK_NUMEL)
        assert not scales.any(), "another parameter's"
        scales.fill_(number)


def test_ten_thousand_whole_parameters_are_found_quickly() -> None:
    (subgroup,) = subgroups_of([make_unit(0, [3] * 10_000)], {}, 10**6, False)
    layout = StateLayout(subgroup, Fields(False), [{"fields": ["m"]}])
    raw = torch.zeros(layout.nbytes, dtype=torch.uint8)
    start_s = time.process_time()
    for piece in subgroup.pieces:
        layout.state(raw, piece)
    assert time.process_time() - start_s < 5.0, "one look at the piece's own arrays, not at everybody's"
