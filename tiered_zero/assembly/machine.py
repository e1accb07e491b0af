"""Open what a run works on: device and lanes, tiers with their files and staging buffers, the slots of all bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from tiered_zero.assembly.disk_space import check_disk_space
from tiered_zero.assembly.homes import place_homes
from tiered_zero.assembly.run_spec import RunSpec
from tiered_zero.checkpoint.in_place import Adoption, adopt
from tiered_zero.checkpoint.ranks import find_together
from tiered_zero.checkpoint.tag import FoundCheckpoint, find_checkpoint, is_unused, nothing_to_load
from tiered_zero.concurrency.teardown import Teardown
from tiered_zero.config.schema import Config
from tiered_zero.hardware.device.select import build_accelerator
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.hardware.ranks.launcher import launch_name, local_rank, num_restarts
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.io.preflight import preflight_directory
from tiered_zero.params.materialize import WeightFiles
from tiered_zero.store.runs import clear_restarted, leftover_notices
from tiered_zero.telemetry.ledger import Ledger
from tiered_zero.tiers.inventory import Home, Inventory
from tiered_zero.tiers.rack import AdoptedStore, TierRack, nvme_needs, scratch_needs


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Where the first values come from. `found`: the checkpoint to resume; `adoption`: its swap files, where the run
    goes on in them; `weights`: files of weights; all None where the model has its values. `warnings`: for the log."""

    found: FoundCheckpoint | None
    adoption: Adoption | None
    weights: WeightFiles | None
    warnings: Sequence[str]

    @property
    def directories(self) -> Mapping[tuple[str, ...], AdoptedStore]:
        """Swap directories that are taken over, by the paths that they stripe."""
        return {} if self.adoption is None else self.adoption.directories


@dataclass(frozen=True, kw_only=True, eq=False)
class Machine:
    """`copy_homes`: of durable copies, by the index of their unit."""

    runtime: Runtime
    tiers: TierRack
    inventory: Inventory
    copy_homes: dict[int, Home] = field(repr=False)


def find_source(run_spec: RunSpec, collectives: Collectives) -> Source:
    """Look at disks and files, and refuse what cannot work, before a byte is allocated. Collective."""
    config = run_spec.config
    warnings = [
        line
        for path, key in sorted({path: key for paths, key in nvme_paths(config).items() for path in paths}.items())
        for line in preflight_directory(path, key)
    ]
    resume = config.tiered_zero.checkpoint.resume
    found = None if resume is None else find_together(collectives, resume, partial(_find, resume, warnings))
    adoption = (
        None if found is None else adopt(found, collectives, config, run_spec.plan, run_spec.slots, run_spec.layouts)
    )
    if num_restarts() and local_rank() == 0:
        clear_restarted((path for paths in nvme_paths(config) for path in paths), launch_name())
    if collectives.rank == 0:
        adopted = () if adoption is None else adoption.paths
        warnings += leftover_notices((path for paths in nvme_paths(config) for path in paths), adopted)
    weights = WeightFiles(config.tiered_zero.weights) if config.tiered_zero.weights else None
    if weights is not None:
        warnings += weights.check(run_spec.model, run_spec.specs)
    source = Source(found=found, adoption=adoption, weights=weights, warnings=warnings)
    needs = {
        paths: nbytes for paths, nbytes in nvme_needs(config, run_spec.plan).items() if paths not in source.directories
    }
    for paths, nbytes in scratch_needs(config, run_spec.plan).values():
        needs[paths] = needs.get(paths, 0) + nbytes
    check_disk_space(needs, collectives)
    return source


def _find(resume: str, warnings: list[str]) -> FoundCheckpoint | None:
    """Find the checkpoint to go on from; None, with a warning, where the run before has not completed its first save.
    Raises StoreError."""
    if not is_unused(resume):
        return find_checkpoint(resume)
    warnings.append(f"no checkpoint in {resume} is resumed: {nothing_to_load(resume)}. The run begins at step 0")
    return None


def open_runtime(run_spec: RunSpec, collectives: Collectives, resources: Teardown) -> Runtime:
    """Open the device and start the threads of its lanes."""
    settings = run_spec.config.tiered_zero
    ledger = Ledger({tier: limit for tier, (limit, _) in run_spec.plan.limits.items()})
    accelerator = build_accelerator(settings.device, settings.debug_poison, settings.debug_delay_seed)
    resources.add("lanes", accelerator.close)
    for lane in ("fetch", "reduce", "update", *(["activations"] if run_spec.plan.activations is not None else [])):
        accelerator.lane(lane)  # a thread that cannot be started fails here, not in mid-run
    resources.add("ranks", collectives.close)
    collectives.connect_device(accelerator)
    resources.add("rule", run_spec.rule.close)
    torch.ones(1).sqrt()  # MKL's first square root is not safe among threads (pytorch#188792): take it alone
    return Runtime(accelerator=accelerator, ledger=ledger, recorder=collectives.recorder, collectives=collectives)


def open_machine(run_spec: RunSpec, runtime: Runtime, source: Source, resources: Teardown) -> Machine:
    """Allocate what the plan says of host memory and files, and give every slot its place."""
    acts = Teardown()
    resources.add("tiers", acts.close)
    name = type(run_spec.model).__name__
    tiers = TierRack(run_spec.config, run_spec.plan, runtime, acts, model_name=name, adopted=source.directories)
    inventory, copy_homes = place_homes(run_spec, tiers)
    return Machine(runtime=runtime, tiers=tiers, inventory=inventory, copy_homes=copy_homes)


def nvme_paths(config: Config) -> dict[tuple[str, ...], str]:
    """Map the paths of each tier on NVMe, several of which are striped, to a key of the config that names them."""
    zero = config.zero_optimization
    sections = {
        "tiered_zero.activations": config.tiered_zero.activations,
        "zero_optimization.offload_optimizer": zero.offload_optimizer,
        "zero_optimization.offload_param": zero.offload_param,
    }
    return {part.nvme_paths: f"{name}.nvme_path" for name, part in sections.items() if part.device == "nvme"}
