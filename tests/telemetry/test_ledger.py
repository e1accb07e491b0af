"""The ledger's sums hold, and a limit refuses without charging."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.inspection import held_nbytes
from tiered_zero.errors import BudgetError
from tiered_zero.telemetry.spans import Ledger

TIERS = ("device", "host", "nvme")
KINDS = ("parameters", "gradients", "staging")


@given(
    st.lists(st.tuples(st.sampled_from(TIERS), st.sampled_from(KINDS), st.integers(0, 1000)), max_size=60), st.randoms()
)
def test_kinds_sum_to_their_tier_now_and_the_peak_is_the_largest_sum(charges, random) -> None:  # type: ignore[no-untyped-def]
    ledger, held, peak = Ledger(), defaultdict(int), defaultdict(int)
    outstanding: list[tuple[str, str, int]] = []
    for tier, kind, nbytes in charges:
        ledger.charge(tier, kind, nbytes)
        outstanding.append((tier, kind, nbytes))
        held[tier] += nbytes
        peak[tier] = max(peak[tier], held[tier])
        if random.random() < 0.4:
            back = outstanding.pop(random.randrange(len(outstanding)))
            ledger.discharge(*back)
            held[back[0]] -= back[2]
    kinds = ledger.by_kind()
    for tier in TIERS:
        assert held_nbytes(ledger, tier) == held[tier] == sum(now for now, _ in kinds.get(tier, {}).values())
        assert ledger.peaks().get(tier, 0) == peak[tier]
        assert all(now <= most <= peak[tier] for now, most in kinds.get(tier, {}).values())


def test_a_limit_refuses_with_nothing_charged() -> None:
    ledger = Ledger({"device": 1000})
    ledger.charge("device", "parameters", 800)
    with pytest.raises(BudgetError, match=r"staging needs 201 B more on tier device.*1000 B is allowed"):
        ledger.charge("device", "staging", 201)
    assert ledger.by_kind() == {"device": {"parameters": (800, 800)}}
    assert ledger.peaks()["device"] == 800
    ledger.charge("device", "staging", 200)
    assert held_nbytes(ledger, "device") == 1000


def test_what_is_released_can_be_charged_again() -> None:
    ledger = Ledger({"host": 10})
    for _ in range(3):
        ledger.charge("host", "arena", 10)
        ledger.discharge("host", "arena", 10)
    assert (held_nbytes(ledger, "host"), ledger.peaks()["host"]) == (0, 10)


def test_recent_peaks_start_anew_from_what_is_held() -> None:
    ledger = Ledger()
    ledger.charge("host", "arena", 10)
    ledger.charge("host", "staging", 5)
    ledger.discharge("host", "staging", 5)
    assert ledger.take_recent_peaks() == {"host": 15}
    assert ledger.take_recent_peaks() == {"host": 10}
    ledger.charge("host", "staging", 2)
    assert ledger.take_recent_peaks() == {"host": 12}
    assert ledger.peaks()["host"] == 15


def test_a_tier_without_limit_has_none() -> None:
    ledger = Ledger({"device": 0})
    ledger.charge("nvme", "state", 1 << 50)
    assert held_nbytes(ledger, "nvme") == 1 << 50


def test_releasing_more_than_was_taken_is_our_own_error() -> None:
    ledger = Ledger()
    ledger.charge("host", "arena", 5)
    with pytest.raises(AssertionError, match="host/arena"):
        ledger.discharge("host", "arena", 6)
    assert held_nbytes(ledger, "host") == 5
