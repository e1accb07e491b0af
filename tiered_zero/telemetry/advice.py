"""Why a run's steps take as long as they do: one sentence, and what to change. Pure."""

from __future__ import annotations

from tiered_zero.telemetry.report import OTHER, RunReport
from tiered_zero.telemetry.spans import is_wait

BUSY_SHARE = 0.7
"""A lane that is busy for so much of a step sets its pace."""

OUTSIDE_SHARE = 0.25
"""Where the loop around the engine takes so much of a step, it is named first."""

_DISK = (
    "More tokens per step (train_micro_batch_size_per_gpu, gradient_accumulation_steps), fewer bytes "
    "(tiered_zero.state_format, tiered_zero.state_limits.host) or more drives in nvme_path shorten it; "
    "`tiered-zero bench io` finds the drive's best settings."
)

_RANKS = (
    "Bytes and the slowest rank decide: more tokens per step (train_micro_batch_size_per_gpu, or at stages 0 and 1 "
    "gradient_accumulation_steps) and a faster network make it a smaller part."
)

_LANES = {
    "compute": (
        "the model's own compute",
        "Offloading costs little here: a faster device, or fewer tokens per step, makes steps shorter.",
    ),
    "gather": (
        "fetching parameters",
        "Keep more of them on the device (stage3_max_live_parameters, stage3_param_persistence_threshold), or take "
        "more tokens per step.",
    ),
    "reduce": (
        "carrying gradients to host memory",
        "Take a larger micro-batch in place of more accumulation, or keep a part of the optimizer on the device "
        "(offload_optimizer.ratio).",
    ),
    "update": (
        "the optimizer's update on the CPU",
        "Give the process more cores, take more tokens per step, or keep a part of the optimizer on the device "
        "(offload_optimizer.ratio).",
    ),
    "disk read": ("reading from the disk", _DISK),
    "disk write": ("writing to the disk", _DISK),
    "all_gather": ("gathering parameters from the other ranks", _RANKS),
    "reduce_scatter": ("summing gradients over the ranks", _RANKS),
}
"""Lane -> what it does, and what to change where it sets the pace."""

_WAITS = {
    "wait_param": "Raise stage3_prefetch_bucket_size or stage3_max_live_parameters, so that more is fetched ahead.",
    "wait_update": "More tokens per step or more cores hide it; tiered_zero.update delayed too, with other numbers.",
    "wait_grad": "Raise tiered_zero.device_memory_limit, so that more gradients may be on their way.",
    "wait_state": "Raise offload_optimizer.buffer_count, so that more state is read ahead.",
    "wait_lease": "Raise offload_param.buffer_count or offload_optimizer.buffer_count.",
    "wait_ranks": "More micro-batches a step (gradient_accumulation_steps) or larger ones; even work on all ranks.",
}

MEANINGS = {
    "forward": "the model's forward, without the waits inside it",
    "backward": "the model's backward, without the waits inside it",
    "step": "the gradient check and what step() does itself",
    "update": "the optimizer's update",
    "gather": "parameters on their way to the device",
    "reduce": "gradients on their way to their home",
    "disk read": "reads from the swap directory",
    "disk write": "writes to the swap directory",
    "all_gather": "parameters from the other ranks, waits for them included",
    "reduce_scatter": "gradients summed over the ranks, waits for them included",
    "wait_param": "compute waits for parameters to arrive",
    "wait_update": "compute waits for an update that is not finished",
    "wait_grad": "backward waits until older gradients have arrived",
    "wait_state": "the update waits for optimizer state to be read or written",
    "wait_lease": "a transfer waits for a free staging buffer",
    "wait_ranks": "a collective is under way: other ranks are slower, or bytes are on their way between ranks",
    OTHER: "the loop around the engine: data loading, logging",
    "overlap": "100%: a step takes no longer than its busiest resource; 0%: resources work one after another",
}
"""What the names in a report mean."""


def explain_pace(report: RunReport) -> str:
    """Two sentences: what sets the pace of a typical step, and what to change. "" for a run without a step."""
    if not report.busy_s or not report.step_s:
        return ""
    lane = max(report.busy_s, key=lambda name: report.busy_s[name])
    shares = {cause: seconds / report.step_s for cause, seconds in report.seconds.items()}
    busy = min(1.0, report.busy_s[lane] / report.step_s)
    doing, change = _LANES.get(lane, (lane, ""))
    outside = shares.get(OTHER, 0.0)
    if outside >= OUTSIDE_SHARE:
        return (
            f"{outside:.0%} of a typical step ({report.step_s:.3g} s) passes outside of the engine, in the loop around "
            "it. Look at data loading, logging and evaluation first."
        )
    if busy >= BUSY_SHARE:
        return f"A typical step takes {report.step_s:.3g} s, of which {doing} takes {busy:.0%}. {change}"
    waits = {cause: share for cause, share in shares.items() if is_wait(cause)}
    if waits:
        cause = max(waits, key=lambda name: waits[name])
        of_disk = cause == "wait_update" and lane.startswith("disk")
        change = change if of_disk else _WAITS.get(cause, "")
        return (
            f"{waits[cause]:.0%} of a typical step ({report.step_s:.3g} s) passes while {MEANINGS.get(cause, cause)}"
            f" ({cause}). The busiest resource is {doing}, with {busy:.0%}. {change}"
        ).rstrip()
    return f"A typical step takes {report.step_s:.3g} s; its busiest resource is {doing}, with {busy:.0%}. {change}"
