"""Where the CPU is the device, tiers in host memory are the device's own: what runs, what is said, what is counted."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch

import tiered_zero
from tests.support.configs import ADAMW, SMALL_DEVICE, config_of, zero_section
from tests.support.models import rows, two_layers
from tests.support.trainers import assert_same_bits, follow
from tiered_zero.assembly.run_spec import specify_run
from tiered_zero.config.load import load
from tiered_zero.plan.host_device import resolve_host_tiers
from tiered_zero.sizes import MIB

CPU: dict[str, Any] = {"device": "cpu", "device_memory_limit": None}


def config(param: str = "cpu", state: str = "cpu", optimizer: dict[str, Any] | None = None, **runtime: Any) -> Any:
    section = zero_section(param, state, "swap")
    section["offload_optimizer"].update(optimizer or {})
    return config_of(section, optimizer=ADAMW, tiered_zero={**CPU, **runtime})


def runs(
    *asked: Any, shares_cores: bool = True, world_size: int = 1, limits: Any = None, **more: Any
) -> tuple[str, str]:
    zero = resolve_host_tiers(
        load(config(*asked, **more)), limits or {}, shares_cores=shares_cores, world_size=world_size
    ).zero_optimization
    return zero.offload_param.device, zero.offload_optimizer.device


def test_what_would_be_copied_within_host_memory_rests_where_it_is_used() -> None:
    found = {asked: runs(*asked) for asked in itertools.product(("none", "cpu", "nvme"), repeat=2)}
    assert {asked: to for asked, to in found.items() if to != asked} == {
        ("none", "cpu"): ("none", "none"),
        ("cpu", "none"): ("none", "none"),
        ("cpu", "cpu"): ("none", "none"),
        ("cpu", "nvme"): ("none", "nvme"),
    }


@pytest.mark.parametrize(
    "reason",
    [{"shares_cores": False}, {"world_size": 2}, {"limits": {"device": (MIB, "--device-memory")}}],
    ids=["a GPU", "ranks", "a limit"],
)
def test_tiers_are_kept_on_another_device(reason) -> None:
    assert runs("cpu", "cpu", **reason) == ("cpu", "cpu")


@pytest.mark.parametrize(
    "reason",
    [
        {"update": "overlapped"},
        {"update": "delayed"},
        {"optimizer": {"ratio": 0.5}},
        {"state_limits": {"device": MIB}},
    ],
    ids=["overlapped", "delayed", "ratio", "limits"],
)
def test_state_is_kept_where_more_was_asked_of_it(reason) -> None:
    assert runs("cpu", "cpu", **reason) == ("none", "cpu")


def test_both_halves_of_a_master_rest_together() -> None:
    assert runs("cpu", "cpu", state_format="bf16_remainder") == ("none", "none")
    assert runs("cpu", "cpu", state_format="bf16_remainder", update="overlapped") == ("cpu", "cpu")


def train(engine: tiered_zero.Engine) -> list[torch.Tensor]:
    seen = []
    for number in range(4):
        loss = engine(rows(number)).square().mean()
        engine.backward(loss)
        engine.step()
        seen.append(loss.detach())
    return seen


def test_the_run_says_and_counts_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tiered_zero")
    records = {}
    for name, runtime in {"resident": CPU, "paged": {**CPU, **SMALL_DEVICE}}.items():
        caplog.clear()
        given = config(**runtime)
        engine = tiered_zero.initialize(model=two_layers(), config=given)[0]
        said = [record.getMessage() for record in caplog.records if "host memory is its own" in record.getMessage()]
        kinds = {(row.tier, row.kind) for row in engine.plan.rows}
        assert len(said) == (name == "resident")
        assert (("device", "state") in kinds) == (("device", "param") in kinds) == (name == "resident")
        assert (("host", "param") in kinds) == (("device", "param_window") in kinds) == (name == "paged")
        records[name] = follow(train, engine)
    assert_same_bits(records["paged"], records["resident"])
    with pytest.raises(
        tiered_zero.PlanError, match=r"of host memory; 1\.0 KiB is allowed .*\. Largest: master weights"
    ):
        tiered_zero.initialize(model=two_layers(), config=config(host_memory_limit=1024))


@pytest.mark.parametrize("runtime", [CPU, {**CPU, **SMALL_DEVICE}, {**CPU, "debug_delay_seed": 1}], ids=str)
def test_paged_parameters_in_use_are_of_host_memory(runtime: dict[str, Any]) -> None:
    """Where the CPU is the device, and no other one is asked for: so a plan for a budget holds for the process."""
    given = config("nvme", "nvme")
    given["tiered_zero"] = dict(runtime)
    plan = specify_run(load(given), two_layers()).plan
    in_use = sum(row.nbytes for row in plan.rows if row.kind in ("param_window", "gradient_in_flight"))
    assert 0 < in_use == plan.nbytes("device")
    is_host = runtime == CPU
    assert plan.needed_nbytes("host") == plan.nbytes("host") + (in_use if is_host else 0)
    assert (", in host memory" in plan.text) == is_host
