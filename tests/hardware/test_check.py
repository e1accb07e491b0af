"""Rates are medians, and all of a slow machine's are measured; how high they are, no test says."""

from __future__ import annotations

import math

import pytest
import torch

from tiered_zero.hardware import check
from tiered_zero.hardware.runtime import build_accelerator


def test_a_rate_is_a_median_of_few_calls_after_a_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, list[float]()

    def work() -> None:
        nonlocal now
        calls.append(now)
        now += (1.0, 0.1, 0.2, 0.4, 0.1, 0.4)[len(calls) - 1]

    monkeypatch.setattr(check.time, "perf_counter", lambda: now)
    for limit_s, num_calls, seconds in ((9.0, 6, 0.2), (1.2, 3, 0.15), (0.5, 1, 1.0)):
        monkeypatch.setattr(check, "LIMIT_S", limit_s)
        calls.clear()
        assert (check.median_rate(10.0, work), len(calls)) == (pytest.approx(10 / seconds), num_calls)


def test_each_type_that_the_device_multiplies_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LIMIT_S", 0.0)
    monkeypatch.setattr(check, "_SHAPES", {True: (32, 16)})
    monkeypatch.setattr(check, "DTYPES", {**check.DTYPES, "int4": torch.bits8})
    accelerator = build_accelerator("cpu")
    try:
        found = check.product_rates(accelerator)
        assert found.keys() == {"bf16", "fp16", "fp32"}
        assert all(0 < rate < math.inf for rate in found.values())
        monkeypatch.setattr(check, "_MODEL_SHAPES", {True: (32, 1, 64)})
        for besides in check.model_rates(accelerator, {"fp32": 1e30, "bf16": 1e30, "fp16": 1.0}):
            assert besides.keys() == {"bf16", "fp32"}, "none for a type that is multiplied slowly"
            assert all(0 < rate < math.inf for rate in besides.values())
        assert check.link_rates(accelerator) == (None, None)
    finally:
        accelerator.close()
