"""The built-in GPT: shapes, causality, ties, birth on meta, and the text that names it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_zero.demo.gpt import GPT, INIT_STD, build_gpt
from tiered_zero.errors import ConfigError
from tiered_zero.plan.gpt_shape import GPTConfig, gpt_of_size, num_parameters, parse_count, parse_gpt

SMALL = GPTConfig(layers=2, hidden=32, heads=4, vocab=50, context=16)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return build_gpt(SMALL, "cpu")


def test_logits_and_loss_agree(model: GPT) -> None:
    tokens, targets = torch.randint(50, (2, 3, 16))
    logits = model(tokens)
    assert logits.shape == (3, 16, 50)
    torch.testing.assert_close(model(tokens, targets), F.cross_entropy(logits.view(-1, 50), targets.view(-1)))


def test_the_first_loss_is_that_of_a_guess(model: GPT) -> None:
    tokens, targets = torch.randint(50, (2, 8, 16))
    assert model(tokens, targets).item() == pytest.approx(math.log(50), abs=0.1)


def test_a_token_changes_only_what_comes_after_it(model: GPT) -> None:
    tokens = torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_a_shorter_text_than_the_context_is_fine(model: GPT) -> None:
    tokens = torch.randint(50, (1, 16))
    torch.testing.assert_close(model(tokens)[:, :5], model(tokens[:, :5]))


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_gets_a_gradient_and_is_counted_once(tied: bool) -> None:
    config = GPTConfig(layers=3, hidden=64, vocab=40, context=8, tied=tied)
    model = build_gpt(config, "cpu")
    assert (model.head.weight is model.tokens.weight) is tied
    model(*torch.randint(40, (2, 2, 8))).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(config)


def test_on_meta_it_takes_no_memory_and_every_owner_can_initialize_itself() -> None:
    model = build_gpt(SMALL)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert model.blocks[0].mlp_in.weight.std().item() == pytest.approx(INIT_STD, rel=0.1)
    assert model.blocks[1].mlp_out.weight.std().item() == pytest.approx(INIT_STD / 2, rel=0.1)


def test_filling_it_module_by_module_gives_what_its_constructor_gives(model: GPT) -> None:
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(0)
    again = build_gpt(SMALL, "cpu")
    assert all(torch.equal(weights[name], parameter) for name, parameter in again.named_parameters())


@settings(max_examples=20, deadline=None)
@given(st.floats(1e6, 2e12))
def test_a_gpt_of_a_size_has_about_that_size(num_wanted: float) -> None:
    config = gpt_of_size(num_wanted)
    assert num_parameters(config) == pytest.approx(num_wanted, rel=0.25)
    assert config.hidden % config.heads == 0


def test_seven_billion_has_the_usual_shape() -> None:
    config = gpt_of_size(7e9)
    assert num_parameters(config) == pytest.approx(7e9, rel=0.02)
    assert 28 <= config.layers <= 36 and 3840 <= config.hidden <= 4608
    assert (config.vocab, config.context, config.tied) == (128256, 8192, False)


@pytest.mark.parametrize(
    ("text", "count"), [("7B", 7e9), ("1.3b", 1.3e9), ("350M", 350e6), ("2T", 2e12), ("7e9", 7e9), (" 7_000k", 7e6)]
)
def test_a_number_of_parameters_is_written_in_short(text: str, count: float) -> None:
    assert parse_count(text) == pytest.approx(count)


@pytest.mark.parametrize("size", [0, -1, 999_999, math.nan, math.inf])
def test_a_size_that_is_none_is_refused(size: float) -> None:
    with pytest.raises(ConfigError, match="at least 1e6 parameters"):
        gpt_of_size(size)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt", GPTConfig()),
        ("gpt:", GPTConfig()),
        ("gpt:layers=24,hidden=2048", GPTConfig(layers=24, hidden=2048, heads=32)),
        ("gpt: layers = 2 , hidden=96, heads=3, tied=0,", GPTConfig(layers=2, hidden=96, heads=3, tied=False)),
        ("gpt:vocab=50257,context=1024", GPTConfig(vocab=50257, context=1024)),
    ],
)
def test_text_names_a_model(text: str, expected: GPTConfig) -> None:
    assert parse_gpt(text) == expected
    assert parse_gpt(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bert:layers=2", "is written gpt:layers"),
        ("", "is written gpt:layers"),
        ("gpt:layer=2", "no setting 'layer'; it has layers, hidden"),
        ("gpt:layers", "layers must be a whole number, not ''"),
        ("gpt:layers=two", "not 'two'"),
        ("gpt:layers=2.5", "not '2.5'"),
        ("gpt:layers=2,layers=3", "given twice"),
        ("gpt:layers=0", None),
        ("gpt:hidden=-64", "hidden >= 1, not -64"),
        ("gpt:hidden=100,heads=3", "no multiple of heads=3"),
        ("gpt:tied=2", "tied must be 0 or 1"),
    ],
)
def test_bad_text_is_refused(text: str, message: str | None) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_gpt(text)
