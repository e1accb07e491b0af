"""Explain why the steps of a run take as long as they do, and what would shorten them."""

from __future__ import annotations

from tiered_zero.sizes import TIERS
from tiered_zero.telemetry.report import OTHER, RunReport
from tiered_zero.telemetry.spans import is_wait

BUSY_SHARE = 0.7
"""If the busiest lane is busy for at least this share of a step, the explanation names it."""

OUTSIDE_SHARE = 0.25
"""If the loop around the engine takes at least this share of a step, the explanation names the loop."""

CPU_SHARE = 0.5
"""If the process got less than this share of the CPU seconds that its threads could use, the explanation names only
this cause. It does so only if the CPU computes, and compute or update is the busiest lane."""

WAIT_SHARE = 0.1
"""The explanation names a wait only if the wait takes at least this share of a step."""

_TOKENS = "more tokens per step (train_micro_batch_size_per_gpu)"
_DISK = (
    "state or parameters in host memory (offload_optimizer.device, offload_param.device, "
    "tiered_zero.state_limits.host), more tokens per step (train_micro_batch_size_per_gpu, "
    "gradient_accumulation_steps), smaller state (tiered_zero.state_format), or more drives in nvme_path"
)
_REDUCE = "a larger micro-batch in place of gradient_accumulation_steps, or a smaller offload_optimizer.ratio"
_RANKS = f"{_TOKENS}, a faster network, or equal work on all ranks"

NAMES: dict[str, tuple[str, str]] = {
    "compute": ("the model's own compute", "a faster device"),
    "forward": ("the model's forward, without the waits inside it", ""),
    "backward": ("the model's backward, without the waits inside it", ""),
    "step": ("the gradient check and what step() does itself", ""),
    "update": ("the optimizer's update", f"more cores, {_TOKENS}, or a smaller offload_optimizer.ratio"),
    "fetch": (
        "fetching parameters to the device",
        f"{_TOKENS}, or parameters on the device (offload_param.device none)",
    ),
    "reduce": ("carrying gradients to their home", _REDUCE),
    "disk read": ("reading from the swap directory", _DISK),
    "disk write": ("writing to the swap directory", _DISK),
    "all_gather": ("gathering parameters from the other ranks, and waiting for them", _RANKS),
    "reduce_scatter": ("summing gradients over the ranks, and waiting for them", _RANKS),
    "activations": (
        "moving activations between the device and their tier",
        "a larger tiered_zero.activations.min_nbytes, or recomputing them (torch.utils.checkpoint)",
    ),
    "save": (
        "saving checkpoints",
        "fewer saves, or commits in place (tiered_zero.checkpoint.in_place)",
    ),
    "wait_param": (
        "compute waits for parameters to arrive",
        f"a larger stage3_prefetch_bucket_size or stage3_max_live_parameters, or {_TOKENS}",
    ),
    "wait_update": (
        "compute waits for an update that is not finished",
        f"{_TOKENS}, more cores, or tiered_zero.update delayed, with other numbers",
    ),
    "wait_grad": ("backward waits until older gradients have arrived", _REDUCE),
    "wait_state": (
        "the update waits for optimizer state to be read or written",
        f"a larger offload_optimizer.buffer_count, which reads more state ahead, or {_TOKENS}",
    ),
    "wait_lease": (
        "a transfer waits for a free staging buffer",
        "a larger offload_param.buffer_count or offload_optimizer.buffer_count",
    ),
    "wait_ranks": (
        "a collective is under way: other ranks are slower, or bytes are on their way between ranks",
        _RANKS,
    ),
    "wait_activation": (
        "forward or backward waits for activations on their way",
        "a larger tiered_zero.activations.limit, or recomputing activations (torch.utils.checkpoint)",
    ),
    OTHER: ("the loop around the engine: data loading, logging", ""),
    "overlap": ("100%: a step takes no longer than its busiest resource; 0%: resources work one after another", ""),
}
"""Name in a report -> (its meaning, what to change if it takes the largest part of a step). "": no change is known."""


def remedy_of(lane: str) -> str:
    """Return what to change if the lane or named wait `lane` takes the largest part of a step; "" if not known."""
    return NAMES.get(lane, ("", ""))[1]


def explain_prediction(report: RunReport) -> str:
    """Return a text that compares the predicted and measured seconds of a step, and names the lane with the largest
    error. "" if there is no prediction."""
    rows = report.prediction_rows()
    if len(rows) < 2:
        return ""
    (_, predicted, measured), *lanes = rows
    lane, s, busy_s = max(lanes, key=lambda row: abs(row[1] - row[2]))
    return (
        f"Predicted were {predicted:.3g} s a step ({predicted / measured - 1:+.0%}). The largest miss is {lane}: "
        f"{s:.3g} s predicted, {busy_s:.3g} s busy."
    )


def explain_pace(report: RunReport) -> str:
    """Return a text: what takes the largest part of a typical step, and what would shorten it. "" if there are no
    steps."""
    if not report.busy_s or not report.step_s:
        return ""
    lane = max(report.busy_s, key=lambda name: report.busy_s[name])
    shares = {cause: seconds / report.step_s for cause, seconds in report.seconds.items()}
    busy = min(1.0, report.busy_s[lane] / report.step_s)
    doing, remedy = NAMES.get(lane, (lane, ""))
    if lane in ("compute", "update") and report.cpu_share is not None and report.cpu_share < CPU_SHARE:
        return (
            f"In a typical step ({report.step_s:.3g} s) this process got {report.cpu_share:.0%} of the CPU seconds "
            "that its threads could have: other processes hold the cores, or its operations are too small to keep all "
            f"threads at work. What can shorten it: fewer other processes, or {_TOKENS}."
        )
    outside = shares.get(OTHER, 0.0)
    if outside >= OUTSIDE_SHARE:
        return (
            f"{outside:.0%} of a typical step ({report.step_s:.3g} s) passes outside of the engine, in the loop around "
            "it. Look at data loading and logging first."
        )
    if busy >= BUSY_SHARE:
        text = f"A typical step takes {report.step_s:.3g} s, of which {doing} takes {busy:.0%}."
        offloads = sum(report.planned_nbytes.get(tier, 0) for tier in TIERS[1:])
        cheap = " Offloading costs little here." if lane == "compute" and offloads else ""
        return f"{text}{cheap}{_advise(remedy)}"
    waits = {cause: share for cause, share in shares.items() if is_wait(cause) and share >= WAIT_SHARE}
    if waits:
        cause = max(waits, key=lambda name: waits[name])
        if not (lane.startswith("disk") and cause != "wait_grad"):
            remedy = remedy_of(cause)
        return (
            f"{waits[cause]:.0%} of a typical step ({report.step_s:.3g} s) passes while "
            f"{NAMES.get(cause, (cause, ''))[0]} ({cause}). The busiest resource is {doing}, with {busy:.0%}."
            f"{_advise(remedy)}"
        )
    return (
        f"A typical step takes {report.step_s:.3g} s. No resource and no wait takes most of it; its busiest resource "
        f"is {doing}, with {busy:.0%}."
    )


def _advise(remedy: str) -> str:
    return f" What can shorten it, as far as there is room: {remedy}." if remedy else ""
