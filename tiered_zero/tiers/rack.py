"""Open the tiers of one run: swap files, host memory, device memory, and staging buffers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from tiered_zero.concurrency.interrupts import Teardown
from tiered_zero.config.schema import Config
from tiered_zero.errors import StoreError
from tiered_zero.hardware.memory.host_memory import HostArena, StagingPool
from tiered_zero.hardware.ranks.launcher import launch_name
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.io.engine import IOEngine, IOSettings, watch
from tiered_zero.io.select import select_engine, weigh_directories
from tiered_zero.plan.planner import Plan
from tiered_zero.plan.staging import StagingSize
from tiered_zero.record.directory import SwapDir
from tiered_zero.record.store import SwapStore
from tiered_zero.tiers.nvme import NvmeTier
from tiered_zero.tiers.tier import DeviceTier, HostTier, Tier

logger = logging.getLogger("tiered_zero")


@final
@dataclass(frozen=True, kw_only=True)
class AdoptedStore:
    """A committed state from which a run resumes. `metadata`: the commit's values that are not in records."""

    directory: Path
    step: int
    metadata: Mapping[str, Any]


@final
class TierRack:
    """Allocates the memory and swap files of every tier, and the staging buffers. Used on the driver thread.

    All are closed when `resources` closes its group "tiers". Swap directories without a commit are then removed."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        runtime: Runtime,
        resources: Teardown,
        *,
        model_name: str = "",
        adopted: Mapping[tuple[str, ...], AdoptedStore] | None = None,
    ) -> None:
        """Open all tiers. `model_name`: a text for `owner.json` in each swap directory. `adopted`: swap paths -> the
        committed state there, from which the run resumes. Raises ConfigError, StoreError and BudgetError."""
        zero, accelerator = config.zero_optimization, runtime.accelerator
        self._config, self._runtime, self._resources, self._model_name = config, runtime, resources, model_name
        self._pools: list[StagingPool] = []
        stores = {
            paths: self._open_store(paths, nbytes, (adopted or {}).get(paths))
            for paths, nbytes in nvme_needs(config, plan).items()
        }
        # Stores of their own: a failure there does not affect parameters and state.
        scratch = {
            kind: self._open_store(paths, nbytes, None) for kind, (paths, nbytes) in scratch_needs(config, plan).items()
        }
        pin = zero.offload_param.pin_memory or zero.offload_optimizer.pin_memory
        self.arena = HostArena(plan.nbytes("host"), accelerator, pin and accelerator.pins, runtime.ledger)
        resources.add("tiers", self.arena.close)
        self.param_staging = self._open_pool(plan.staging.params, "staging_param")
        self.state_staging = self._open_pool(plan.staging.state, "staging_state")
        self.gradient_staging = self._open_pool(plan.staging.gradients, "staging_gradient")
        self.gradient_windows = self._open_pool(plan.staging.gradient_windows, "gradient_window")
        size = plan.activations.staging if plan.activations is not None else StagingSize()
        self.activation_staging = self._open_pool(size, "staging_activation")
        self.host = HostTier(self.arena, runtime)
        self.device = DeviceTier(accelerator, runtime.ledger)
        resources.add("tiers", self.device.close)
        staging = self.param_staging or self.state_staging
        by_paths = {paths: NvmeTier(store, staging, runtime) for paths, store in stores.items() if staging is not None}
        self.nvme: dict[str, NvmeTier] = {}
        """Kind of bytes ("param", "state", "gradient", "activation") -> the nvme tier that holds them. Kinds without
        bytes on nvme are left out."""
        for kind, own in (("param", zero.offload_param.nvme_paths), ("state", zero.offload_optimizer.nvme_paths)):
            if own in by_paths:
                self.nvme[kind] = by_paths[own]
        for kind, pool in (("gradient", self.gradient_windows), ("activation", self.activation_staging)):
            if kind in scratch and pool is not None:
                self.nvme[kind] = NvmeTier(scratch[kind], pool, runtime)
        for tier in self.nvme.values():
            resources.add("tiers", tier.close)

    def drain(self) -> None:
        """Wait for all requests to the disks. The lanes must be idle."""
        for tier in self.nvme.values():
            tier.drain()

    def reclaim(self) -> None:
        """Release every staging buffer that is still leased. Called after a failure, once nothing uses the buffers."""
        for pool in self._pools:
            pool.reclaim()

    def tier(self, name: str, kind: str) -> Tier:
        """Return the tier called `name`. `kind`: the kind of bytes, such as "param"; selects one of the tiers in
        `nvme`."""
        in_memory: dict[str, Tier] = {"device": self.device, "host": self.host}
        return in_memory.get(name) or self.nvme[kind]

    def _open_pool(self, size: StagingSize, kind: str) -> StagingPool | None:
        if not size.nbytes:
            return None
        pool = StagingPool(self.arena, size.nbytes, size.count, kind, self._runtime.recorder)
        self._resources.add("tiers", pool.close)
        self._pools.append(pool)
        return pool

    def _open_store(self, paths: tuple[str, ...], nbytes: int, adopted: AdoptedStore | None) -> SwapStore:
        checksums, recorder = self._config.tiered_zero.checksums, self._runtime.recorder
        if adopted is None:
            directory = SwapDir.create([*map(Path, paths)], model=self._model_name, owner_note=launch_name())
        else:
            directory = SwapDir.open(adopted.directory)
        self._resources.add("tiers", directory.release)
        engine = self._open_engine(directory)
        if adopted is None:
            weights = _weigh(directory.paths, engine, nbytes)
            store = SwapStore(
                directory, engine, capacity_nbytes=nbytes, checksums=checksums, weights=weights, recorder=recorder
            )
        else:
            step, metadata = adopted.step, adopted.metadata
            store = SwapStore.recover(
                directory, engine, step=step, metadata=metadata, checksums=checksums, recorder=recorder
            )
        self._resources.add("tiers", lambda: store.close(remove=False))
        return store

    def _open_engine(self, directory: SwapDir) -> IOEngine:
        aio, settings = self._config.aio, self._config.tiered_zero
        selection = select_engine(
            *directory.paths,
            prefer=settings.io_engine,
            settings=IOSettings(
                block_size=aio.block_size, queue_depth=aio.queue_depth, intra_op_parallelism=aio.intra_op_parallelism
            ),
            io_timeout_s=settings.io_timeout_s,
        )
        self._resources.add("tiers", selection.engine.close)
        watch(selection.engine)
        for reason in selection.reasons:
            logger.info("%s", reason)
        return selection.engine


def scratch_needs(config: Config, plan: Plan) -> dict[str, tuple[tuple[str, ...], int]]:
    """Return a dict: kind ("gradient", "activation") -> (swap directories, bytes that the plan puts there). Kinds
    without bytes on nvme are left out. No commit includes these bytes."""
    paths = {
        "gradient": config.zero_optimization.offload_optimizer.nvme_paths,
        "activation": config.tiered_zero.activations.nvme_paths,
    }
    return {kind: (own, nbytes) for kind, own in paths.items() if (nbytes := plan.nbytes("nvme", kind))}


def nvme_needs(config: Config, plan: Plan) -> dict[tuple[str, ...], int]:
    """Return a dict: swap directories -> the bytes of parameters and state that the plan puts there."""
    zero = config.zero_optimization
    needs: dict[tuple[str, ...], int] = {}
    param, state = zero.offload_param.nvme_paths, zero.offload_optimizer.nvme_paths
    in_params, in_state = ("param", "param_back", "commit_param"), ("state", "commit", "commit_copy")
    for paths, kind in [*((param, kind) for kind in in_params), *((state, kind) for kind in in_state)]:
        if nbytes := plan.nbytes("nvme", kind):
            needs[paths] = needs.get(paths, 0) + nbytes
    return needs


def on_one_drive(paths: Sequence[Path]) -> bool:
    return len({path.stat().st_dev for path in paths}) == 1


def _weigh(paths: Sequence[Path], engine: IOEngine, nbytes: int) -> list[float]:
    """Return a weight for each directory, for striping data over them. The weight is the directory's share of the total
    speed (equal shares if speeds are close), or 1 if all are on one drive. `nbytes`: the size of the data. Raises
    StoreError."""
    if on_one_drive(paths):
        return [1.0] * len(paths)
    try:
        weights = weigh_directories(engine, paths, nbytes)
    except OSError as error:
        raise StoreError(f"The speed of the swap directories cannot be measured: {error}. Name other ones.") from error
    shares = ", ".join(f"{weight:.0%} in {path.parent}" for path, weight in zip(paths, weights, strict=True))
    logger.info("swap data is striped by measured speed: %s", shares)
    return weights
