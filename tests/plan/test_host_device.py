"""Where the CPU is the device, tiers in host memory are the device's own: what runs, what is said, what is counted."""

from __future__ import annotations

import itertools
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered_zero
from tests.support.configs import ADAMW, SMALL_DEVICE, config_of, zero_section
from tests.support.inspection.insides import specify_run
from tests.support.models import ParityGPT, batch, rows, two_layers
from tests.support.trainers import Plain, assert_same_bits, follow, tiered
from tests.support.trainers import train as train_gpt
from tiered_zero.config.load import load
from tiered_zero.errors import PlanError
from tiered_zero.plan.request import resolve_host_tiers
from tiered_zero.sizes import MIB, parse_nbytes

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
    """Where the CPU is the device, whatever its limit: so a plan for a budget holds for the process."""
    given = config("nvme", "nvme")
    given["tiered_zero"] = dict(runtime)
    plan = specify_run(load(given), two_layers()).plan
    in_use = sum(row.nbytes for row in plan.rows if row.kind in ("param_window", "gradient_in_flight"))
    assert 0 < in_use == plan.nbytes("device")
    is_host = "debug_delay_seed" not in runtime
    assert plan.needed_nbytes("host") == plan.nbytes("host") + (in_use if is_host else 0)
    assert (", in host memory" in plan.text) == is_host


def gpt() -> ParityGPT:
    torch.manual_seed(0)
    return ParityGPT(6)


def paged_gpt(path: Path, limit: int | str | None) -> tiered_zero.Engine:
    """Everything on nvme, sub-groups of the size that the planner chooses."""
    runtime = {**CPU, "host_memory_limit": limit}
    return tiered(gpt(), path, zero={"sub_group_size": None}, runtime=runtime)


def test_a_plan_shrinks_to_the_limit_of_host_memory_and_names_the_smallest_that_does(tmp_path: Path) -> None:
    """First the window, then sub-groups; the bits are those of plain PyTorch down to the limit that a refusal names."""
    with paged_gpt(tmp_path, None) as engine:
        free = engine.plan
    script = partial(train_gpt, data=batch)
    expected = follow(script, Plain(gpt()))
    with pytest.raises(PlanError, match=r"Largest: parameter staging buffers 4\.0 MiB; ") as refused:
        paged_gpt(tmp_path, MIB)
    named = re.search(r"raise tiered_zero.host_memory_limit to at least (\S+ \S+)\.", str(refused.value))
    assert named is not None
    small_window = free.needed_nbytes("host") - 8192
    for limit in (small_window, parse_nbytes(named[1])):
        engine = paged_gpt(tmp_path, limit)
        assert engine.plan.needed_nbytes("host") <= limit < free.needed_nbytes("host")
        assert engine.plan.pager_limits.live_nbytes < free.pager_limits.live_nbytes
        is_cut = engine.plan.nbytes("host", "staging_state") < free.nbytes("host", "staging_state")
        assert is_cut == (limit < small_window), "sub-groups are cut smaller only where the window does not suffice"
        assert_same_bits(expected, follow(script, engine))


def test_a_refusal_names_both_limits_of_a_cpu() -> None:
    """What the device holds counts against its own limit and against that of the host."""
    both = {"device_memory_limit": 64 * MIB, "host_memory_limit": 64 * MIB}
    given = config("nvme", "nvme", **both)
    plan = specify_run(load(given), gpt()).plan
    in_use = plan.nbytes("device")
    assert in_use > 0 and plan.needed_nbytes("host") == plan.nbytes("host") + in_use
    given = config("nvme", "nvme", **{**both, "host_memory_limit": plan.nbytes("host") // 2})
    short = specify_run(load(given), gpt()).plan
    assert short.nbytes("device") < in_use, "the window shrinks to the smaller room"
    with pytest.raises(
        PlanError, match=r"KiB under tiered_zero\.device_memory_limit; .*tiered_zero\.host_memory_limit"
    ):
        short.check()


def test_the_smallest_limit_of_a_refusal_is_the_smallest() -> None:
    def plan_of(**limit: int) -> Any:
        given = config("nvme", "nvme", **limit)
        return specify_run(load(given), gpt()).plan

    least = plan_of(host_memory_limit=1).needed_nbytes("host")
    plan_of(host_memory_limit=least).check()
    with pytest.raises(PlanError):
        plan_of(host_memory_limit=least - 1).check()
