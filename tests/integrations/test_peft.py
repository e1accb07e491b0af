"""Adapters of PEFT over a paged GPT-2: the bits of plain PyTorch, with and without checkpoints of activations."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered_zero
from tests.integrations.conftest import LOOP, PLACES, copies, gpt2, optimizer_for, token_ids
from tests.support.trainers import FAR, Plain, Record, assert_parity, assert_same_bits

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other

ATTENTION = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 2, **ATTENTION}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True, **ATTENTION}),
    "rank-stabilized LoRA": (
        "LoraConfig",
        {"r": 2, "use_rslora": True, **ATTENTION, "target_modules": ["c_attn", "c_proj", "c_fc"]},
    ),
    "LoRA and the head": ("LoraConfig", {"r": 2, "modules_to_save": ["lm_head"], **ATTENTION}),
    "LoRA and tokens": ("LoraConfig", {"r": 2, "trainable_token_indices": [1, 2], **ATTENTION}),
    "IA3": (
        "IA3Config",
        {"target_modules": ["c_attn", "c_proj"], "feedforward_modules": ["c_proj"], "fan_in_fan_out": True},
    ),
    "VeRA": ("VeraConfig", {"r": 2, **ATTENTION}),
    "norms": ("LNTuningConfig", {"target_modules": ["ln_1", "ln_2"]}),
    "prompt": ("PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}),
    "P-tuning": ("PromptEncoderConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3, "encoder_hidden_size": 8}),
    "prefix": ("PrefixTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}),
}


def adapted(method: str = "LoRA", num_layers: int = 2) -> Any:
    import peft

    kind, options = METHODS[method]
    return peft.get_peft_model(gpt2(num_layers), getattr(peft, kind)(**options))


def steps(trainer: Any, num_steps: int = 3, start: int = 0) -> list[Any]:
    seen = []
    for number in range(start, start + num_steps):
        loss = trainer(input_ids=token_ids(number), labels=token_ids(number)).loss
        trainer.backward(loss)
        trainer.step()
        seen += [loss.detach(), trainer.get_global_grad_norm()]
    return seen


@pytest.mark.parametrize("clipping", [0.0, 0.1])
@pytest.mark.parametrize("method", METHODS)
def test_every_method(method, clipping, swap_path):
    def script(trainer: Any) -> list[Any]:
        return [value for value in steps(trainer) if clipping or isinstance(value, Tensor)]

    assert_parity(lambda: adapted(method), script, swap_path, PLACES, clipping=clipping)


@pytest.mark.parametrize("clipping", [0.0, 0.1])
@pytest.mark.parametrize("runtime", [{}, {"unit_size_cap": 1}])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_in_checkpoints(use_reentrant, runtime, clipping, swap_path):
    """`unit_size_cap` 1: each layer's region has several units."""

    def script(trainer: Any) -> list[Any]:
        module = trainer.module
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        module.enable_input_require_grads()
        return [value for value in steps(trainer) if clipping or isinstance(value, Tensor)]

    assert_parity(adapted, script, swap_path, PLACES, clipping=clipping, runtime=runtime)


class OneRegion(nn.Module):
    """All layers in one checkpoint that is not reentrant."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.inner = adapted(num_layers=num_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        model = self.inner.base_model.model
        hidden = checkpoint(lambda ids: model.transformer(ids).last_hidden_state, tokens, use_reentrant=False)
        return F.cross_entropy(model.lm_head(hidden).flatten(0, 1), tokens.flatten())


def train_in_one_region(trainer: Any) -> list[Any]:
    seen = []
    for number in range(3):
        loss = trainer(token_ids(number))
        trainer.backward(loss)
        trainer.step()
        seen.append(loss.detach())
    return seen


@pytest.mark.parametrize("clipping", [0.0, 0.1])
@pytest.mark.parametrize("placement", FAR, ids="-".join)
def test_a_region_larger_than_the_window(placement, clipping, swap_path, caplog):
    """Weights that a checkpoint has computed with again leave: of six layers two have room."""
    small = {"stage3_max_live_parameters": 12_500, "stage3_prefetch_bucket_size": 0}
    assert_parity(lambda: OneRegion(6), train_in_one_region, swap_path, [placement], clipping=clipping, zero=small)
    assert not any("more on the device than planned" in record.message for record in caplog.records)


def whole(trainer: Any, **options: Any) -> Any:
    return nullcontext() if isinstance(trainer, Plain) else tiered_zero.gathered(trainer.module, **options)


def keep_adapters(trainer: Any) -> list[Any]:
    """Outputs without the adapter, generated tokens, its state_dict halved and loaded."""
    import peft

    seen, module = steps(trainer, 2), trainer.module
    with torch.no_grad(), module.disable_adapter():
        seen.append(module(input_ids=token_ids(7)).logits)
    module.eval()
    seen.append(module.generate(input_ids=token_ids(3), max_new_tokens=3, do_sample=False))
    module.train()
    state = {name: value.clone() for name, value in peft.get_peft_model_state_dict(module).items()}
    peft.set_peft_model_state_dict(module, {name: value * 0.5 for name, value in state.items()})
    return [*seen, *state.values(), *steps(trainer, 2, 2)]


def merge_and_unmerge(trainer: Any) -> list[Any]:
    seen, module = steps(trainer, 1), trainer.module
    with whole(trainer, modify=True):
        module.merge_adapter()
    with torch.no_grad():
        seen.append(module(input_ids=token_ids(7)).logits)
    with whole(trainer, modify=True):
        module.unmerge_adapter()
    return [*seen, *steps(trainer, 1, 1)]


def merge_a_copy(trainer: Any) -> list[Any]:
    seen = steps(trainer, 1)
    merged = copy.deepcopy(trainer.module).merge_and_unload()
    return [*seen, merged(input_ids=token_ids(7)).logits.detach(), *steps(trainer, 1, 1)]


@pytest.mark.parametrize("script", [keep_adapters, merge_and_unmerge, merge_a_copy])
def test_what_adapters_are_kept_for(script, swap_path):
    assert_parity(adapted, script, swap_path, PLACES, clipping=0.5)


@pytest.mark.parametrize("build", [gpt2, adapted])
def test_state_on_disk_in_a_plain_loop(build, swap_path):
    """Without an engine: the losses and weights of a plain GPT-2, and of its adapters."""
    records = []
    for placement in (None, LOOP):
        model = build()
        with optimizer_for(model, placement, swap_path) as optimizer:
            losses = []
            for number in range(4):
                loss = model(input_ids=token_ids(number), labels=token_ids(number)).loss
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        records.append(Record(losses, copies(model.state_dict())))
    assert_same_bits(*records)
