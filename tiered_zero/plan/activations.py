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


BLOCK_NBYTES = 17
"""Activations of one transformer block, over the bytes of its input: 34 h bytes a token in 16 bit, without the scores
of attention, which fused kernels do not keep (Korthikanti et al., Reducing Activation Recomputation, 2022, section 4).
"""

LOGIT_ITEMSIZE = 4
"""Bytes a logit takes besides itself: its gradient, or its fp32 copy."""


@dataclass(frozen=True, kw_only=True)
class ActivationEstimate:
    """Bytes of one micro-batch, with a checkpoint around each block. `boundary_nbytes`: the input of one; there are
    `num_boundaries`. `block_nbytes`: of one block, while it is computed again. `logits_nbytes`: with their loss."""

    tokens: int
    boundary_nbytes: int
    num_boundaries: int
    block_nbytes: int
    logits_nbytes: int

    @property
    def boundaries_nbytes(self) -> int:
        return self.boundary_nbytes * self.num_boundaries

    def offloaded_nbytes(self, plan: ActivationPlan | None) -> int:
        """Of the inputs, those that find room in the budget."""
        if plan is None or not plan.min_nbytes <= self.boundary_nbytes <= plan.in_flight_nbytes:
            return 0
        return (
            min(self.num_boundaries, plan.nbytes // align_up(self.boundary_nbytes, PAGE_NBYTES)) * self.boundary_nbytes
        )


def estimate_activations(tokens: int, hidden: int, layers: int, vocab: int, itemsize: int) -> ActivationEstimate:
    """`tokens`: of a micro-batch, all its samples. `itemsize`: bytes of an activation's element."""
    boundary_nbytes = itemsize * hidden * tokens
    return ActivationEstimate(
        tokens=tokens,
        boundary_nbytes=boundary_nbytes,
        num_boundaries=layers,
        block_nbytes=BLOCK_NBYTES * boundary_nbytes,
        logits_nbytes=tokens * vocab * (itemsize + LOGIT_ITEMSIZE),
    )
