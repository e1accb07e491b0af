"""State on several tiers at once: the bits of plain PyTorch, whatever part of it rests where."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch

from tests.support.inspection import inventory, layouts, ledger, units
from tests.support.inspection.insides import UpdatePipeline
from tests.support.models import ParityGPT, batch, groups
from tests.support.pairwise import by_turns
from tests.support.plan_requests import gradient_tiers
from tests.support.trainers import Plain, Record, assert_same_bits, follow, tiered, train
from tiered_zero.errors import ConfigError

OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=3e-3),
    "adafactor": lambda model: torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad]),
    "rmsprop": lambda model: torch.optim.RMSprop(groups(model), lr=1e-3, centered=True),
}

SUB_GROUP = 12 * 2048
"""Bytes of the smallest sub-group under AdamW: a master and two moments."""

MIXTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "device+host": ("cpu", {"ratio": 0.6}, {}),
    "device+nvme": ("nvme", {}, {"state_limits": {"device": 7 * SUB_GROUP}}),
    "host+nvme": ("nvme", {}, {"state_limits": {"host": "150KiB", "nvme": "1GiB"}}),
    "device+host+nvme": ("nvme", {"ratio": 0.8}, {"state_limits": {"host": 5 * SUB_GROUP}}),
    "all on device": ("nvme", {"ratio": 0}, {}),
}
"""(offload_optimizer.device, further keys of offload_optimizer, of tiered_zero)."""

RUNS = [
    ("none", "overlapped", 1, 0.0),
    ("cpu", "overlapped", 3, 0.5),
    ("nvme", "overlapped", 1, 0.5),
    ("nvme", "overlapped", 3, 0.0),
    ("none", "barrier", 3, 0.0),
    ("cpu", "barrier", 1, 0.5),
]
"""(offload_param.device, update, accumulation, clipping). A mixture meets half of them: every tier of the parameters,
both updates, both clippings."""


def build() -> ParityGPT:
    torch.manual_seed(0)
    return ParityGPT()


def data(number: int) -> tuple[Any, ...]:
    return (*batch(number), number % 5 == 1)


def split(swap_path: Any, mixture: str, param: str = "cpu", optimizer: str = "adamw", **options: Any) -> Any:
    """An engine, its state spread as the mixture says, a block a unit of several sub-groups. `options`: of `tiered`."""
    device, offload, own = MIXTURES[mixture]
    zero = {"offload_optimizer": {"device": device, "nvme_path": str(swap_path), **offload}, **options.pop("zero", {})}
    runtime = {"unit_size_cap": 20_000, **own, **options.pop("runtime", {})}
    return tiered(build(), swap_path, (param, device), OPTIMIZERS[optimizer], zero=zero, runtime=runtime, **options)


@functools.cache
def reference(optimizer: str, accumulation: int, clipping: float, backwards: int = 1) -> Record:
    trainer = Plain(build(), OPTIMIZERS[optimizer], accumulation, clipping)
    return follow(lambda own: train(own, data, 4, accumulation, backwards), trainer)


def tiers_used(engine: Any) -> set[str]:
    return set(engine.plan.tiers.state)


@pytest.mark.parametrize(
    ("mixture", "param", "update", "accumulation", "clipping"),
    [(mixture, *RUNS[run]) for number, mixture in enumerate(MIXTURES) for run in ((0, 5, 3), (4, 1, 2))[number % 2]],
)
def test_four_steps_give_the_bits_of_plain_torch(
    mixture: str, param: str, update: str, accumulation: int, clipping: float, swap_path: Any
) -> None:
    engine = split(swap_path, mixture, param, accumulation=accumulation, clipping=clipping, runtime={"update": update})
    wanted = {"device"} if mixture == "all on device" else set(mixture.split("+"))
    assert tiers_used(engine) == wanted
    found = follow(lambda own: train(own, data, 4, accumulation), engine)
    assert_same_bits(reference("adamw", accumulation, clipping), found)
    assert not any(swap_path.iterdir())


@pytest.mark.parametrize(
    ("cut", "mixture"),
    by_turns(
        [(5000, 100, None, 1), (2048, 10**6, None, 2), (2048, 0, 3000, 1), (20_000, 40, 3000, 1)],
        ["device+nvme", "host+nvme", "device+host+nvme"],
    ),
)
def test_cuts_persistent_parameters_and_units_of_any_size(
    mixture: str, cut: tuple[int, int, int | None, int], swap_path: Any
) -> None:
    sub_group, persistence, unit_cap, backwards = cut
    zero = {"sub_group_size": sub_group, "stage3_param_persistence_threshold": persistence}
    engine = split(swap_path, mixture, "nvme", clipping=0.5, zero=zero, runtime={"unit_size_cap": unit_cap})
    found = follow(lambda own: train(own, data, 4, 1, backwards), engine)
    assert_same_bits(reference("adamw", 1, 0.5, backwards), found)


@pytest.mark.parametrize(("mixture", "precision"), by_turns(list(MIXTURES), ["bf16", "fp16"]))
def test_half_precision_has_the_bits_of_any_other_placement(mixture: str, precision: str, swap_path: Any) -> None:
    top = {precision: {"enabled": True}}

    def script(trainer: Any) -> list[Any]:
        return train(trainer, data, 3, 2)

    whole = tiered(build(), swap_path, ("cpu", "nvme"), OPTIMIZERS["adamw"], 2, 0.5, **top)
    expected = follow(script, whole)
    assert_same_bits(expected, follow(script, split(swap_path, mixture, accumulation=2, clipping=0.5, **top)))


@pytest.mark.parametrize("ratio", [0.9, 0.55, 0.4, 0.1])
def test_the_ratio_is_what_rests_off_the_device(ratio: float, swap_path: Any) -> None:
    offload = {"device": "nvme", "nvme_path": str(swap_path), "ratio": ratio}
    with tiered(build(), swap_path, zero={"offload_optimizer": offload}) as engine:
        state = {tier: kinds["state"]["now"] for tier, kinds in engine.memory_report().items() if "state" in kinds}
        assert state.keys() == {"device", "nvme"}
        assert 0 <= state["nvme"] - ratio * sum(state.values()) < SUB_GROUP


def test_embeddings_come_first_and_a_unit_may_be_split(swap_path: Any) -> None:
    """The embedding is one sub-group, so the first block follows it; its gradients leave the device and come back."""
    with split(swap_path, "device+nvme") as engine:
        plan, subgroups = engine.plan, [layout.subgroup for layout in layouts(engine)]
        (first,) = [subgroup for subgroup in subgroups if subgroup.embedding]
        assert {piece.param.name for piece in first.pieces} == {"tokens.weight"}
        assert plan.tiers.state[first.index] == "device"
        others = [subgroup.index for subgroup in subgroups if not subgroup.embedding]
        assert [plan.tiers.state[index] for index in others] == ["device"] * 6 + ["nvme"] * (len(others) - 6)
        tiers_of: dict[int, set[str]] = {}
        for subgroup in subgroups:
            for segment in subgroup.segments:
                tiers_of.setdefault(segment.unit.index, set()).add(plan.tiers.state[subgroup.index])
        assert {"device", "nvme"} in tiers_of.values()
        assert {index for index, tier in gradient_tiers(plan).items() if tier == "device"} == {
            index for index, tiers in tiers_of.items() if tiers == {"device"}
        }
        charged: list[int] = []
        charge = ledger(engine).charge
        ledger(engine).charge = lambda tier, kind, nbytes: (  # type: ignore[method-assign]
            charged.append(nbytes) if (tier, kind) == ("device", "gradient_in_flight") else None,
            charge(tier, kind, nbytes),
        )
        train(engine, batch, 1)
        assert charged[-1] == 4 * 2048, "a sub-group's gradients of the unit that is split"


@pytest.mark.parametrize(("mixture", "optimizer"), by_turns(list(MIXTURES), ["rmsprop", "adafactor"]))
def test_a_rule_of_torchs_own(mixture: str, optimizer: str, swap_path: Any) -> None:
    """The second needs whole parameters, so that sub-groups are cut between units."""
    engine = split(swap_path, mixture, optimizer=optimizer)
    assert len(tiers_used(engine)) > (mixture != "all on device")
    found = follow(lambda own: train(own, data, 4), engine)
    assert_same_bits(reference(optimizer, 1, 0.0), found)


def test_what_rests_on_the_device_waits_for_nothing_else(swap_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units whose state is on the device are published while the first update elsewhere has not even begun."""
    begin = threading.Event()
    update = UpdatePipeline._update

    def late(self: UpdatePipeline, work: Any, job: Any) -> None:
        assert self.io.updates_on_device(work.layout.subgroup) or begin.wait(300)
        update(self, work, job)

    monkeypatch.setattr(UpdatePipeline, "_update", late)
    with split(swap_path, "device+nvme") as engine:
        last_update, tiers = inventory(engine).last_update, gradient_tiers(engine.plan)
        trainable = [unit for unit in units(engine) if unit.trainable]
        engine.backward(engine(*batch(0)))
        engine.step()
        for unit in trainable:
            if tiers[unit.index] == "device":
                last_update(unit).written.wait()
        done = {unit.name for unit in trainable if last_update(unit).written.done()}
        begin.set()
        assert {"tokens:float32"} < done < {unit.name for unit in trainable}
        assert done >= {unit.name for unit in trainable if tiers[unit.index] == "device"}


