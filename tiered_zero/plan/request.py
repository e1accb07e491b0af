"""Define the request for a plan: a config, and facts about machine, ranks and model. Choose the update policy.

[Note: The CPU as the device] If the CPU computes, paging to and from host memory only copies inside host memory: this
took a third of a step's CPU time. So offload_param and offload_optimizer with device cpu run as none. With
bf16_remainder, either both run as none or neither does. Results are the same in every bit. The plan, its notice and
every record name the devices that really run. Paging stays

* with `tiered_zero.device_memory_limit`, which asks for a small device;
* with seeded delays, which simulate another machine;
* with several ranks.

State stays in host memory

* if the requested update policy needs it off the device;
* if state is split over tiers;
* if parameters rest on nvme, because with state on the device the update would copy these parameters once more.

If the CPU computes and does not simulate a device, bytes on the device also count against the limit of host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tiered_zero.config.schema import Config, OffloadOptimizerSection, OffloadParamSection
from tiered_zero.errors import ConfigError
from tiered_zero.layout.flat import Unit, UnitRules
from tiered_zero.sizes import TIERS

NO_LIMIT = 1 << 62
_TIER_OF_DEVICE = {"none": "device", "cpu": "host", "nvme": "nvme"}

Limits = Mapping[str, tuple[int, str]]
"""Tier -> (bytes that may be used, the name of the setting or fact that sets this limit)."""


RESERVED_SHARE = 8
"""An eighth of free device and host memory stays free, unless the config sets a limit that fits in the free memory. The
eighth is for code, the system, and activations on the device, which plans do not count."""

RESERVED = ", less an eighth for "
"""A part of a limit's name. It says that the limit is seven eighths of the free memory."""


