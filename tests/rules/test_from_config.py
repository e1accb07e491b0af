"""The optimizer section of the JSON: DeepSpeed's mapping, its defaults, and one clear error a mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiered_zero.config.load import load
from tiered_zero.errors import ConfigError, ModelError
from tiered_zero.rules.from_config import ResolvedOptimizer, make_optimizer, make_rule, resolve_optimizer
from tiered_zero.rules.native_rules import AdamRule, Lion
from tiered_zero.rules.torch_rule import TorchRule


def resolve(name: str, params: dict[str, Any]) -> ResolvedOptimizer:
    """As a run does it: the config is read first."""
    section = load({"train_batch_size": 1, "optimizer": {"type": name, "params": params}}).optimizer
    assert section is not None
    return resolve_optimizer(section.type, section.params)


@pytest.mark.parametrize(
    ("name", "params", "kind", "decoupled"),
    [
        ("Adam", {}, torch.optim.AdamW, True),
        ("adam", {"adam_w_mode": True}, torch.optim.AdamW, True),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, False),
        ("ADAMW", {}, torch.optim.AdamW, True),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, True),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW, True),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, False),
    ],
)
def test_adam_is_adamw_unless_adam_w_mode_says_otherwise(
    name: str, params: dict[str, Any], kind: type[torch.optim.Optimizer], decoupled: bool
) -> None:
    resolved = resolve(name, params)
    assert resolved.optimizer_class is kind
    assert resolved.defaults.keys() <= {"weight_decay"}
    assert ("decoupled" in resolved.text) == decoupled
    assert "(lr 0.001 by default" in resolved.text
    assert ('"Adam" means AdamW' in resolved.text) == (name.lower() == "adam" and decoupled)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_both_spellings_decay_as_they_say(name: str) -> None:
    """One step with a zero gradient moves a decoupled weight by lr * decay exactly, and an L2 one by about lr."""
    moved = {}
    for mode in (True, False):
        resolved = resolve(name, {"lr": 0.1, "weight_decay": 0.5, "adam_w_mode": mode})
        leaf = torch.ones(3, requires_grad=True)
        leaf.grad = torch.zeros(3)
        resolved.optimizer_class([leaf], **resolved.defaults).step()
        moved[mode] = leaf.detach()
    assert torch.equal(moved[True], torch.full((3,), 1.0).mul_(1 - 0.1 * 0.5))
    assert torch.equal(moved[False], moved[True]) == (name == "AdamW")


def test_weight_decay_defaults_to_deepspeeds_zero_and_to_torchs_on_request() -> None:
    assert resolve("AdamW", {}).defaults == {"weight_decay": 0.0}
    assert resolve("AdamW", {"weight_decay": "auto"}).defaults == {"weight_decay": 0.0}
    assert resolve("AdamW", {"torch_adam": True}).defaults == {}
    assert resolve("AdamW", {"weight_decay": 0.2}).defaults == {"weight_decay": 0.2}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sgd", torch.optim.SGD), ("Adagrad", torch.optim.Adagrad), ("RMSprop", torch.optim.RMSprop), ("Lion", Lion)],
)
def test_other_names_are_torchs_classes_in_any_case(name: str, kind: type[torch.optim.Optimizer]) -> None:
    for spelling in (name, name.upper(), name.lower()):
        resolved = resolve(spelling, {"lr": 0.5})
        assert (resolved.optimizer_class, resolved.defaults) == (kind, {"lr": 0.5})
        assert kind.__name__ in resolved.text and "lr 0.5" in resolved.text
        TorchRule(kind([torch.zeros(1)], **resolved.defaults))


def test_numbers_as_strings_lists_and_auto_are_resolved() -> None:
    params = {"lr": "3e-5", "betas": [0.9, "0.95"], "eps": "auto", "bias_correction": True, "set_grad_none": True}
    assert resolve("Adam", params).defaults == {"lr": 3e-5, "betas": (0.9, 0.95), "weight_decay": 0.0}
    assert resolve("Adam", {"adam_w_mode": "auto", "torch_adam": "auto"}) == resolve("Adam", {})


def test_options_that_only_torchs_own_code_covers_keep_torchs_rule() -> None:
    for options, kind in (({"fused": True}, TorchRule), ({"foreach": True}, TorchRule), ({"foreach": None}, AdamRule)):
        resolved = resolve("Adam", options)
        rule = make_rule(resolved.optimizer_class([torch.zeros(1, requires_grad=True)], **resolved.defaults))
        assert type(rule) is kind
        rule.close()
    assert resolve("SGD", {"momentum": 0.9, "nesterov": True}).defaults["nesterov"] is True


def test_without_bias_correction() -> None:
    params = {"bias_correction": False}
    section = load({"train_batch_size": 1, "optimizer": {"type": "Adam", "params": params}}).optimizer
    source = make_optimizer(section, torch.nn.Linear(1, 1), None, None)
    rule = make_rule(source)
    assert isinstance(rule, AdamRule) and source.param_groups[0]["bias_correction"] is False
    rule.close()
    source.param_groups[0]["fused"] = True
    with pytest.raises(ConfigError, match=r"optimizer\.params\.bias_correction: expected true with fused"):
        make_rule(source)
    with pytest.raises(ModelError, match="bias_correction False, which torch's Adam"):
        make_optimizer(None, torch.nn.Linear(1, 1), source, None)


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("Adan", {}, "'Adan' is no known optimizer. Did you mean 'Adam'"),
        ("Optimizer", {}, "is no known optimizer"),
        ("OneBitAdam", {}, "compresses gradients"),
        ("ZeroOneAdam", {}, "compresses gradients"),
        ("OneBitLamb", {}, "compresses gradients"),
        ("MuAdam", {}, "mup"),
        ("musgd", {}, "mup"),
        ("Muon", {"lr": 0.1}, r"initialize\(optimizer="),
        ("Lamb", {}, "no LAMB"),
        ("LBFGS", {}, "couples all parameters"),
        ("SparseAdam", {}, "sparse gradients"),
        ("Adam", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("Adam", {"weight_decy": 0.1}, "optimizer.params.weight_decy.*Did you mean 'weight_decay'"),
        ("Adam", {"learning_rate": 0.1}, "'learning_rate' is no parameter of AdamW. Did you mean 'lr'"),
        (" lamb ", {}, "no LAMB"),
        ("SGD", {"set_grad_none": True}, "optimizer.params.set_grad_none"),
        ("Adam", {"set_grad_none": False}, "optimizer.params.set_grad_none must be true"),
        ("Adam", {"set_grad_none": 1}, "optimizer.params.set_grad_none must be true"),
        ("SGD", {"bias_correction": False}, "'bias_correction' is no parameter of SGD"),
        ("Adam", {"bias_correction": "no"}, "optimizer.params.bias_correction must be true or false"),
        ("Lion", {"fp32_optimizer_states": False}, "optimizer.params.fp32_optimizer_states: expected true"),
        ("Adam", {"adam_w_mode": "yes"}, "optimizer.params.adam_w_mode must be true or false"),
        ("Adam", {"lr": "fast"}, "optimizer.params: AdamW does not take {'lr': 'fast'"),
        ("Adam", {"lr": True}, "optimizer.params.lr must be no flag; found True"),
        ("Adam", {"lr": float("nan")}, "optimizer.params.lr: expected a finite number"),
        ("Adam", {"lr": -1.0}, "optimizer.params: AdamW does not take .*Invalid learning rate: -1.0"),
        ("Adam", {"betas": 0.9}, "optimizer.params: AdamW does not take {'betas': 0.9"),
        ("Lion", {"betas": [0.9, 1.0]}, "optimizer.params: Lion does not take .*Invalid betas"),
        ("Adam", {"amsgrad": 1}, "optimizer.params.amsgrad must be true or false"),
        ("Adam", {"fused": "yes"}, "optimizer.params.fused must be true or false"),
        ("Adam", {"capturable": True}, "optimizer.params.capturable must be false"),
        ("SGD", {"nesterov": True}, "Nesterov momentum requires"),
    ],
)
def test_mistakes_name_the_key_and_what_to_do(name: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(name, params)
