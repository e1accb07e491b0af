"""Every byte by formula: what a run holds is computed here from the layout alone, and compared with ledger and plan.

With s bytes an element on the device (4 in fp32, 2 in 16 bit), P elements of all flats, T those of trainable ones, and
U(i) the bytes of unit i:

    device, parameters off:  max over nested chains of U  +  the 2 largest other U   (in use, fetched, given up)
                             + U of the largest trainable unit, while gradients leave for the host
    device, parameters on:   s P                          (+ nothing in flight if the update is there too)
    update on the device:    + 12 T (fp32 master, two moments of Adam) + s T gradients (4 T if micro-batches are summed)
    host, update off:        s T gradients (4 T), + s P and 12 T where they rest there, + staging
    nvme:                    s P and 12 T where they rest there
"""

import itertools
from typing import Any

import pytest
import torch

import tiered_zero
from tests.support.inspection import held_nbytes, ledger, units
from tests.support.inspection.insides import DeviceTier, HostTier, NvmeTier, assembly_spec
from tests.support.models import ParityGPT, batch
from tests.support.pairwise import by_turns
from tests.support.trainers import PLACEMENTS, tiered, train
from tiered_zero.layout.flat import Unit
from tiered_zero.telemetry.spans import Ledger

PRECISIONS: dict[str, tuple[int, dict[str, Any]]] = {"fp32": (4, {}), "bf16": (2, {"bf16": {"enabled": True}})}
TIERS = ("device", "host", "nvme")
HOME = dict(zip(("none", "cpu", "nvme"), TIERS, strict=True))


def window(found: list[Unit]) -> int:
    """Units of one module, and of modules around it, are in use together."""

    def around(unit: Unit) -> list[Unit]:
        names = unit.module.split(".") if unit.module else []
        paths = {".".join(names[:depth]) for depth in range(len(names) + 1)}
        return [other for other in found if other.module in paths]

    chain = max((around(unit) for unit in found), key=lambda own: sum(unit.nbytes for unit in own))
    others = sorted((unit.nbytes for unit in found if unit not in chain), reverse=True)
    return sum(unit.nbytes for unit in chain) + sum(others[:2])


def expected_bytes(found: list[Unit], placement: tuple[str, str], itemsize: int, accumulation: int) -> dict[str, Any]:
    """(tier, kind) -> bytes, without staging."""
    param, update = (HOME[device] for device in placement)
    gradients = "device" if update == "device" else "host"
    trainable = [unit for unit in found if unit.trainable]
    elements = sum(unit.numel for unit in trainable)
    table = {
        (param, "param"): sum(unit.nbytes for unit in found),
        (update, "state"): 12 * elements,
        (gradients, "gradient"): (4 if accumulation > 1 else itemsize) * elements,
    }
    if param != "device":
        table["device", "param_window"] = window(found)
    if gradients == "host":
        table["device", "gradient_in_flight"] = max(unit.nbytes for unit in trainable)
    return table


@pytest.mark.parametrize(
    ("placement", "how"), by_turns(PLACEMENTS, [("fp32", 1), ("bf16", 3), ("fp32", 3), ("bf16", 1)], 2)
)
def test_the_peak_is_the_formula(placement, how, swap_path):
    precision, accumulation = how
    itemsize, top = PRECISIONS[precision]
    with tiered(ParityGPT(), swap_path, placement, accumulation=accumulation, **top) as engine:
        train(engine, batch, 3, accumulation)
        engine.flush()
        expected = expected_bytes(units(engine), placement, itemsize, accumulation)
        report = engine.memory_report()
        planned = {(row.tier, row.kind): row.nbytes for row in engine.plan.rows}
        assert {key: nbytes for key, nbytes in planned.items() if not key[1].startswith("staging")} == expected
        for (tier, kind), nbytes in expected.items():
            peak = report[tier][kind]["peak"] if kind in report[tier] else 0
            assert peak <= nbytes, f"{tier} {kind}"
            assert kind in ("gradient_in_flight", "param_window") or peak == nbytes, f"{tier} {kind}"
        for tier in TIERS:
            assert ledger(engine).peaks().get(tier, 0) <= engine.plan.nbytes(tier)
        assert engine.plan.nbytes("device") == sum(nbytes for (tier, _), nbytes in expected.items() if tier == "device")


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_the_report_sums_to_the_ledger_and_the_plan(placement, swap_path):
    with tiered(ParityGPT(), swap_path, placement) as engine:
        for _ in range(2):
            train(engine, batch, 1)
            engine.flush()
            report = engine.memory_report()
            for tier in TIERS:
                kinds = report.get(tier, {}).values()
                assert sum(kind["now"] for kind in kinds) == held_nbytes(ledger(engine), tier)
                assert sum(kind["planned"] for kind in kinds) == engine.plan.nbytes(tier)
                assert all(0 <= kind["now"] <= kind["peak"] <= kind["planned"] for kind in kinds)
    after = ledger(engine)
    assert [held_nbytes(after, tier) for tier in TIERS] == [0, 0, 0], f"closed, and still held: {after.by_kind()}"


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_nothing_is_reserved_after_step_2(placement, swap_path, monkeypatch):
    """Slots, staging buffers and peaks stand still; what goes on is the window's coming and going within its peak."""
    with tiered(ParityGPT(), swap_path, placement, clipping=0.5) as engine:
        train(engine, batch, 2)
        engine.flush()
        before = {
            tier: {kind: row["peak"] for kind, row in kinds.items()} for tier, kinds in engine.memory_report().items()
        }
        reserved: list[str] = []
        for kind in (DeviceTier, HostTier, NvmeTier):
            monkeypatch.setattr(kind, "reserve", lambda _, name, *__: reserved.append(name))
        charged: list[str] = []
        plain_charge = Ledger.charge

        def charge(self: Ledger, tier: str, kind: str, nbytes: int) -> None:
            charged.append(kind)
            plain_charge(self, tier, kind, nbytes)

        monkeypatch.setattr(Ledger, "charge", charge)
        train(engine, batch, 4)
        engine.flush()
        after = {
            tier: {kind: row["peak"] for kind, row in kinds.items()} for tier, kinds in engine.memory_report().items()
        }
        for peaks in (before, after):
            peaks["device"].pop("gradient_in_flight", None)  # how many wait at once is a matter of luck
        assert not reserved
        assert set(charged) <= {"param_window", "gradient_in_flight"}
        assert before == after


