"""tiered_zero.state_format: what a run keeps per parameter of its optimizer, and where that can be done.

| format | bytes per parameter, the 16-bit parameter included | numbers |
|---|---|---|
| fp32 | 12 + 2 | |
| bf16_remainder | 10 + 2 | the same bits as fp32 |
| lossy_bf16_moments | 8 + 2 | lossy: both moments in bf16, stochastically rounded |
| lossy_8bit_moments | 6.25 + 2 | lossy: both moments in 8 bits, one fp32 scale for 32 of them |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from tiered_zero.errors import ConfigError
from tiered_zero.layout.subgroups import SubGroup
from tiered_zero.optim.adam import AdamRule
from tiered_zero.optim.master_format import FullMasters, MasterFormat, RemainderMasters
from tiered_zero.optim.quantized import QuantizedAdam
from tiered_zero.optim.rule import UpdateRule


def format_rule(name: str, rule: UpdateRule) -> UpdateRule:
    """The rule that keeps its moments in the format `name`. Raises ConfigError for a rule that cannot."""
    if name == "fp32":
        return rule
    if not isinstance(rule, AdamRule):
        raise ConfigError(
            f"tiered_zero.state_format: expected fp32 with {rule.name} as it is given; found {name!r}. The others are "
            "made of the moments of Adam and AdamW, stepped by the project's own rule: without fused, foreach, "
            "capturable and differentiable. Write fp32, or change the optimizer."
        )
    if name == "lossy_bf16_moments":
        return rule.with_state(torch.bfloat16)
    return QuantizedAdam(rule) if name == "lossy_8bit_moments" else rule


def master_format(name: str) -> MasterFormat:
    return RemainderMasters() if name == "bf16_remainder" else FullMasters()


def check_params(
    masters: MasterFormat, subgroups: Iterable[SubGroup], param_tiers: Mapping[int, str], state_tiers: Sequence[str]
) -> None:
    """Raises ConfigError for parameters of which no master can be made where the update runs."""
    held = ((segment.unit, state_tiers[subgroup.index]) for subgroup in subgroups for segment in subgroup.segments)
    for unit, state_tier in held if masters.needs_params else ():
        if unit.dtype != torch.bfloat16:
            raise ConfigError(
                "tiered_zero.state_format bf16_remainder: expected bfloat16 parameters, half of each fp32 master; "
                f"found {str(unit.dtype).removeprefix('torch.')} ({unit.entries[0].param.name}). Set "
                "bf16.enabled, or write fp32."
            )
        if (param_tiers[unit.index] == "device") != (state_tier == "device"):
            place, cure = (
                ("on the device and its optimizer does not", _OFF_THE_DEVICE)
                if param_tiers[unit.index] == "device"
                else ("off the device and its optimizer on it", "set offload_optimizer.device to cpu or nvme")
            )
            raise ConfigError(
                "tiered_zero.state_format bf16_remainder: expected parameters where the update can read them, as they "
                f"are half of the master; {unit.entries[0].param.name} rests {place}, so it would cross the link "
                f"once more in each step. In zero_optimization, {cure}; or write fp32."
            )


_OFF_THE_DEVICE = (
    "set offload_param.device to cpu or nvme and stage3_param_persistence_threshold to 0, or offload_optimizer.device "
    "to none"
)
