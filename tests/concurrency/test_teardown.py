"""The order in which a run ends, and that no act is passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.inspection.insides import SHUTDOWN
from tests.support.models import ParityGPT
from tests.support.trainers import tiered
from tiered_zero.concurrency.interrupts import Teardown, once


def test_acts_are_carried_out_in_the_order_of_their_names() -> None:
    done: list[str] = []
    resources = Teardown(("updates", "lanes", "memory"))
    for name, act in (("memory", "a"), ("lanes", "b"), ("memory", "c"), ("updates", "d")):
        resources.add(name, lambda act=act: done.append(act))
    resources.close()
    resources.close()
    assert done == ["d", "b", "c", "a"], "of one name the last first, and each once"
    with pytest.raises(KeyError):
        resources.add("another", done.clear)


def test_an_act_that_raises_passes_no_later_one_over() -> None:
    done: list[str] = []

    def fail() -> None:
        done.append("tried")
        raise OSError("first")

    resources = Teardown(("first", "second"))
    resources.add("first", fail)
    resources.add("second", lambda: done.append("second"))
    with pytest.raises(OSError, match="first"):
        resources.close()
    resources.close()
    assert done == ["tried", "second"]


def test_close_goes_on_where_a_second_interrupt_has_broken_it_off() -> None:
    """With the same act, unless nothing depends on it."""
    done: list[str] = []
    interrupts = [KeyboardInterrupt(), KeyboardInterrupt()]

    def act() -> None:
        if interrupts:
            raise interrupts.pop()
        done.append("act")

    def optional() -> None:
        done.append("optional")
        raise KeyboardInterrupt

    resources = Teardown(("memory",))
    resources.add("memory", lambda: done.append("last"))
    resources.add("memory", act)
    resources.add("memory", once(optional))
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            resources.close()
    assert done == ["optional"]
    resources.close()
    assert done == ["optional", "act", "last"]


def test_a_start_that_failed_is_freed_after_a_second_interrupt_too() -> None:
    done: list[str] = []
    interrupts = [KeyboardInterrupt("second")]

    def act() -> None:
        if interrupts:
            raise interrupts.pop()
        done.append("act")

    with pytest.raises(KeyboardInterrupt, match="second"), Teardown(("memory",)) as resources:
        resources.add("memory", lambda: done.append("last"))
        resources.add("memory", act)
        raise KeyboardInterrupt("first")
    assert done == ["act", "last"]


def test_an_engine_ends_in_the_order_of_the_list(swap_path: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Lanes after the last update and before the memory that they use; every name has an act."""
    made: list[Teardown] = []
    monkeypatch.setattr(Teardown, "__enter__", lambda self: made.append(self) or self)
    activations = {"device": "nvme", "nvme_path": str(swap_path), "limit": "1MiB"}
    runtime = {"report": str(tmp_path / "run.jsonl"), "activations": activations}
    monitor = {"enabled": True, "output_path": str(tmp_path)}
    engine = tiered(ParityGPT(), swap_path, ("nvme", "nvme"), runtime=runtime, csv_monitor=monitor)
    ended: list[str] = []
    for name, acts in made[0]._acts.items():
        acts.append(lambda name=name: ended.append(name))
    assert all(len(acts) > 1 for acts in made[0]._acts.values())
    engine.close()
    assert tuple(ended) == SHUTDOWN
    places = [SHUTDOWN.index(name) for name in ("last update", "lanes", "gradients", "pager", "tiers")]
    assert places == sorted(places)
