"""A tier of each kind with what it stands on: late device lanes, an arena, staging buffers, a store on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.fakes.sync_io import SyncEngine
from tests.support.inspection.insides import DeviceTier, HostTier, NvmeTier, SwapDir, SwapStore, Tier
from tiered_zero.hardware.device.accelerator import CpuAccelerator
from tiered_zero.hardware.memory.host_memory import HostArena, StagingPool
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.io.engine import IOEngine
from tiered_zero.sizes import MIB
from tiered_zero.telemetry.spans import Ledger, Recorder

TIERS = ("device", "host", "nvme")


@dataclass(frozen=True)
class Rig:
    """`staging`: what the tier stages through. `buffers`: others, for the callers of a tier."""

    tier: Tier
    runtime: Runtime
    arena: HostArena
    staging: StagingPool
    buffers: StagingPool


def make_runtime(seed: int | None = 1, device_limit: int | None = None) -> Runtime:
    """A poisoned CPU device whose lanes are late; `seed` None: as fast as they are."""
    limits = {} if device_limit is None else {"device": device_limit}
    return Runtime(
        accelerator=CpuAccelerator(poison=True, delay_seed=seed),
        ledger=Ledger(limits),
        recorder=Recorder(keep_spans=True),
        collectives=Collectives(),
    )


@contextmanager
def open_rig(
    name: str,
    swap_path: Path,
    *,
    buffer_nbytes: int = 4096,
    num_buffers: int = 2,
    engine: IOEngine | None = None,
    lease_timeout_s: float = 10.0,
) -> Iterator[Rig]:
    """At the end every lease must be back, and nothing may stay charged."""
    with ExitStack() as stack:
        runtime = make_runtime()
        stack.callback(runtime.accelerator.close)
        arena = HostArena(4 * MIB, runtime.accelerator, False, runtime.ledger)
        stack.callback(arena.close)
        staging = StagingPool(arena, buffer_nbytes, num_buffers, "staging", runtime.recorder, lease_timeout_s)
        stack.callback(staging.close)
        buffers = StagingPool(arena, 16 * 4096, 4, "buffers", runtime.recorder, lease_timeout_s)
        stack.callback(buffers.close)
        tier: Tier
        if name == "nvme":
            engine = SyncEngine(held=[]) if engine is None else engine
            store = SwapStore(SwapDir.create([swap_path]), engine, capacity_nbytes=4 * MIB, recorder=runtime.recorder)
            stack.callback(store.close)
            tier = NvmeTier(store, staging, runtime)
        elif name == "host":
            tier = HostTier(arena, runtime)
        else:
            tier = DeviceTier(runtime.accelerator, runtime.ledger)
        yield Rig(tier, runtime, arena, staging, buffers)
        runtime.accelerator.synchronize()
        tier.close()
        assert staging.num_free == staging.count, staging.holders()
        assert buffers.num_free == buffers.count, buffers.holders()


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