def test_the_device_limit_is_the_window(swap_path):
    """With the planned bytes as limit the run goes through; with one unit less it is refused before it starts."""
    with tiered(ParityGPT(), swap_path) as engine:
        planned = engine.plan.nbytes("device")
        smallest = min(unit.nbytes for unit in units(engine))
    with tiered(ParityGPT(), swap_path, runtime={"device_memory_limit": planned}) as engine:
        train(engine, batch, 3)
        assert ledger(engine).peaks()["device"] <= planned
    chain_only = {"stage3_max_live_parameters": 0}
    with tiered(ParityGPT(), swap_path, zero=chain_only) as engine:
        least = engine.plan.nbytes("device")
    assert least < planned
    with tiered(ParityGPT(), swap_path, runtime={"device_memory_limit": least}) as engine:
        train(engine, batch, 3)
        assert ledger(engine).peaks()["device"] <= least
    with pytest.raises(tiered_zero.PlanError, match="device_memory_limit"):
        tiered(ParityGPT(), swap_path, runtime={"device_memory_limit": least - smallest})
    assert not any(swap_path.iterdir())


def test_what_the_device_has_free_is_a_limit_too(swap_path, monkeypatch):
    def free(nbytes):
        monkeypatch.setattr(assembly_spec, "available_device_nbytes", lambda device, own: nbytes)

    with tiered(ParityGPT(), swap_path, zero={"stage3_max_live_parameters": 0}) as engine:
        least = engine.plan.nbytes("device")
    source = "what the device has free, less an eighth for activations"
    free(least + least // 7 + 1)
    with tiered(ParityGPT(), swap_path) as engine:
        nbytes, said = engine.plan.limits["device"]
        assert least <= nbytes <= least + 1 and said == source
        train(engine, batch, 1)
        assert ledger(engine).peaks()["device"] <= least
    free(least)
    with tiered(ParityGPT(), swap_path, runtime={"device_memory_limit": least}) as engine:
        assert engine.plan.limits["device"] == (least, "tiered_zero.device_memory_limit"), (
            "all of it, where it is asked"
        )
    free(least - 1)
    for runtime in ({}, {"device_memory_limit": 2 * least}):
        with pytest.raises(tiered_zero.PlanError, match=rf"device memory; .* is allowed \({source}\)"):
            tiered(ParityGPT(), swap_path, runtime=runtime)
    assert not any(swap_path.iterdir())


def test_every_tier_at_its_planned_size(swap_path):
    """Host too: the arena has the plan's bytes and every one of them is taken."""
    for placement, precision in itertools.product(PLACEMENTS, PRECISIONS):
        with tiered(ParityGPT(), swap_path, placement, **PRECISIONS[precision][1]) as engine:
            assert held_nbytes(ledger(engine), "host") == engine.plan.nbytes("host")
            assert held_nbytes(ledger(engine), "nvme") == engine.plan.nbytes("nvme")
            on_disk = sum(path.stat().st_size for path in swap_path.rglob("*") if path.is_file())
            assert on_disk >= engine.plan.nbytes("nvme")
            assert torch.is_tensor(engine.module.tokens.weight)
