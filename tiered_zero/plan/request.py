"""Request a plan: what the config and the machine say, in bytes, elements and tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiered_zero.config.schema import Config
from tiered_zero.errors import ConfigError
from tiered_zero.layout.units import UnitRules
from tiered_zero.sizes import TIERS

NO_LIMIT = 1 << 62
_TIER_OF_DEVICE = {"none": "device", "cpu": "host", "nvme": "nvme"}

Limits = Mapping[str, tuple[int, str]]
"""Tier -> (bytes, the name of the setting or fact that sets them)."""


RESERVED_SHARE = 8
"""This part of free device and host memory is left to what no plan counts (activations, the model's code, the system)
if the config sets no limit: a plan of all free memory would fail in its first forward."""

RESERVED = ", less an eighth for "
"""Text in the name of a limit from which that part was taken."""


def limit_of(
    tier: str, free_nbytes: int | None, source: str, given_nbytes: int | None, prefix: str = "tiered_zero."
) -> dict[str, tuple[int, str]]:
    """Return the limit of one tier: the config's, up to all free memory, or free memory less the reserved share.
    `prefix`: of the config's key."""
    if given_nbytes is not None and (free_nbytes is None or given_nbytes <= free_nbytes):
        return {tier: (given_nbytes, f"{prefix}{tier}_memory_limit")}
    if free_nbytes is None:
        return {}
    rest = "activations" if tier == "device" else "all else"
    return {tier: (free_nbytes - free_nbytes // RESERVED_SHARE, f"{source}{RESERVED}{rest}")}


@dataclass(frozen=True, kw_only=True)
class LookAhead:
    """The pager's use of spare room. `prefetch_numel`: most elements fetched ahead of use. `reuse_numel`: a unit
    expected again within this many elements is kept, room permitting.
    """

    prefetch_numel: int = NO_LIMIT
    reuse_numel: int = NO_LIMIT


@dataclass(frozen=True, kw_only=True)
class ParamRequest:
    """The tier of the compute parameters. `max_host_numel`: with tier nvme, elements that rest in host memory instead.

    `buffer_numel`, `num_buffers`: staging buffers; None: the planner chooses.
    """

    tier: str
    max_host_numel: int = 0
    max_live_numel: int = NO_LIMIT
    buffer_numel: int | None = None
    num_buffers: int | None = None
    look_ahead: LookAhead = field(default_factory=LookAhead)


@dataclass(frozen=True, kw_only=True)
class StateRequest:
    """The tiers of master weights and optimizer state. `tier`: the slowest one used.

    `ratio`: the share of all bytes that leaves the device. `limits`: tier -> the most bytes on it; the rest goes to
    `tier`. `num_buffers`: staging buffers; None: the planner chooses.
    """

    tier: str
    format: str = "fp32"
    ratio: float = 1.0
    limits: Mapping[str, int] = field(default_factory=dict)
    num_buffers: int | None = None

    @property
    def is_split(self) -> bool:
        """Return whether the state may rest on more than one tier."""
        return self.tier != "device" and (self.ratio < 1 or any(t in self.limits for t in self.faster_tiers))

    @property
    def faster_tiers(self) -> tuple[str, ...]:
        """Fastest first."""
        return TIERS[: TIERS.index(self.tier)]


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """`policy`: "auto", "barrier", "overlapped" or "delayed". `shares_cores`: compute runs on the CPU, like the update.

    `checks_gradients`: a global norm or a check for overflow comes before any update. `in_backward`: updates may start
    in backward, so that gradients cannot be read before `step()`. `temporaries`: fp32 arrays that an update on an
    accelerator makes in addition to copies of state and gradients; None: no accelerator.
    """

    policy: str = "auto"
    shares_cores: bool = False
    checks_gradients: bool = False
    in_backward: bool = True
    temporaries: int | None = None


@dataclass(frozen=True, kw_only=True)
class CommitRequest:
    """In-place commits: durable data has two places on nvme, or one if it is written once.

    `buffers_nbytes`: bytes of the model's buffers.
    """

    buffers_nbytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RankRequest:
    """The ranks of a run. `rank`: this one. `shards_state`: each rank has masters and state of its own shards only.
    `shards_params`: parameters too, and units are gathered for each use; else after an update. `shards_gradients`: each
    rank keeps gradients of its own shards only, and every backward reduces. `bucket_numel`: most elements in one
    collective.
    """

    rank: int = 0
    world_size: int = 1
    shards_state: bool = False
    shards_params: bool = False
    shards_gradients: bool = False
    bucket_numel: int = 0


@dataclass(frozen=True, kw_only=True)
class ActivationRequest:
    """Saved activations rest on `tier`, host or nvme. `nbytes` there; None: the planner chooses. `min_nbytes`: the
    least moved."""

    tier: str
    nbytes: int | None = None
    min_nbytes: int = 1


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Everything that the config and the machine say to the planner. `sums_gradients`: over micro-batches, in fp32.

    `gradients`: the tier of gradients that leave the device: "host", "nvme", or "auto": host memory as far as there is
    room. `commits`: None without in-place commits. `activations`: None if they stay on the device.
    `device_is_host`: what the device holds counts against host memory. See [Note: The CPU as the device].
    `segments`: the device's allocator takes memory in segments, as CUDA's does.
    """

    params: ParamRequest
    state: StateRequest
    update: UpdateRequest = field(default_factory=UpdateRequest)
    limits: Limits = field(default_factory=dict)
    sums_gradients: bool = False
    gradients: str = "host"
    commits: CommitRequest | None = None
    ranks: RankRequest = field(default_factory=RankRequest)
    activations: ActivationRequest | None = None
    device_is_host: bool = False
    segments: bool = False

    @property
    def computing_tier(self) -> str:
        """The tier whose limit holds for what the device computes with."""
        return "host" if self.device_is_host else "device"

    def limit_nbytes(self, tier: str) -> int:
        """Bytes of the tier that may be used."""
        return self.limits.get(tier, (NO_LIMIT, ""))[0]

    def counted_tiers(self, tier: str) -> tuple[str, ...]:
        """Return the tiers whose bytes count against the limit of `tier`."""
        return ("host", "device") if tier == "host" and self.device_is_host else (tier,)


@dataclass(frozen=True, kw_only=True)
class SubGroupSize:
    """The sizes of a sub-group. `state_nbytes`: its slot. `parts`: unit index -> the unit's elements in it.
    `embedding`: it goes to faster tiers before others."""

    state_nbytes: int
    parts: Mapping[int, int]
    embedding: bool = False


MAX_BUCKET_NUMEL = 1 << 22
"""Elements of gradients in one collective, however large reduce_bucket_size is: 16 MiB of fp32, with two under way,
stream at full rate, and borders of buckets do not depend on memory."""


def splits_masters_off_device(config: Config) -> bool:
    """Return whether half of each master is the parameter and the update runs off the device, so that no parameter may
    stay."""
    return (
        config.tiered_zero.state_format == "bf16_remainder"
        and config.zero_optimization.offload_optimizer.device != "none"
    )


def unit_rules(config: Config, world_size: int = 1, *, whole_params: bool = False) -> UnitRules:
    """Read from `config` how units are cut. A small parameter moves with its block, in the same gather, with many
    ranks, and if it is half of a master that is updated elsewhere."""
    zero = config.zero_optimization
    persists = zero.offload_param.device != "none" and world_size == 1 and not splits_masters_off_device(config)
    return UnitRules(
        size_cap_numel=config.tiered_zero.unit_size_cap,
        persistence_numel=zero.stage3_param_persistence_threshold if persists else 0,
        max_persistent_numel=zero.stage3_model_persistence_threshold,
        world_size=world_size,
        whole_params=whole_params and world_size > 1,
    )


def plan_request(
    config: Config,
    *,
    limits: Limits,
    shares_cores: bool,
    device_is_host: bool = False,
    segments: bool = False,
    buffers_nbytes: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> PlanRequest:
    """Read from `config` what the planner must know. Raises ConfigError for a delayed update of state on the device.

    `limits`: tier -> the most bytes, and why. `buffers_nbytes`: of the model's buffers, if they are saved.
    `device_is_host`, `segments`: see PlanRequest.
    """
    _check_delayed(config)
    shards_gradients = _shards_gradients(config, world_size)
    zero, settings = config.zero_optimization, config.tiered_zero
    param, state = zero.offload_param, zero.offload_optimizer
    checks_bf16 = config.bf16.enabled and config.bf16.check_grad_overflow
    return PlanRequest(
        params=ParamRequest(
            tier=_TIER_OF_DEVICE[param.device],
            max_host_numel=param.max_in_cpu,
            max_live_numel=zero.stage3_max_live_parameters,
            buffer_numel=param.buffer_size if "buffer_size" in param.model_fields_set else None,
            num_buffers=param.buffer_count if "buffer_count" in param.model_fields_set else None,
            look_ahead=LookAhead(
                prefetch_numel=zero.stage3_prefetch_bucket_size, reuse_numel=zero.stage3_max_reuse_distance
            ),
        ),
        state=StateRequest(
            tier=_TIER_OF_DEVICE[state.device],
            format=settings.state_format,
            ratio=state.ratio,
            limits=settings.state_limits.by_tier,
            num_buffers=state.buffer_count if "buffer_count" in state.model_fields_set else None,
        ),
        update=UpdateRequest(
            policy=settings.update,
            shares_cores=shares_cores,
            checks_gradients=config.gradient_clipping > 0 or config.fp16.enabled or checks_bf16,
            in_backward=settings.optimizer_in_backward and config.managed_gradient_accumulation,
        ),
        limits=limits,
        device_is_host=device_is_host,
        segments=segments,
        sums_gradients=config.gradient_accumulation_steps > 1 or not config.managed_gradient_accumulation,
        gradients=_gradient_tier(config, are_whole=world_size > 1 and not shards_gradients),
        commits=CommitRequest(buffers_nbytes=buffers_nbytes) if settings.checkpoint.in_place else None,
        ranks=RankRequest(
            rank=rank,
            world_size=world_size,
            shards_state=world_size > 1 and zero.stage > 0,
            shards_params=world_size > 1 and zero.stage == 3,
            shards_gradients=shards_gradients,
            bucket_numel=min(zero.reduce_bucket_size, MAX_BUCKET_NUMEL),
        ),
        activations=_activation_request(config, shares_cores),
    )


def _shards_gradients(config: Config, world_size: int) -> bool:
    stage, state = config.zero_optimization.stage, config.zero_optimization.offload_optimizer
    return world_size > 1 and (stage > 1 or (stage == 1 and state.device != "none"))


def _gradient_tier(config: Config, *, are_whole: bool) -> str:
    """Return the tier of gradients. `are_whole`: each of several ranks keeps whole ones, which step() reduces in
    memory."""
    asked = config.tiered_zero.gradients
    if are_whole and asked == "nvme":
        raise ConfigError(
            "tiered_zero.gradients: expected auto or cpu at zero_optimization.stage 0 with several ranks, each of "
            "which keeps whole gradients in memory; found 'nvme'. Set zero_optimization.stage to 1, 2 or 3."
        )
    on_nvme = config.zero_optimization.offload_optimizer.device == "nvme" and not are_whole
    return asked if on_nvme and asked != "cpu" else "host"


def _activation_request(config: Config, shares_cores: bool) -> ActivationRequest | None:
    """Read the request; None if activations stay on the device, or in host memory while the CPU computes."""
    tier, own = _TIER_OF_DEVICE[config.activations_device], config.tiered_zero.activations
    if tier == "device" or (tier == "host" and shares_cores):
        return None
    return ActivationRequest(tier=tier, nbytes=own.limit, min_nbytes=own.min_nbytes or 1)


def _check_delayed(config: Config) -> None:
    state, settings = config.zero_optimization.offload_optimizer, config.tiered_zero
    if settings.update != "delayed":
        return
    found = "offload_optimizer.device none" if state.device == "none" else ""
    found = found or (f"offload_optimizer.ratio {state.ratio:g}" if state.ratio < 1 else "")
    found = found or ("tiered_zero.state_limits.device" if settings.state_limits.device else "")
    if found:
        raise ConfigError(
            "tiered_zero.update: delayed needs the whole optimizer off the device, where its update can overlap "
            f"compute; found {found}. Set offload_optimizer.device to cpu or nvme with ratio 1 and without "
            "tiered_zero.state_limits.device, or take overlapped."
        )
