"""Size the memory of offloaded activations, and estimate the activations of a transformer."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_zero.plan.request import PlanRequest
from tiered_zero.plan.staging import MAX_AUTO_STAGING_NBYTES, StagingSize
from tiered_zero.sizes import GIB, MIB, PAGE_NBYTES, align_up

DEFAULT_NVME_NBYTES = 16 * GIB
DEFAULT_HOST_SHARE = 4
"""The default budgets for activations. On nvme: DEFAULT_NVME_NBYTES. In host memory: the bytes that the rest of the
plan leaves free, divided by DEFAULT_HOST_SHARE."""

IN_FLIGHT_SHARE = 16
MIN_IN_FLIGHT_NBYTES, MAX_IN_FLIGHT_NBYTES = 16 * MIB, GIB
"""The least and the greatest limit for the bytes of activations in transfer at once. In between, the limit is a
sixteenth of the budget. A tensor larger than the limit stays on the device."""

NUM_STAGING = 4
NO_STAGING = StagingSize()


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """Sizes for activations that leave the device."""

    tier: str
    nbytes: int  # their budget on `tier`
    in_flight_nbytes: int  # the most bytes on the device that are being copied to the tier or back
    min_nbytes: int  # smaller tensors stay on the device
    staging: StagingSize = NO_STAGING  # between the device and nvme


def plan_activations(request: PlanRequest, host_room_nbytes: int) -> ActivationPlan | None:
    """Size the offloaded activations of one rank; return None if they stay on the device. `host_room_nbytes`: the bytes
    of host memory that the rest of the plan leaves free."""
    tier, section = request.activation_tier, request.config.tiered_zero.activations
    if tier == "device":
        return None
    wanted = section.limit
    if wanted is None:
        share = max(0, host_room_nbytes) // DEFAULT_HOST_SHARE // PAGE_NBYTES * PAGE_NBYTES
        wanted = DEFAULT_NVME_NBYTES if tier == "nvme" else share
    nbytes = align_up(wanted, PAGE_NBYTES)
    in_flight = min(nbytes, max(MIN_IN_FLIGHT_NBYTES, min(nbytes // IN_FLIGHT_SHARE, MAX_IN_FLIGHT_NBYTES)))
    staging = NO_STAGING
    if tier == "nvme":
        staging = StagingSize(nbytes=min(in_flight, MAX_AUTO_STAGING_NBYTES), count=NUM_STAGING)
    return ActivationPlan(
        tier=tier,
        nbytes=nbytes,
        in_flight_nbytes=in_flight,
        min_nbytes=section.min_nbytes or 1,
        staging=staging,
    )


STATISTICS_NBYTES = 4
"""Bytes of the statistic that is saved for each row: a normalization's factor, or a head's sum of exponentials."""

LOSS_NBYTES = 12
"""The most bytes that the loss needs for each logit: log-softmax, its gradient, and the gradient of its input, in
fp32."""

GELU_OF_OPERATIONS = "gelu_new"
"""The name, in a model's config, of a GELU that consists of several torch operations. Autograd saves tensors for each
operation."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The shape of a transformer block. `hidden`, `ffn`, `query`, `key`: numbers of elements for one token."""

    hidden: int
    ffn: int  # width of the feed-forward, or of one expert
    heads: int
    query: int  # of all heads
    key: int  # of all heads
    norms: int = 2  # normalizations of the hidden state
    fp32_norms: bool = False  # a normalization is several fp32 operations (RMSNorm), not one torch operation
    norms_heads: bool = False  # queries and keys are normalized too
    gated: bool = False  # the feed-forward has a gate
    activation: str = "gelu"
    experts: int = 0  # experts that a token passes through; 0: no router
    masks: bool = False  # dropout saves its masks
    eager: bool = False  # attention keeps its scores
    fp32_scores: bool = True  # the softmax of eager attention runs in fp32

    def token_nbytes(self, length: int, itemsize: int) -> int:
        """Return the bytes that autograd saves in the block for each token of a sample with `length` tokens."""
        # A normalization saves its input and a statistic. One of several fp32 operations saves the input in
        # fp32, and also its result before the weight.
        norm_itemsize = 4 + itemsize if self.fp32_norms else itemsize
        norms = self.norms * (norm_itemsize * self.hidden + STATISTICS_NBYTES)
        if self.norms_heads:
            norms += norm_itemsize * (self.query + self.key)
        # The projections save their inputs: one for queries, keys and values, one for the output.
        projections = itemsize * (self.hidden + self.query)
        # Attention saves queries, keys and values. A fused kernel also saves the sum of each row; its output is counted
        # above, as the next projection's input. Eager attention repeats keys and values for each query head. It saves
        # each row of scores after softmax, in the parameters' dtype, and after dropout, with the mask.
        attention = itemsize * (self.query + 2 * (self.query if self.eager else self.key))
        if self.eager:
            upcast = self.fp32_scores and itemsize < 4
            score_nbytes = (4 + itemsize if upcast else itemsize) + 2 * itemsize * self.masks
            attention += self.heads * length * score_nbytes
        else:
            attention += self.heads * STATISTICS_NBYTES
        # The feed-forward saves its input, and the activation's input and output (GPT-2's also tanh and two products).
        # With a gate it also saves the other factor and the product. With experts the router saves the input, and each
        # expert saves a copy of the input and its output.
        arrays = 2 + 2 * self.gated + 3 * (self.activation == GELU_OF_OPERATIONS)
        ffn = itemsize * self.hidden + max(1, self.experts) * itemsize * arrays * self.ffn
        ffn += self.experts * 2 * itemsize * self.hidden
        # The dropouts after attention and feed-forward save their masks: a byte on CUDA, an element on the CPU.
        masks = 2 * itemsize * self.hidden * self.masks
        return norms + projections + attention + ffn + masks


