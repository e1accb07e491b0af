"""What `tiered_zero.placement: "auto"` chooses: of settings that change no numbers, the fastest that fit."""

from __future__ import annotations

import itertools
import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.inspection.insides import PlannedMachine, specify_run
from tests.support.plan_requests import gradient_tiers, param_tiers
from tiered_zero.assembly.choice import SAME_SHARE, estimate_of, make_predictor
from tiered_zero.cli.plan import specify_planned
from tiered_zero.config.load import load
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.errors import ConfigError, PlanError
from tiered_zero.native.update import available_cpus
from tiered_zero.plan.gpt_shape import GPTConfig
from tiered_zero.plan.machine import Disk, Machine
from tiered_zero.sizes import GIB, MIB, TIERS

MODEL = GPTConfig(layers=8, hidden=512, context=128, vocab=8192)
"""29 million parameters: 59 MB in bf16, 353 MB of state."""

CHANGE_NO_NUMBERS = {
    "zero_optimization.stage",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_param.max_in_cpu",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.sub_group_size",
    "tiered_zero.state_limits.device",
    "tiered_zero.state_limits.host",
    "tiered_zero.gradients",
    "tiered_zero.activations.device",
    "tiered_zero.activations.limit",
    "tiered_zero.activations.nvme_path",
    "tiered_zero.update",
}


def rates() -> Machine:
    disk = Disk(path="disk", nbytes=GIB, read_bytes_per_s=7e9, write_bytes_per_s=5e9)
    speeds = {"copy_bytes_per_s": 100e9, "update_bytes_per_s": 80e9}
    link = {"to_device_bytes_per_s": 25e9, "from_device_bytes_per_s": 25e9}
    return Machine(name="test", device="cuda", flops_per_s={"bf16": 1e14}, disks=(disk,), **speeds, **link)


def specified(
    device: int, host: int, zero: dict[str, Any] | None = None, machine: Machine | None = None, **own: Any
) -> Any:
    """The run of `auto` with so many MiB of memory. `zero`, `own`: keys that the user writes."""
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": zero or {"offload_optimizer": {"nvme_path": "/swap"}},
        "tiered_zero": {"placement": "auto", **own},
    }
    sizes = PlannedMachine(device_nbytes=device * MIB, host_nbytes=host * MIB)
    return specify_run(load(config), build_gpt(MODEL), machine=sizes, rates=machine or rates())


def tiers_of(run: Any, kind: str) -> set[str]:
    return {tier for tier in TIERS if run.plan.nbytes(tier, kind)}


@pytest.mark.parametrize(
    ("device", "host", "params", "state"),
    [
        (2048, 2048, {"device"}, {"device"}),
        (330, 2048, {"device"}, {"device", "host"}),
        (140, 400, {"device"}, {"host", "nvme"}),
        (60, 150, {"host"}, {"host", "nvme"}),
    ],
)
def test_faster_tiers_are_filled_first(device: int, host: int, params: set[str], state: set[str]) -> None:
    run = specified(device, host)
    assert (tiers_of(run, "param"), tiers_of(run, "state")) == (params, state)
    run.plan.check()


def test_the_best_are_shown_with_seconds_bytes_and_wear_and_the_first_runs() -> None:
    run = specified(140, 400)
    shown = run.choice.candidates[:3]
    same_s = SAME_SHARE * min(each.step.seconds for each in run.choice.candidates)
    seconds = [max(each.step.seconds, same_s) for each in run.choice.candidates]
    assert seconds == sorted(seconds) and seconds[0] == same_s
    assert run.plan.rows == shown[0].plan.rows and run.config == shown[0].config
    head, *lines = run.choice.lines
    assert f"{len(run.choice.candidates)} that fit" in head and len(lines) == 3
    for line in lines:
        for part in (
            " s a step, ",
            " s of them ",
            "parameters on ",
            "state on ",
            "host ",
            "nvme ",
            " written to disks",
        ):
            assert part in line


def test_the_chosen_config_says_all_of_it() -> None:
    run = specified(140, 400, sequence_length=64)
    values = json.loads(run.choice.config_text)
    assert "placement" not in values["tiered_zero"]
    machine = PlannedMachine(device_nbytes=140 * MIB, host_nbytes=400 * MIB)
    again = specify_run(load(values), build_gpt(MODEL), machine=machine)
    assert again.choice is None and again.plan.rows == run.plan.rows and again.plan.tiers.state == run.plan.tiers.state
    assert param_tiers(again.plan) == param_tiers(run.plan) and gradient_tiers(again.plan) == gradient_tiers(run.plan)


def test_only_settings_that_change_no_numbers_are_tried() -> None:
    for run in (specified(140, 400), specified(40, 250), specified(4096, 4096)):
        for candidate in run.choice.candidates:
            assert set(candidate.settings) <= CHANGE_NO_NUMBERS
            assert candidate.config.tiered_zero.update in ("auto", "barrier", "overlapped")


