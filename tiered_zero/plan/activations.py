"""Sizes of what offloaded activations take: their budget on a tier, what is on its way, and staging buffers."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_zero.plan.request import ActivationRequest
from tiered_zero.plan.staging import MAX_AUTO_STAGING_NBYTES, StagingSize
from tiered_zero.sizes import GIB, MIB, PAGE_NBYTES, align_up

DEFAULT_NVME_NBYTES = 16 * GIB
DEFAULT_HOST_SHARE = 4
"""Without a limit: this part of the host memory that all else leaves."""

IN_FLIGHT_SHARE = 16
MIN_IN_FLIGHT_NBYTES, MAX_IN_FLIGHT_NBYTES = 16 * MIB, GIB
"""On their way at once: a part of the budget, within these bounds. A larger tensor stays on the device."""

NUM_STAGING = 4
NO_STAGING = StagingSize()


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """`nbytes`: the budget on `tier`. `in_flight_nbytes`: on the device besides, on their way there or back.
    `min_nbytes`: smaller tensors stay on the device. `staging`: between the device and nvme."""

    tier: str
    nbytes: int
    in_flight_nbytes: int
    min_nbytes: int
    staging: StagingSize = NO_STAGING


def plan_activations(request: ActivationRequest, host_room_nbytes: int) -> ActivationPlan:
    """Size the budget of one rank. `host_room_nbytes`: what all else leaves of host memory."""
    wanted = request.nbytes
    if wanted is None:
        share = max(0, host_room_nbytes) // DEFAULT_HOST_SHARE // PAGE_NBYTES * PAGE_NBYTES
        wanted = DEFAULT_NVME_NBYTES if request.tier == "nvme" else share
    nbytes = align_up(wanted, PAGE_NBYTES)
    in_flight = min(nbytes, max(MIN_IN_FLIGHT_NBYTES, min(nbytes // IN_FLIGHT_SHARE, MAX_IN_FLIGHT_NBYTES)))
    staging = NO_STAGING
    if request.tier == "nvme":
        staging = StagingSize(nbytes=min(in_flight, MAX_AUTO_STAGING_NBYTES), count=NUM_STAGING)
    return ActivationPlan(
        tier=request.tier,
        nbytes=nbytes,
        in_flight_nbytes=in_flight,
        min_nbytes=request.min_nbytes,
        staging=staging,
    )
