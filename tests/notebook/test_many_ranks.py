"""The notebook's runs with four processes, beside the same with one: its script and its configurations, as they stand.

All ranks train on the same batches, so that the average of their gradients is the gradient of one.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from tests.notebook.run_many import run_scripts
from tests.ranks.pool import RankPool

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
RATE = 3e-5
FP16_HALF = 2.0**-11
"""Half a unit in the last place of fp16, relative."""


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step:(\d+), loss:(\S+)", printed)}


def slope(weights: dict[str, list[float]]) -> float:
    """How much the loss changes at most where each weight changes by one, to first order: the sum of the gradient's
    absolute values, on the first batch."""
    names = runpy.run_path(str(HERE / "local_gpt2.py"))
    model = names["build_model"]()
    state = {name: torch.tensor(weights[name]).view_as(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    tokens = names["ByteTokenizer"]()(names["load_texts"]()[:8], "pt", True, True, 1024)
    ids, mask = tokens.input_ids, tokens.attention_mask
    model.eval()(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    return sum(param.grad.abs().sum().item() for param in model.parameters() if param.grad is not None)


@pytest.mark.slow
def test_four_processes_train_as_one(ranks: RankPool) -> None:
    """Gradients are divided by four in fp16, which is exact but for the smallest: those round. Adam divides by their
    own size, so that such an element still moves by at most the rate in a step: two runs are apart by twice that in
    each update, and by the rounding of a weight to fp16. The loss is apart by that times its slope; twice that covers
    a slope that changes on the way."""
    configs = [str(CONFIGS / f"notebook_{name}.json") for name in ("zero1", "offload")]
    together = ranks.run(run_scripts, 4, configs)
    ((one,),) = (alone.values() for alone in ranks.run(run_scripts, 1, configs[:1]))  # placements: test_notebook.py
    moved = 2 * RATE * (26 - one["num_skipped"])
    bound = 2 * slope(one["weights"]) * (moved + 2 * FP16_HALF)
    assert [each["stage"] for each in together[0].values()] == [1, 3]
    for name in together[0]:
        own_ranks = [each[name] for each in together]
        first = own_ranks[0]
        assert (first["world_size"], first["micro_batch"], one["micro_batch"]) == (4, 4, 16)
        assert first["num_steps"] == one["num_steps"] == 26
        assert all(each["weights"] == first["weights"] and each["loss"] == first["loss"] for each in own_ranks)
        assert all(each["printed"] == "" for each in own_ranks[1:]), "rank 0 prints"
        assert (first["num_skipped"], first["loss_scale"]) == (one["num_skipped"], one["loss_scale"])
        for key, weight in one["weights"].items():
            for mine, theirs in zip(first["weights"][key], weight, strict=True):
                assert abs(mine - theirs) <= moved + 2 * FP16_HALF * max(1.0, abs(theirs)), key
        own, theirs = losses(first["printed"]), losses(one["printed"])
        assert own.keys() == theirs.keys() == {0, 10, 20}
        assert own[0] == theirs[0], "before any update"
        assert all(abs(own[step] - theirs[step]) <= bound for step in own)
    assert {name: each["weights"] for name, each in together[0].items()} == dict.fromkeys(
        together[0], together[0]["notebook_zero1"]["weights"]
    ), "whatever the stage, wherever it rests"
