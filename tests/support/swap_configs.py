"""Random GPTs and random configs that decide bytes on NVMe, as people write them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.support.configs import SMALL_DEVICE
from tiered_zero.plan.gpt_shape import GPTConfig

PATHS = st.sampled_from(["swap", "a, b", "a,b,c", ["x"], ["b", "a"]])


SIZES = st.one_of(
    st.integers(1, 30_000_000),
    st.tuples(st.sampled_from(["1", "1.5", "20", "300"]), st.sampled_from(["KiB", "kb", " MB", "MiB", "G", "gib"])).map(
        "".join
    ),
)
"""Bytes, or text."""


@st.composite
def shapes(draw: st.DrawFn) -> GPTConfig:
    hidden = draw(st.integers(1, 300))
    return GPTConfig(
        layers=draw(st.integers(1, 5)),
        hidden=hidden,
        heads=1,
        vocab=draw(st.integers(1, 700)),
        context=draw(st.integers(1, 99)),
        tied=draw(st.booleans()),
    )


def _counts(low: int, high: int) -> st.SearchStrategy[Any]:
    """7, 7.0, "7", "7.0", or "auto"."""
    return st.one_of(
        st.tuples(st.integers(low, high), st.sampled_from([int, float, str, lambda n: f"{n}.0"])).map(
            lambda p: p[1](p[0])
        ),
        st.just("auto"),
    )


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Valid ones: something of it rests on NVMe in most."""
    zero: dict[str, Any] = {"stage": draw(st.sampled_from([3, "3", 3.0]))}
    param = {"device": draw(st.sampled_from(["nvme", "nvme", "cpu", "none"])), "nvme_path": draw(PATHS)}
    state = {"device": draw(st.sampled_from(["nvme", "nvme", "cpu", "none"])), "nvme_path": draw(PATHS)}
    if draw(st.booleans()):
        param["max_in_cpu"] = draw(_counts(0, 400_000))
    prefix = draw(st.sampled_from(["stage3_", ""]))
    if draw(st.booleans()):
        zero[f"{prefix}param_persistence_threshold"] = draw(_counts(0, 50_000))
    if draw(st.booleans()):
        zero[f"{prefix}model_persistence_threshold"] = draw(_counts(0, 50_000))
    if draw(st.booleans()):
        zero["sub_group_size"] = draw(st.integers(1, 100_000) | st.sampled_from([0, 5_000_000, 10**9, "1e9", "auto"]))
    if param["device"] == "cpu" and draw(st.booleans()):
        zero["cpu_offload_param"] = True
    else:
        zero["offload_param"] = param
    if state["device"] == "cpu" and draw(st.booleans()):
        zero["cpu_offload"] = True
    else:
        zero["offload_optimizer"] = state
    own: dict[str, Any] = dict(SMALL_DEVICE)
    if draw(st.booleans()):
        activations = {"device": draw(st.sampled_from(["nvme", "cpu"])), "nvme_path": draw(PATHS)}
        own["activations"] = {**activations, "limit": draw(st.one_of(st.none(), SIZES))}
    if draw(st.booleans()):
        own["unit_size_cap"] = draw(st.integers(1, 500_000))
    if state["device"] != "none":
        own["update"] = draw(st.sampled_from(["overlapped", "barrier", "delayed"]))
        limits = own["state_limits"] = {}
        if draw(st.booleans()):
            limits["host"] = draw(st.one_of(SIZES, st.just("auto")))
        if own["update"] != "delayed" and draw(st.booleans()):
            state["ratio"] = draw(st.one_of(st.floats(0, 1), st.sampled_from(["0.5", 0, 1, "auto", None])))
        elif own["update"] != "delayed" and draw(st.booleans()):
            limits["device"] = draw(SIZES)
    if draw(st.booleans()):
        own["state_format"] = draw(st.sampled_from(["fp32", "lossy_bf16_moments", "lossy_8bit_moments", "auto"]))
    precision = draw(st.sampled_from(["bf16", "bfloat16", "fp16", None]))
    amsgrad = draw(st.booleans())
    return {
        "train_batch_size": 1,
        **({precision: {"enabled": draw(st.sampled_from([True, False, "true", "auto"]))}} if precision else {}),
        "optimizer": {"type": draw(st.sampled_from(["Adam", "adamw"])), "params": {"lr": "auto", "amsgrad": amsgrad}},
        "zero_optimization": zero,
        "tiered_zero": own,
    }
