"""`tiered-zero plan`: the seconds of a step by resource, where a tier is hidden, what a step writes, and what helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tiered_zero.sizes import TIERS, format_nbytes
from tiered_zero.telemetry.advice import remedy_of

if TYPE_CHECKING:
    from tiered_zero.plan.machine import Machine
    from tiered_zero.plan.planner import Plan
    from tiered_zero.plan.step_time import StepSeconds


def seconds_facts(step: StepSeconds, machine: Machine) -> dict[str, Any]:
    """Return what the screen says, for programs."""
    written = sum(step.written_nbytes.values())
    rated = [disk.rated_nbytes for disk in machine.disks]
    total = None if not rated or None in rated else sum(filter(None, rated))
    return {
        **asdict(step),
        "tokens_per_s": step.tokens_per_s,
        "bound_by": step.bound_by,
        "written_nbytes_per_step": written,
        "rated_nbytes": total,
        "steps_to_rating": total // written if total and written else None,
        "shorter_by": remedy_of(step.bound_by),
    }


def seconds_lines(facts: Mapping[str, Any], plan: Plan, machine: Machine) -> Iterator[str]:
    """Yield the screen that ends `plan`."""
    sizes = ((tier, plan.nbytes(tier)) for tier in TIERS)
    yield f"Predicted step on {machine.name}:"
    yield f"  bytes     {', '.join(f'{tier} {format_nbytes(nbytes)}' for tier, nbytes in sizes if nbytes)}"
    rate = f"{facts['tokens_per_s']:,.0f} tokens/s"
    yield f"  seconds   {facts['seconds']:.3g} for {facts['tokens']:,} tokens, {rate}; bound by {facts['bound_by']}"
    for lane, seconds in facts["by_resource"].items():
        if seconds:
            yield f"  {seconds:9.3g}   {lane} ({seconds / facts['seconds']:.0%} busy)"
    for tier, tokens in facts["hidden_from_tokens"].items():
        up_to = f"not up to {facts['searched_tokens'][tier]:,} tokens a step"
        where = up_to if tokens is None else f"from {tokens:,} tokens a step on"
        yield f"  hidden    {tier}: {where}"
    if facts["written_nbytes_per_step"]:
        kinds = ", ".join(f"{kind} {format_nbytes(n)}" for kind, n in facts["written_nbytes"].items() if n)
        yield f"  written   {facts['written_nbytes_per_step'] / 1e9:.3g} GB a step ({kinds})"
        if facts["steps_to_rating"] is not None:
            rated = facts["rated_nbytes"] / 1e12
            yield f"            the disks' rating, {rated:g} TB, is written after {facts['steps_to_rating']:,} steps"
    if facts["shorter_by"]:
        yield f"  shorter   by {facts['shorter_by']}, as far as there is room"