@dataclass(frozen=True, kw_only=True)
class ActivationEstimate:
    """Estimated bytes of one micro-batch's activations, if activation checkpointing computes each block again in
    backward."""

    tokens: int
    boundary_nbytes: int  # the saved input of one block
    num_boundaries: int  # the number of blocks
    block_nbytes: int  # the activations of one block while it is computed again
    logits_nbytes: int  # the logits and their loss

    @property
    def boundaries_nbytes(self) -> int:
        return self.boundary_nbytes * self.num_boundaries

    @property
    def budget_nbytes(self) -> int:
        """Return the bytes of a budget that has room for the saved inputs of all blocks."""
        return self.num_boundaries * align_up(self.boundary_nbytes, PAGE_NBYTES)

    def needed_nbytes(self, plan: ActivationPlan | None) -> int:
        """Return the bytes that activations need on the computing device. If `plan` is None, all activations stay
        there."""
        return self.boundaries_nbytes - self.offloaded_nbytes(plan) + self.block_nbytes + self.logits_nbytes

    def offloaded_nbytes(self, plan: ActivationPlan | None) -> int:
        """Return the bytes of blocks' inputs that `plan` offloads; 0 if it offloads none."""
        if plan is None or not plan.min_nbytes <= self.boundary_nbytes <= plan.in_flight_nbytes:
            return 0
        return (
            min(self.num_boundaries, plan.nbytes // align_up(self.boundary_nbytes, PAGE_NBYTES)) * self.boundary_nbytes
        )


def estimate_activations(
    block: BlockShape, *, samples: int, length: int, layers: int, vocab: int, itemsize: int
) -> ActivationEstimate:
    """Estimate the activations of a micro-batch of `samples` samples, each of `length` tokens."""
    tokens = samples * length
    return ActivationEstimate(
        tokens=tokens,
        boundary_nbytes=itemsize * block.hidden * tokens,
        num_boundaries=layers,
        block_nbytes=block.token_nbytes(length, itemsize) * tokens,
        logits_nbytes=tokens * vocab * (itemsize + LOSS_NBYTES),  # held through backward with the output
    )