def limit_of(
    tier: str, free_nbytes: int | None, source: str, given_nbytes: int | None, prefix: str = "tiered_zero."
) -> dict[str, tuple[int, str]]:
    """Return {tier: (bytes that may be used, the limit's name in messages)}. The bytes are `given_nbytes`, the config's
    limit, unless it is None or above `free_nbytes`. Then they are `free_nbytes` minus an eighth. Return {} if both are
    None. `source`: the name of `free_nbytes` in messages. `prefix`: the beginning of the config key in messages."""
    if given_nbytes is not None and (free_nbytes is None or given_nbytes <= free_nbytes):
        return {tier: (given_nbytes, f"{prefix}{tier}_memory_limit")}
    if free_nbytes is None:
        return {}
    rest = "activations" if tier == "device" else "all else"
    return {tier: (free_nbytes - free_nbytes // RESERVED_SHARE, f"{source}{RESERVED}{rest}")}


NUM_STATE_STAGING = 3
"""The least number of staging buffers of state that the planner chooses: one sub-group is read, one updated, one
written."""

MAX_BUCKET_NUMEL = 1 << 22
"""The most elements of gradients in one collective. Two collectives of this size (16 MiB of fp32) reach the full rate.
The number is constant, so that the bounds of buckets do not depend on memory."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A config, and facts about the machine, ranks and model of a run. The config's offload devices are those that the
    run uses (see `resolve_host_tiers`). Raises ConfigError if tiered_zero.gradients or tiered_zero.update cannot be
    used."""

    config: Config
    limits: Limits = field(default_factory=dict)
    shares_cores: bool = False  # the CPU computes the model and the update
    device_is_host: bool = False  # bytes on the device count against the limit of host memory
    segments: bool = False  # the device's allocator takes memory in segments, as CUDA's does
    buffers_nbytes: int = 0  # bytes of the model's buffers, which commits copy
    rank: int = 0
    world_size: int = 1
    temporaries: int | None = None  # fp32 arrays of an update on an accelerator, besides copies; None: no accelerator
    keeps_group_state: bool = False  # a step changes values of its param group, such as a step count
    fewest_buffers: bool = False  # plan the fewest staging buffers of state

    def __post_init__(self) -> None:
        _check_delayed(self.config)
        if self._keeps_whole_gradients and self.config.tiered_zero.gradients == "nvme":
            raise ConfigError(
                "tiered_zero.gradients: expected auto or cpu at zero_optimization.stage 0 with several ranks, each of "
                "which keeps whole gradients in memory; found 'nvme'. Set zero_optimization.stage to 1, 2 or 3."
            )

    @property
    def param_tier(self) -> str:
        """The slowest tier of the compute parameters."""
        return _TIER_OF_DEVICE[self.config.zero_optimization.offload_param.device]

    @property
    def state_tier(self) -> str:
        """The slowest tier of master weights and optimizer state."""
        return _TIER_OF_DEVICE[self.config.zero_optimization.offload_optimizer.device]

    @property
    def state_format(self) -> str:
        return self.config.tiered_zero.state_format

    @property
    def state_limits(self) -> Mapping[str, int]:
        """Tier -> the most bytes of masters and state on it; the rest goes to `state_tier`."""
        return self.config.tiered_zero.state_limits.by_tier

    @property
    def faster_tiers(self) -> tuple[str, ...]:
        """The tiers faster than `state_tier`, fastest first."""
        return TIERS[: TIERS.index(self.state_tier)]

    @property
    def splits_state(self) -> bool:
        """Whether the state may rest on more than one tier."""
        ratio, limits = self.config.zero_optimization.offload_optimizer.ratio, self.state_limits
        return self.state_tier != "device" and (ratio < 1 or any(tier in limits for tier in self.faster_tiers))

    @property
    def num_state_buffers(self) -> int | None:
        """The number of staging buffers of state; None: the planner chooses."""
        section = self.config.zero_optimization.offload_optimizer
        return NUM_STATE_STAGING if self.fewest_buffers else given(section, "buffer_count")

    @property
    def checks_gradients(self) -> bool:
        """Whether a step computes a global norm, or checks for overflow, before any update."""
        config = self.config
        checks_bf16 = config.bf16.enabled and config.bf16.check_grad_overflow
        return config.gradient_clipping > 0 or config.fp16.enabled or checks_bf16

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over micro-batches, in fp32."""
        return self.config.gradient_accumulation_steps > 1 or not self.config.managed_gradient_accumulation

    @property
    def gradient_tier(self) -> str:
        """The tier of gradients that leave the device: "host", "nvme", or "auto" (first host memory, then nvme)."""
        asked, on_nvme = self.config.tiered_zero.gradients, self.state_tier == "nvme"
        return asked if on_nvme and not self._keeps_whole_gradients and asked != "cpu" else "host"

    def gradient_nbytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's gradients that this rank keeps: fp32 sums, or values in the unit's dtype."""
        numel = len(unit.shard(self.rank)) if self.shards_gradients else unit.numel
        return numel * self.gradient_itemsize(unit)

    def gradient_itemsize(self, unit: Unit) -> int:
        """Return the bytes of an element of the gradients that this rank keeps."""
        return 4 if self.sums_gradients else unit.itemsize

    @property
    def activation_tier(self) -> str:
        """The tier on which saved activations rest. It is "device" instead of "host" if the CPU computes."""
        tier = _TIER_OF_DEVICE[self.config.activations_device]
        return "device" if tier == "host" and self.shares_cores else tier

    @property
    def shards_state(self) -> bool:
        """Whether each rank keeps only the masters and state of its own shards."""
        return self.world_size > 1 and self.config.zero_optimization.stage > 0

    @property
    def shards_params(self) -> bool:
        """Whether each rank keeps only the parameters of its own shards. If so, units are gathered for each use."""
        return self.world_size > 1 and self.config.zero_optimization.stage == 3

    @property
    def shards_gradients(self) -> bool:
        """Whether each rank keeps only the gradients of its own shards. If so, every backward reduces gradients."""
        stage = self.config.zero_optimization.stage
        return self.shards_state and (stage > 1 or self.state_tier != "device")

    @property
    def _keeps_whole_gradients(self) -> bool:
        """Whether there are several ranks, and each keeps whole gradients."""
        return self.world_size > 1 and not self.shards_gradients

    @property
    def bucket_numel(self) -> int:
        """The most elements in one collective of gradients."""
        return min(self.config.zero_optimization.reduce_bucket_size, MAX_BUCKET_NUMEL)

    @property
    def computing_tier(self) -> str:
        """The tier whose limit applies to bytes on the device: "host" if `device_is_host`, otherwise "device"."""
        return "host" if self.device_is_host else "device"

    def limit_nbytes(self, tier: str) -> int:
        """Return the bytes of the tier that may be used; NO_LIMIT if there is no limit."""
        return self.limits.get(tier, (NO_LIMIT, ""))[0]

    def counted_tiers(self, tier: str) -> tuple[str, ...]:
        """Return the tiers whose bytes count against the limit of `tier`."""
        return ("host", "device") if tier == "host" and self.device_is_host else (tier,)


def given(section: OffloadOptimizerSection | OffloadParamSection, name: str) -> int | None:
    """Return the value of the key `name` in a section; None if the config leaves the key out."""
    value: int = getattr(section, name)
    return value if name in section.model_fields_set else None


@dataclass(frozen=True, kw_only=True)
class SubGroupSize:
    """The size of a sub-group: the bytes of its state, and its elements in each unit."""

    state_nbytes: int  # bytes of its slot
    parts: Mapping[int, int]  # unit index -> the unit's elements in the sub-group
    embedding: bool = False  # placed first, and so on the fastest tiers


def splits_masters_off_device(config: Config) -> bool:
    """Return whether masters are stored as bf16 parameters and remainders, and are updated off the device. If so, no
    parameter may stay on the device."""
    return (
        config.tiered_zero.state_format == "bf16_remainder"
        and config.zero_optimization.offload_optimizer.device != "none"
    )


def unit_rules(config: Config, world_size: int = 1, *, whole_params: bool = False) -> UnitRules:
    """Return the rules in `config` for cutting units. `whole_params`: whether the update rule steps whole parameters
    only."""
    zero = config.zero_optimization
    # If true, small parameters stay on the device; if not, they move with their block.
    persists = zero.offload_param.device != "none" and world_size == 1 and not splits_masters_off_device(config)
    return UnitRules(
        size_cap_numel=config.tiered_zero.unit_size_cap,
        persistence_numel=zero.stage3_param_persistence_threshold if persists else 0,
        max_persistent_numel=zero.stage3_model_persistence_threshold,
        world_size=world_size,
        whole_params=whole_params and world_size > 1,
    )


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


@dataclass(frozen=True, kw_only=True)
class UpdateChoice:
    """The update policy of a run, and the reason for it in words."""

    policy: str  # "barrier", "overlapped" or "delayed"
    reason: str
    optimizer_in_backward: bool = False  # updates start before step(), when a unit's gradients are complete

    @property
    def text(self) -> str:
        """The policy and its reason in one line, for the log and the plan's table."""
        start = ", starting in backward" if self.optimizer_in_backward else ""
        return f"update policy: {self.policy}{start} ({self.reason})"


def choose_update_policy(request: PlanRequest, state_tiers: Collection[str]) -> UpdateChoice:
    """Choose the update policy of the run. `state_tiers`: the tiers that hold optimizer state."""
    policy = request.config.tiered_zero.update
    automatic, asked = policy == "auto", f"tiered_zero.update is {policy}"
    if request.shards_state and not request.shards_params:
        reason = (
            f"{request.world_size} ranks gather the new parameters of each other's shards inside step(), each unit's "
            "while others are updated"
        )
        return UpdateChoice(policy="barrier", reason=reason)
    if policy in ("barrier", "delayed"):
        return UpdateChoice(policy=policy, reason=asked)
    if set(state_tiers) == {"device"}:
        return UpdateChoice(policy="barrier", reason="all optimizer state is on the device, whose own time it takes")
    if automatic and request.shares_cores and "nvme" not in state_tiers:
        return UpdateChoice(policy="barrier", reason="the CPU is the device: an update during compute shares its cores")
    return UpdateChoice(
        policy="overlapped",
        reason="exact, and overlaps compute or disk" if automatic else asked,
        optimizer_in_backward=(
            request.config.tiered_zero.optimizer_in_backward
            and request.config.managed_gradient_accumulation
            and not request.keeps_group_state
            and request.world_size == 1
            and not request.checks_gradients
            and "device" not in state_tiers
        ),
    )


def resolve_host_tiers(config: Config, limits: Limits, *, shares_cores: bool, world_size: int) -> Config:
    """Return `config` with the offload devices that the run really uses. If the CPU computes, "cpu" may become "none":
    see [Note: The CPU as the device]."""
    zero, settings = config.zero_optimization, config.tiered_zero
    param, state = zero.offload_param, zero.offload_optimizer
    if not shares_cores or world_size > 1 or "device" in limits or "cpu" not in (param.device, state.device):
        return config
    param_device = "none" if param.device == "cpu" else param.device
    is_split = state.ratio < 1 or bool(settings.state_limits.by_tier)
    stays = is_split or settings.update in ("overlapped", "delayed") or param_device != "none"
    state_device = "none" if state.device == "cpu" and not stays else state.device
    if settings.state_format == "bf16_remainder" and (param_device, state_device) != ("none", "none"):
        return config  # half of a master is the parameter: both rest on one side
    offload = {
        "offload_param": param.model_copy(update={"device": param_device}),
        "offload_optimizer": state.model_copy(update={"device": state_device}),
    }
    return config.model_copy(update={"zero_optimization": zero.model_copy(update=offload)})


def describe_resolved_tiers(asked: Config, effective: Config) -> str | None:
    """Return a notice that names each offload device that `resolve_host_tiers` changed; None if it changed none."""
    moved = [
        f"{name}.device {getattr(asked.zero_optimization, name).device} runs as none"
        for name in ("offload_param", "offload_optimizer")
        if getattr(asked.zero_optimization, name).device != getattr(effective.zero_optimization, name).device
    ]
    if not moved:
        return None
    return (
        f"zero_optimization: {' and '.join(moved)}: the CPU is the device, and host memory is its own. Set "
        "tiered_zero.device_memory_limit to page as with a smaller device."
    )
