"""Define the request for a plan: a config, and facts about the machine, the ranks and the model. Decide which update
policy runs, and which offloading runs if the CPU computes.

[Note: The CPU as the device] If the CPU computes, paging parameters to and from host memory only copies them within
this memory: it took a third of a step's CPU time. So offload_param and offload_optimizer with device cpu are resolved
to none. This gives the same bits, and the plan, its notice and every record name what runs. Paging stays

* with `tiered_zero.device_memory_limit`, which asks for a small device;
* with seeded delays, which simulate another machine;
* with several ranks: their gradients are reduced as the tiers say, and a shard is fetched by the same copy from either
  tier.

State stays in host memory

* if the requested update policy needs state off the device;
* if state is split over tiers;
* if parameters rest on nvme: with state on the device, the update would copy them once more.

Bytes on the device count against the limit of host memory, unless the device has a limit of its own or is simulated.
The window (the parameters fetched from nvme that are in memory at once) then shrinks to the limit of host memory.
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
"""Tier -> (bytes, the name of the setting or fact that sets them)."""


RESERVED_SHARE = 8
"""An eighth of free device and host memory stays free if the config sets no limit. It is for what no plan counts:
activations, the model's code, the system. A plan of all free memory would fail in its first forward."""

RESERVED = ", less an eighth for "
"""The text in a limit's name that says that RESERVED_SHARE was subtracted from free memory."""


