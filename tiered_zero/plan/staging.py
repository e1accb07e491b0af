"""Size the staging buffers, through which bytes pass between tiers, and the buckets for reductions over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_zero.errors import ConfigError
from tiered_zero.layout.buckets import cut_buckets
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.placement import NUM_GRADIENT_WINDOWS, PlacedUnit, Placement
from tiered_zero.plan.request import NUM_STATE_STAGING, PlanRequest, given
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up

MAX_AUTO_STAGING_NBYTES = 16 * MIB
"""The most bytes of a staging buffer for parameters (if the config gives no size), gradients or activations. With
buffers of this size the disk reaches its full rate."""

NUM_PARAM_STAGING = 4
AUTO_STATE_STAGING_NBYTES = 168 * MIB
"""If the config gives no number of staging buffers for state, at least as many are made as fit into this size, but no
more than there are sub-groups to stage. This size keeps the disk busy during a long update or wait."""

NUM_GRADIENT_STAGING = 2
"""The number of staging buffers for gradients if an accelerator computes: one is filled while the other is added up."""

NUM_BUCKETS = 2
"""The number of buckets (buffers for gradients that ranks reduce): one is reduced while the other is filled."""

MAX_AUTO_STATE_STAGING_NBYTES = 640 * MIB
MAX_AUTO_STATE_STAGING_SHARE = 16
"""The staging buffers for state may exceed AUTO_STATE_STAGING_NBYTES in total, to hold the state of a whole unit. Two
limits then hold for the total: MAX_AUTO_STATE_STAGING_NBYTES, and the host's limit divided by
MAX_AUTO_STATE_STAGING_SHARE. A tied embedding needs this, because its gradient is complete last and its update is
needed first."""


@dataclass(frozen=True, kw_only=True)
class StagingSize:
    """`count` buffers of `nbytes` each."""

    nbytes: int = 0
    count: int = 0

    @property
    def total_nbytes(self) -> int:
        return align_up(self.nbytes, PAGE_NBYTES) * self.count


@dataclass(frozen=True, kw_only=True)
class Staging:
    """The pools of staging buffers, one for each kind of bytes."""

    params: StagingSize
    state: StagingSize
    gradients: StagingSize
    gradient_windows: StagingSize = StagingSize()  # in host memory, for gradients on nvme; each holds one unit
    buckets: StagingSize = StagingSize()  # for gradients that ranks reduce
    bucket_tier: str = "host"


def size_staging(tiers: Placement, request: PlanRequest) -> Staging:
    """Size every pool of staging buffers. Raises ConfigError if offload_param.buffer_size is smaller than a parameter
    on nvme."""
    to_host = [placed.unit for placed in tiers.units if placed.gradients_leave]
    window = max((placed.gradient_nbytes for placed in tiers.units if placed.gradient_tier == "nvme"), default=0)
    if request.shards_gradients and request.shares_cores:
        to_host = []  # the CPU adds their sums directly from the buckets
    return Staging(
        params=_param_staging([placed for placed in tiers.units if placed.param_tier == "nvme"], request),
        state=_state_staging(tiers, request),
        gradients=_gradient_staging(to_host, request),
        gradient_windows=StagingSize(nbytes=window, count=NUM_GRADIENT_WINDOWS if window else 0),
        buckets=_buckets([placed.unit for placed in tiers.units if placed.unit.trainable], request),
        bucket_tier=_bucket_tier(tiers, request),
    )


def _gradient_staging(to_host: Sequence[Unit], request: PlanRequest) -> StagingSize:
    """Size the buffers for gradients that leave the device."""
    if not to_host:
        return StagingSize()
    if request.shares_cores:  # gradients are added in their own memory
        largest, count = max(entry.param.numel * unit.itemsize for unit in to_host for entry in unit.entries), 1
    else:  # a whole unit if possible: every buffer costs a wait
        largest, count = max(unit.nbytes for unit in to_host), NUM_GRADIENT_STAGING
    return StagingSize(nbytes=min(largest, MAX_AUTO_STAGING_NBYTES), count=count)


def _buckets(trainable: Sequence[Unit], request: PlanRequest) -> StagingSize:
    """Return the size and number of buckets: the buffers in which ranks reduce gradients."""
    if request.world_size == 1 or not trainable:
        return StagingSize()
    buckets = cut_buckets(trainable, request.world_size, request.bucket_numel)
    return StagingSize(nbytes=max(bucket.nbytes(4) for bucket in buckets), count=NUM_BUCKETS)  # 4: fp32 sums


def _bucket_tier(tiers: Placement, request: PlanRequest) -> str:
    """Return the tier on which ranks reduce gradients: "device" or "host"."""
    homes = {placed.gradient_tier for placed in tiers.units if placed.unit.trainable}
    on_device = request.shards_gradients or homes == {"device"}  # shards wait there for their bucket
    return "device" if on_device and not request.shares_cores else "host"


def _param_staging(on_nvme: Sequence[PlacedUnit], request: PlanRequest) -> StagingSize:
    if not on_nvme:
        return StagingSize()
    largest = max(placed.param_nbytes for placed in on_nvme)
    section = request.config.zero_optimization.offload_param
    buffer_numel = given(section, "buffer_size")
    if buffer_numel is None:
        size = min(align_up(largest, MIB), MAX_AUTO_STAGING_NBYTES)
    else:
        for param in (entry.param for placed in on_nvme for entry in placed.unit.entries):
            if param.numel > buffer_numel:
                raise ConfigError(
                    f"zero_optimization.offload_param.buffer_size: {buffer_numel} elements, but parameter {param.name} "
                    f"has {param.numel}. Set it to at least {param.numel}, or leave it out to have it sized from the "
                    "model."
                )
        size = min(largest, align_up(buffer_numel * max(placed.unit.itemsize for placed in on_nvme), PAGE_NBYTES))
    return StagingSize(nbytes=align_up(size, PAGE_NBYTES), count=given(section, "buffer_count") or NUM_PARAM_STAGING)


def _state_staging(tiers: Placement, request: PlanRequest) -> StagingSize:
    """Size the buffers in which sub-groups are updated. A buffer has room for one sub-group: for its state and
    gradients, if these rest on nvme, and for the parameters that the update cannot write in place."""
    placed_by_index = {placed.unit.index: placed for placed in tiers.units}
    staged = []
    for subgroup, tier in tiers.placed_subgroups():
        in_place = "device" if tier == "device" else "host"
        nbytes = subgroup.state_nbytes if tier == "nvme" else 0
        for index, numel in subgroup.parts.items():
            placed = placed_by_index[index]
            nbytes += numel * placed.unit.itemsize if placed.param_tier != in_place else 0
            nbytes += numel * request.gradient_itemsize(placed.unit) if placed.gradient_tier == "nvme" else 0
        staged.append(nbytes)
    count = sum(nbytes > 0 for nbytes in staged)
    if not count:
        return StagingSize()
    of_unit: Counter[int] = Counter()
    for subgroup, nbytes in zip(tiers.subgroups, staged, strict=True):
        total = sum(subgroup.parts.values())
        for index, numel in subgroup.parts.items():
            of_unit[index] += nbytes * numel // total
    room = request.limit_nbytes("host") // MAX_AUTO_STATE_STAGING_SHARE
    whole = max(of_unit.values(), default=0) + NUM_STATE_STAGING * max(staged)
    wanted = min(whole, MAX_AUTO_STATE_STAGING_NBYTES, room)
    auto = max(NUM_STATE_STAGING, max(AUTO_STATE_STAGING_NBYTES, wanted) // max(staged))
    return StagingSize(nbytes=max(staged), count=min(count, request.num_state_buffers or auto))
