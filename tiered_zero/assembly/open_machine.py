"""Open the swap directories, the device and the tiers of a run, and reserve the slots of its parameters and state."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from tiered_zero.assembly.spec import RunSpec
from tiered_zero.checkpoint.checkpoints import find_together
from tiered_zero.checkpoint.in_place import Adoption, adopt
from tiered_zero.checkpoint.tag import FoundCheckpoint, find_checkpoint, nothing_to_load
from tiered_zero.concurrency.interrupts import Teardown
from tiered_zero.config.schema import Config
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.hardware.ranks.launcher import launch_name, local_rank, num_restarts
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.io.select import preflight_directory
from tiered_zero.plan.placement import BUFFERS
from tiered_zero.plan.planner import Plan
from tiered_zero.record.directory import clear_restarted, leftover_notices, make_missing
from tiered_zero.rules.rule import UpdateRule
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.telemetry.spans import Ledger
from tiered_zero.tiers.rack import AdoptedStore, TierRack
from tiered_zero.tiers.tier import Home, Inventory
from tiered_zero.unit.weights import WeightFiles

SHUTDOWN = (
    "optimizer",  # give the user's own optimizer its calls and its state back
    "saves",  # finish the running save, which needs the whole last update
    "open update",  # cancel an update that began in backward and has no step()
    "last update",  # finish the update of the last step
    "observers",  # complete the run's record
    "monitors",
    "lanes",  # end the threads before the memory that they use is freed
    "prefetch",  # drop state that was read ahead
    "hooks",
    "gradients",
    "activations",
    "pager",  # give parameters on the device memory of their own
    "tiers",
    "rule",
    "ranks",  # wait for the other ranks, seconds at most
)
"""The order in which the parts of a run are closed, also after a failed start."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Where a run gets its first values: a checkpoint (`found`), files (`weights`), or the model itself (both None).
    `adoption`: the in-place commit whose swap files this run takes over; None: the run makes new ones. `warnings`:
    lines for the log."""

    found: FoundCheckpoint | None
    adoption: Adoption | None
    weights: WeightFiles | None
    warnings: Sequence[str]

    @property
    def directories(self) -> Mapping[tuple[str, ...], AdoptedStore]:
        """The swap paths of each store, as in the config -> the committed state that the run opens there. Empty if
        `adoption` is None."""
        return {} if self.adoption is None else self.adoption.directories


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenMachine:
    """The device, tiers and homes of a run. `copy_homes`: unit index -> home of its copy for in-place commits."""

    runtime: Runtime
    tiers: TierRack
    inventory: Inventory
    copy_homes: dict[int, Home] = field(repr=False)


def find_source(run_spec: RunSpec, collectives: Collectives) -> Source:
    """Find where a run gets its first values. Make and check the swap directories, and check that the weight files fit
    the model. Every rank calls this."""
    config, keys = run_spec.config, nvme_paths(run_spec.config)
    warnings = check_directories(keys)
    resume = config.tiered_zero.checkpoint.resume
    found = None if resume is None else find_together(collectives, resume, partial(_find, resume, warnings))
    adoption = None if found is None else adopt(found, collectives, config, run_spec.plan, run_spec.layouts)
    warnings += clear_directories(keys, () if adoption is None else adoption.paths)
    weights = WeightFiles(config.tiered_zero.weights) if config.tiered_zero.weights else None
    if weights is not None:
        warnings += weights.check(run_spec.model, run_spec.specs)
    return Source(found=found, adoption=adoption, weights=weights, warnings=warnings)


def _find(resume: str, warnings: list[str]) -> FoundCheckpoint | None:
    """Find the checkpoint to resume. If the directory `resume` is empty, or its first save was not completed, add a
    line to `warnings` and return None. Raises StoreError."""
    if why := nothing_to_load(resume, resumes=True):
        warnings.append(f"no checkpoint in {resume} is resumed: {why}. The run begins at step 0")
        return None
    return find_checkpoint(resume)


def check_directories(keys: Mapping[tuple[str, ...], str]) -> list[str]:
    """Make the swap directories of each store that has no directory yet. Return warnings about the file systems of all
    directories. `keys`: the directories of one store -> the config key that names them. Raises ConfigError if a
    directory cannot be used."""
    make_missing(keys)
    by_path = {path: key for paths, key in keys.items() for path in paths}
    return [line for path, key in sorted(by_path.items()) for line in preflight_directory(path, key)]


def clear_directories(keys: Mapping[tuple[str, ...], str], adopted: Container[Path] = ()) -> list[str]:
    """Remove the run directories that earlier processes of a restarted launch left without a commit. Return a line for
    each swap path that still holds files of ended runs; those in `adopted` do not count. `keys`: the swap paths of one
    store -> the config key that names them."""
    paths = [path for group in keys for path in group]
    if num_restarts() and local_rank() == 0:
        clear_restarted(paths, launch_name())
    return leftover_notices(paths, adopted)


def open_runtime(
    plan: Plan, rule: UpdateRule, accelerator: Accelerator, collectives: Collectives, resources: Teardown
) -> Runtime:
    """Connect the ranks to the device, and return the run's runtime. `resources`: gets the functions that close device,
    rule and ranks."""
    resources.add("lanes", accelerator.close)
    resources.add("ranks", collectives.close)
    collectives.connect_device(accelerator)
    resources.add("rule", rule.close)
    torch.ones(1).sqrt()  # MKL's first square root is not safe among threads (pytorch#188792): take it alone
    ledger = Ledger({tier: limit for tier, (limit, _) in plan.limits.items()})
    return Runtime(accelerator=accelerator, ledger=ledger, recorder=collectives.recorder, collectives=collectives)


def open_machine(
    config: Config,
    plan: Plan,
    runtime: Runtime,
    layouts: Sequence[StateLayout],
    resources: Teardown,
    *,
    model_name: str,
    adopted: Mapping[tuple[str, ...], AdoptedStore] = MappingProxyType({}),
) -> OpenMachine:
    """Allocate the host memory and files of the plan, and reserve its slots. `layouts`: the layouts of state, by the
    `index` of the planned slots of state. `resources`: gets the functions that free memory and files. `model_name`: is
    written to the owner file. `adopted`: swap paths -> the committed state to resume."""
    tiers = TierRack(config, plan, runtime, resources, model_name=model_name, adopted=adopted)
    inventory = Inventory()
    copy_homes: dict[int, Home] = {}
    units = [placed.unit for placed in plan.tiers.units]
    for slot in plan.slots:
        of_param = slot.kind in ("param", "param_back")
        tier = tiers.tier(slot.tier, "param" if of_param else "state")
        is_shard = plan.request.shards_params and slot.kind != "state" and slot.index != BUFFERS
        start = units[slot.index].shard(plan.request.rank).start if is_shard else 0
        home = Home(tier, tier.reserve(slot.name, slot.nbytes, slot.kind, num_durable=slot.num_durable), start)
        if slot.kind == "commit_copy":
            copy_homes[slot.index] = home
        elif of_param:
            inventory.place(units[slot.index], slot.kind, home)
        else:
            inventory.place(layouts[slot.index].subgroup, slot.kind, home)
    return OpenMachine(runtime=runtime, tiers=tiers, inventory=inventory, copy_homes=copy_homes)


def nvme_paths(config: Config) -> dict[tuple[str, ...], str]:
    """Return a dict: swap paths (of activations, state or parameters on NVMe) -> the config key that names the
    paths."""
    zero = config.zero_optimization
    sections = {
        "tiered_zero.activations": config.tiered_zero.activations,
        "zero_optimization.offload_optimizer": zero.offload_optimizer,
        "zero_optimization.offload_param": zero.offload_param,
    }
    return {part.nvme_paths: f"{name}.nvme_path" for name, part in sections.items() if part.device == "nvme"}
