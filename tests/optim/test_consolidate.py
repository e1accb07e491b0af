"""State as it moves between ranks and to files: values of any nesting, without pickle."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from tiered_zero.errors import ModelError
from tiered_zero.optim import ZeroRedundancyOptimizer
from tiered_zero.optim.consolidate import describe, rebuild


def test_nested_state_comes_back_as_it_was() -> None:
    state: dict[Any, Any] = {
        "step": torch.tensor(3.0),
        "history": [torch.arange(4), (1, 2.5, None), {"inner": torch.ones(2, 0, dtype=torch.bfloat16), 7: True}],
        "rate": math.nan,
        "name": "x",
    }
    tensors: list[torch.Tensor] = []
    text = json.dumps(describe(state, tensors))
    left = iter(tensors)
    found = rebuild(json.loads(text), lambda dtype, shape: next(left).clone())
    assert list(found) == list(state) and math.isnan(found["rate"]) and found["name"] == "x"
    assert torch.equal(found["history"][0], torch.arange(4)) and found["history"][1] == (1, 2.5, None)
    inner = found["history"][2]
    assert list(inner) == ["inner", 7] and inner["inner"].shape == (2, 0) and inner["inner"].dtype is torch.bfloat16
    with pytest.raises(ModelError, match="found set"):
        describe({"x": {1}}, [])


def test_a_ranks_state_is_cut_out_of_either_form() -> None:
    cut = ZeroRedundancyOptimizer.rank_local_state_dict
    groups: list[dict[str, Any]] = [{"lr": 1, "params": [0, 1]}, {"lr": 2, "params": [2]}]
    by_range = {"partition": [(0, 1), (1, 2)], "state": [{0: "a"}, {0: "b"}], "param_groups": groups}
    assert cut(1, by_range) == {"state": {0: "b"}, "param_groups": [groups[1]]}
    by_index = {"partition": [[[1], [2]], [[0], []]], "state": {0: {"m": 0}, 2: {"m": 2}}, "param_groups": groups}
    assert cut(0, by_index) == {
        "state": {1: {"m": 2}},
        "param_groups": [{"lr": 1, "params": [0]}, {"lr": 2, "params": [1]}],
    }
    assert cut(1, by_index)["state"] == {0: {"m": 0}}