def limit_of(
    tier: str, free_nbytes: int | None, source: str, given_nbytes: int | None, prefix: str = "tiered_zero."
) -> dict[str, tuple[int, str]]:
    """Return {tier: (bytes that may be used, text that names the limit in messages)}; {} if `free_nbytes` and
    `given_nbytes` are both None.

    `free_nbytes`: the free memory; None: not known. `given_nbytes`: the config's limit; None: the config sets none. The
    config's limit applies if it is at most the free memory, or if the free memory is not known. In all other cases the
    limit is the free memory less an eighth (RESERVED_SHARE). `source`: names the free memory in the text. `prefix`: the
    beginning of the config's key in the text."""
    if given_nbytes is not None and (free_nbytes is None or given_nbytes <= free_nbytes):
        return {tier: (given_nbytes, f"{prefix}{tier}_memory_limit")}
    if free_nbytes is None:
        return {}
    rest = "activations" if tier == "device" else "all else"
    return {tier: (free_nbytes - free_nbytes // RESERVED_SHARE, f"{source}{RESERVED}{rest}")}


NUM_STATE_STAGING = 3
"""The fewest staging buffers of state: one sub-group is read, one updated, one written."""

MAX_BUCKET_NUMEL = 1 << 22
"""The most elements of gradients in one collective, even if reduce_bucket_size is larger. Two collectives of 16 MiB of
fp32 under way reach the full rate. A constant keeps the borders of buckets independent of memory."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The config of a run, and facts about its machine, ranks and model. The config's offload devices are those that
    really run (see `resolve_host_tiers`). Raises ConfigError if the config asks for gradients, or for an update policy,
    that cannot be used.

    `shares_cores`: the CPU computes the model and the update. `device_is_host`: bytes on the device count against the
    limit of host memory. See [Note: The CPU as the device]. `segments`: the device's allocator takes memory in
    segments, as CUDA's does. `buffers_nbytes`: bytes of the model's buffers, which commits copy. `temporaries`: how
    many fp32 arrays an update on an accelerator makes, besides copies of state and gradients; None: no accelerator.
    `keeps_group_state`: a step changes values of its param group, such as a step count. `fewest_buffers`: plan the
    fewest staging buffers of state."""

    config: Config
    limits: Limits = field(default_factory=dict)
    shares_cores: bool = False
    device_is_host: bool = False
    segments: bool = False
    buffers_nbytes: int = 0
    rank: int = 0
    world_size: int = 1
    temporaries: int | None = None
    keeps_group_state: bool = False
    fewest_buffers: bool = False

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
        """Whether a global norm or a check for overflow comes before any update."""
        config = self.config
        checks_bf16 = config.bf16.enabled and config.bf16.check_grad_overflow
        return config.gradient_clipping > 0 or config.fp16.enabled or checks_bf16

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over micro-batches, in fp32."""
        return self.config.gradient_accumulation_steps > 1 or not self.config.managed_gradient_accumulation

    @property
    def gradient_tier(self) -> str:
        """The tier of gradients that leave the device: "host", "nvme", or "auto" (host memory while it has room, then
        nvme)."""
        asked, on_nvme = self.config.tiered_zero.gradients, self.state_tier == "nvme"
        return asked if on_nvme and not self._keeps_whole_gradients and asked != "cpu" else "host"

    def gradient_nbytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's gradients that this rank keeps: fp32 sums, or values in the unit's dtype."""
        numel = len(unit.shard(self.rank)) if self.shards_gradients else unit.numel
        return numel * (4 if self.sums_gradients else unit.itemsize)

    @property
    def activation_tier(self) -> str:
        """The tier on which saved activations rest. It is "device" instead of "host" if the CPU computes."""
        tier = _TIER_OF_DEVICE[self.config.activations_device]
        return "device" if tier == "host" and self.shares_cores else tier

    @property
    def shards_state(self) -> bool:
        """Whether each rank has masters and state of its own shards only."""
        return self.world_size > 1 and self.config.zero_optimization.stage > 0

    @property
    def shards_params(self) -> bool:
        """Whether each rank has parameters of its own shards only. If so, units are gathered for each use; otherwise,
        after an update."""
        return self.world_size > 1 and self.config.zero_optimization.stage == 3

    @property
    def shards_gradients(self) -> bool:
        """Whether each rank keeps gradients of its own shards only, and every backward reduces gradients."""
        stage = self.config.zero_optimization.stage
        return self.shards_state and (stage > 1 or self.state_tier != "device")

    @property
    def _keeps_whole_gradients(self) -> bool:
        """Whether there are several ranks, and each keeps whole gradients. step() then reduces them in memory."""
        return self.world_size > 1 and not self.shards_gradients

    @property
    def bucket_numel(self) -> int:
        """The most elements in one collective of gradients."""
        return min(self.config.zero_optimization.reduce_bucket_size, MAX_BUCKET_NUMEL)

    @property
    def computing_tier(self) -> str:
        """The tier whose limit holds for bytes on the device: "host" if these bytes count as host memory, else
        "device"."""
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
    """The sizes of a sub-group. `state_nbytes`: bytes of its slot. `parts`: unit index -> the unit's elements in the
    sub-group. `embedding`: True: this sub-group is placed before others, so it gets the faster tiers."""

    state_nbytes: int
    parts: Mapping[int, int]
    embedding: bool = False


def splits_masters_off_device(config: Config) -> bool:
    """Return whether masters are stored as their bf16 parameters and remainders (bf16_remainder), and the update runs
    off the device. If so, no parameter may stay on the device."""
    return (
        config.tiered_zero.state_format == "bf16_remainder"
        and config.zero_optimization.offload_optimizer.device != "none"
    )


def unit_rules(config: Config, world_size: int = 1, *, whole_params: bool = False) -> UnitRules:
    """Read from `config` the rules by which units are cut. Small parameters move with their block. They stay on the
    device instead if parameters are offloaded, there is one rank, and the masters are not split off the device
    (`splits_masters_off_device`). `whole_params`: ranks own whole parameters, because the update rule steps whole
    parameters."""
    zero = config.zero_optimization
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
    """The update policy of a run. `policy`: "barrier", "overlapped" or "delayed". `reason`: why this policy runs, in
    words.

    `optimizer_in_backward`: updates start before `step()`, as soon as a unit's gradients are complete.
    """

    policy: str
    reason: str
    optimizer_in_backward: bool = False

    @property
    def text(self) -> str:
        """One line for the log, the plan's table and the run's record."""
        start = ", starting in backward" if self.optimizer_in_backward else ""
        return f"update policy: {self.policy}{start} ({self.reason})"


def choose_update_policy(request: PlanRequest, state_tiers: Collection[str]) -> UpdateChoice:
    """Choose the update policy that runs. `state_tiers`: the tiers that hold optimizer state. The first case that
    applies decides:

    * Ranks have shards of the state and whole parameters: `barrier`, because step() ends with the gather of new
      parameters.
    * `tiered_zero.update` is `barrier` or `delayed`: the policy that it names.
    * All state is on the device: `barrier`, because the update takes the device's own time.
    * `tiered_zero.update` is `auto`, the CPU computes, and no state is on nvme: `barrier`.
    * Everything else: `overlapped`.
    """
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
    """Return `config` with the devices to which parameters and optimizer state are really offloaded. If the CPU
    computes, "cpu" may become "none": see [Note: The CPU as the device]. `shares_cores`: the CPU computes.
    """
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
    """Describe, in one notice, each offload device that `resolve_host_tiers` has changed; None if it has changed
    none."""
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