@pytest.mark.parametrize(("mixture", "clipping"), by_turns(list(MIXTURES)[:4], [0.0, 0.5]))
def test_under_random_delays(mixture: str, clipping: float, swap_path: Any) -> None:
    own = {"debug_delay_seed": 1, "debug_poison": True}
    engine = split(swap_path, mixture, "nvme", clipping=clipping, runtime=own)
    assert_same_bits(reference("adamw", 1, clipping), follow(lambda trainer: train(trainer, data, 4), engine))


def test_the_delayed_update_is_the_same_on_host_and_nvme_together(swap_path: Any) -> None:
    own = {"update": "delayed", "delay_start_step": 2}
    whole = tiered(build(), swap_path, ("cpu", "cpu"), OPTIMIZERS["adamw"], runtime=own)
    expected = follow(lambda trainer: train(trainer, data, 5), whole)
    engine = split(swap_path, "host+nvme", runtime=own)
    assert tiers_used(engine) == {"host", "nvme"}
    assert_same_bits(expected, follow(lambda trainer: train(trainer, data, 5), engine))


def test_a_setting_that_moves_nothing_is_said(swap_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with split(swap_path, "device+host", zero={"sub_group_size": 1 << 22}) as engine:
        assert tiers_used(engine) == {"device", "host"}, "the embedding is a sub-group of its own"
        assert not caplog.records
    offload = {"device": "cpu", "ratio": 0.99}
    with tiered(
        build(), swap_path, ("cpu", "cpu"), zero={"offload_optimizer": offload, "sub_group_size": 1 << 22}
    ) as engine:
        assert tiers_used(engine) == {"host"}
    assert [r.getMessage() for r in caplog.records if "offload_optimizer.ratio: no sub-group" in r.getMessage()]


@pytest.mark.parametrize("mixture", ["device+host", "device+nvme", "device+host+nvme"])
def test_the_delayed_update_refuses_state_on_the_device(mixture: str, swap_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"delayed needs the whole optimizer off the device.*found .*(ratio|limits)"):
        split(swap_path, mixture, runtime={"update": "delayed"})
    assert not any(swap_path.iterdir())


@pytest.mark.parametrize(
    ("mixture", "state_format"),
    [
        ("device+nvme", "bf16_remainder"),
        ("host+nvme", "bf16_remainder"),
        ("device+nvme", "lossy_8bit_moments"),
        ("host+nvme", "lossy_bf16_moments"),
    ],
)
def test_a_state_format_has_its_bits_on_any_mixture(mixture: str, state_format: str, swap_path: Any) -> None:
    top = {"bf16": {"enabled": True}}
    own = {"state_format": state_format}
    if state_format == "bf16_remainder" and "device" in mixture:
        with pytest.raises(ConfigError, match="expected parameters where the update can read them"):
            split(swap_path, mixture, runtime=own, **top)
        return
    whole = tiered(build(), swap_path, ("cpu", "cpu"), OPTIMIZERS["adamw"], runtime=own, **top)
    expected = follow(lambda trainer: train(trainer, data, 4), whole)
    engine = split(swap_path, mixture, runtime=own, **top)
    assert_same_bits(expected, follow(lambda trainer: train(trainer, data, 4), engine))