def test_what_the_config_says_stays() -> None:
    run = specified(140, 2048, {"offload_optimizer": {"device": "cpu", "nvme_path": "/swap"}}, update="barrier")
    assert all("nvme" not in tiers_of(each, "state") for each in run.choice.candidates)
    assert {each.plan.update_policy.policy for each in run.choice.candidates} == {"barrier"}
    run = specified(330, 2048, {"stage": 2, "offload_optimizer": {"nvme_path": "/swap"}})
    assert tiers_of(run, "param") == {"device"}


def test_memory_for_activations_is_left() -> None:
    """Longer samples, of a machine that has no other limit, take room from parameters and state."""
    short, long = (specified(400, 2048, sequence_length=length).plan for length in (16, 128))
    assert long.needed_nbytes("device") + 5 * MIB < short.needed_nbytes("device") <= 350 * MIB


def test_all_candidates_leave_room_for_activations_and_fit_the_disk() -> None:
    """Variants of the update are held to the fit of the others, and the disk to what is left when memory is full."""
    for device in (360, 160):
        run = specified(device, 400, sequence_length=128)
        estimate = estimate_of(run.model, run.config, 128)
        for each in run.choice.candidates:
            needed = estimate.needed_nbytes(each.plan.activations) + each.plan.needed_nbytes("device")
            assert needed <= device * MIB, each.text
    needed = run.plan.nbytes("nvme")
    fits = replace(rates(), disks=(replace(rates().disks[0], nbytes=needed),))
    assert specified(160, 400, machine=fits, sequence_length=128).plan.nbytes("nvme") == needed
    short = replace(rates(), disks=(replace(rates().disks[0], nbytes=needed // 2),))
    with pytest.raises(PlanError, match=r"No placement fits: .* there; .* are free(.|\n)*  nvme: "):
        specified(160, 400, machine=short, sequence_length=128)


def test_what_cannot_be_chosen_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is allowed"):
        specified(20, 20)
    with pytest.raises(PlanError, match="name a directory in zero_optimization"):
        specified(20, 20, {"stage": 3})
    config = load({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "tiered_zero": {"placement": "auto"}})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="doctor DIR --measure"):
        specify_run(config, build_gpt(MODEL))
    with pytest.raises(ConfigError, match="expected as_written with 2 ranks"):
        specify_planned(config, build_gpt(MODEL), ranks=2)


def test_a_disk_for_activations_alone_is_predicted_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run's report predicts every step: without the disk's rates no engine could start."""
    model = build_gpt(GPTConfig(layers=2, hidden=512, context=1024, vocab=256))
    activations = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = load(
        {
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW"},
            "tiered_zero": {"device": "cpu", "activations": activations},
        }
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "tiered_zero"
    disk = replace(rates().disks[0], path=str(tmp_path))
    here = replace(rates(), name=platform.node(), num_cores=available_cpus(), flops_per_s={"fp32": 1e12}, disks=(disk,))
    here.save(folder / "machine.json")
    plan = specify_run(config, model).plan
    assert make_predictor(config, model)(plan).by_resource["disk write"] > 0
    replace(here, disks=()).save(folder / "machine.json")
    with pytest.raises(ConfigError, match=r"No seconds are predicted; .*: disks"):
        make_predictor(config, model)(plan)


@pytest.mark.parametrize("activations", [None, "cpu", "nvme"])
@pytest.mark.parametrize("state", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("params", ["none", "cpu", "nvme"])
def test_every_placement_is_predicted(params: str, state: str, activations: str | None) -> None:
    """A run with a report starts only if its step can be predicted."""
    model, nvme_path = build_gpt(MODEL), "/swap"
    updates = ("barrier", "overlapped") if state == "none" else ("barrier", "overlapped", "delayed")
    for update, accumulation, clip in itertools.product(updates, (1, 4), (0.0, 1.0)):
        own: dict[str, Any] = {"update": update}
        if activations is not None:
            own["activations"] = {"device": activations, "nvme_path": nvme_path, "limit": 64 * MIB}
        config = load(
            {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": accumulation,
                "gradient_clipping": clip,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW"},
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": params, "nvme_path": nvme_path},
                    "offload_optimizer": {"device": state, "nvme_path": nvme_path},
                },
                "tiered_zero": own,
            }
        )
        sizes = PlannedMachine(device_nbytes=2 * GIB, host_nbytes=4 * GIB)
        plan = specify_run(config, model, machine=sizes).plan
        step = make_predictor(config, model, rates())(plan)
        busiest_s, all_s = max(step.by_resource.values()), sum(step.by_resource.values())
        assert 0 < busiest_s <= step.seconds * 1.001 and step.seconds <= all_s * 1.001, own
