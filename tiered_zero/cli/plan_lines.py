"""Compute and format parts of `tiered-zero plan`: the space and wear of drives, activations, and a step's seconds."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tiered_zero.io.select import nearest_directory
from tiered_zero.layout.extents import file_nbytes
from tiered_zero.plan.machine import Disk
from tiered_zero.sizes import PAGE_NBYTES, TIERS, align_up, format_nbytes
from tiered_zero.telemetry.advice import remedy_of

if TYPE_CHECKING:
    from tiered_zero.assembly.spec import RunSpec
    from tiered_zero.plan.activations import ActivationEstimate
    from tiered_zero.plan.machine import Machine
    from tiered_zero.plan.planner import Plan
    from tiered_zero.plan.step_time import StepSeconds


_WRITTEN = "written_nbytes_per_step"
_NO_ESTIMATE = (
    "Activations are not estimated: the model does not say its hidden size, layers and length (--sequence-length)."
)


def written_per_commit(run: RunSpec) -> int:
    """Return the bytes that one in-place commit copies from memory to disk."""
    # frozen values have one place on disk, written once
    return sum(slot.nbytes for slot in run.plan.slots if slot.kind == "commit_copy" and slot.num_durable > 1)


def directory_needs(run: RunSpec, ranks: int = 1, activation_nbytes: int = 0) -> list[dict[str, Any]]:
    """Return a row for each swap directory. Its keys: "path"; "nbytes", the bytes that `ranks` ranks need there;
    _WRITTEN, the bytes that they write in a step and its in-place commit. `activation_nbytes`: bytes of activations
    that one micro-batch saves."""
    from tiered_zero.tiers.rack import nvme_needs, scratch_needs  # imports torch, which no help text needs

    zero = run.config.zero_optimization
    stores = (zero.offload_param.nvme_paths, zero.offload_optimizer.nvme_paths)
    scratch = scratch_needs(run.config, run.plan)
    written = Counter[tuple[str, ...]]()
    in_step = run.plan.written_nbytes(run.config.gradient_accumulation_steps, activation_nbytes)
    written[stores[0]] += in_step["param"]
    written[stores[1]] += in_step["state"] + in_step["gradient"] + align_up(written_per_commit(run), PAGE_NBYTES)
    written[run.config.tiered_zero.activations.nvme_paths] += in_step["activation"]
    rows: dict[str, dict[str, Any]] = {}
    for paths, nbytes in (*nvme_needs(run.config, run.plan).items(), *scratch.values()):
        for name, total in {"nbytes": nbytes, _WRITTEN: written.pop(paths, 0)}.items():
            # equal parts of a striped file, as on drives of one speed
            for path, share in zip(paths, file_nbytes(total, [1.0] * len(paths)), strict=True):
                row = rows.setdefault(path, {"path": path, "nbytes": 0, _WRITTEN: 0})
                row[name] += ranks * share
    return [*rows.values()]


def look_at_drives(needs: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return `needs` with "exists" added, and a row for each file system: bytes needed, bytes free, and whether they
    fit. `needs`: rows of `directory_needs`."""
    directories = []
    drives: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    for need in needs:
        place = nearest_directory(need["path"])
        exists = place == os.path.abspath(os.path.expanduser(need["path"]))
        directories.append({**need, "exists": exists})
        drives.setdefault(os.stat(place).st_dev, (shutil.disk_usage(place).free, []))[1].append(need)
    return directories, [_drive_row(own, free_nbytes) for free_nbytes, own in drives.values()]


def fill_drives(needs: Sequence[dict[str, Any]], disks: Sequence[Disk]) -> list[dict[str, Any]]:
    """Spread `needs`, the rows of `directory_needs`, over `disks`. If there are as many disks as directories, disk i
    gets directory i. Otherwise each disk gets an equal share of all directories. Return a row for each disk: its
    directories, the bytes that are needed, free and written per step, its rates, and its rated endurance."""
    rows = []
    for index, disk in enumerate(disks):
        own, shares = (needs[index : index + 1], 1) if len(disks) == len(needs) else (needs, len(disks))
        rates = {"read_bytes_per_s": disk.read_bytes_per_s, "write_bytes_per_s": disk.write_bytes_per_s}
        row = _drive_row(own, disk.nbytes or 0, shares)
        if disk.rated_nbytes and row[_WRITTEN]:
            row["steps_to_tbw"] = disk.rated_nbytes // row[_WRITTEN]
        rows.append({"disk": disk.path, **row, **rates, "rated_nbytes": disk.rated_nbytes})
    return rows


def _drive_row(needs: Sequence[dict[str, Any]], free_nbytes: int, shares: int = 1) -> dict[str, Any]:
    nbytes = -(-sum(need["nbytes"] for need in needs) // shares)
    return {
        "directories": [need["path"] for need in needs],
        "nbytes": nbytes,
        "free_nbytes": free_nbytes,
        "fits": nbytes <= free_nbytes,
        _WRITTEN: -(-sum(need[_WRITTEN] for need in needs) // shares),
    }


def drive_lines(directories: Sequence[Mapping[str, Any]], drives: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield lines about each directory or disk: bytes needed, free and written in a step, and the steps until the
    disk's rated writes are used up."""
    free = {path: drive["free_nbytes"] for drive in drives for path in drive["directories"]}
    given = any("disk" in drive for drive in drives)
    for row in () if given else directories:
        exists = "" if row["exists"] else " (it does not exist yet)"
        path = row["path"]
        yield f"nvme_path {path}: {format_nbytes(row['nbytes'])} of {format_nbytes(free[path])} that are free{exists}"
    for drive in drives:
        names = ", ".join(drive["directories"])
        if given:
            where = f"disk {drive['disk']} (nvme_path {names})"
            yield f"{where}: {format_nbytes(drive['nbytes'])} of {format_nbytes(drive['free_nbytes'])}"
        which = "" if given or len(drives) == 1 else f"the drive of {names}: "
        yield f"  {which}a step writes {format_nbytes(drive[_WRITTEN])}"
        if "steps_to_tbw" in drive:
            rated, steps = drive["rated_nbytes"] / 1e12, drive["steps_to_tbw"]
            yield f"  what it is rated for ({rated:g} TB) is written after {steps:,} steps"


def drive_problems(drives: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each drive that is too small."""
    for drive in drives:
        if not drive["fits"]:
            free = format_nbytes(drive["free_nbytes"])
            found = f"disk {drive['disk']} has {free}" if "disk" in drive else f"{free} are free there"
            way = "Give a larger disk, or more" if "disk" in drive else "Free space, or name another disk in nvme_path"
            yield (
                f"The plan needs {format_nbytes(drive['nbytes'])} in {', '.join(drive['directories'])}; {found}. {way}."
            )


def estimate_lines(
    estimate: ActivationEstimate | None, plan: Plan, device_nbytes: int | None, *, is_given: bool
) -> tuple[list[str], str]:
    """Return lines about the activations of a micro-batch, and a problem. The problem is a sentence if the activations
    do not fit and `is_given` is true; otherwise it is "". `is_given`: whether the user gave the length of a sample.
    `estimate`, `device_nbytes`: None if unknown."""
    if estimate is None:
        return [_NO_ESTIMATE], ""
    length = "" if is_given else " (the most that the model takes; --sequence-length TOKENS sets another)"
    lines = [
        f"In addition to the plan, estimated for a micro-batch of {estimate.tokens:,} tokens{length} with each block "
        f"in a checkpoint: inputs of {estimate.num_boundaries} blocks {format_nbytes(estimate.boundaries_nbytes)}, one "
        f"block's activations {format_nbytes(estimate.block_nbytes)}, logits with their loss "
        f"{format_nbytes(estimate.logits_nbytes)}."
    ]
    if plan.activations is not None:
        offloaded = format_nbytes(estimate.offloaded_nbytes(plan.activations))
        lines.append(f"{offloaded} of the inputs fit the budget on {plan.activations.tier}.")
    tier = plan.request.computing_tier
    size = plan.limits.get(tier, (None, ""))[0] if device_nbytes is None else device_nbytes
    if size is None:
        return lines, ""
    needed, room = estimate.needed_nbytes(plan.activations), size - plan.needed_nbytes(tier)
    fact = (
        f"they need {format_nbytes(needed)} of {tier} memory; the plan leaves {format_nbytes(max(0, room))} of "
        f"{format_nbytes(size)}"
    )
    if needed <= room:
        return [*lines, f"In sum {fact}."], ""
    way = "the placement is the cause, not the number of tokens"
    if room > 0:
        way = "take fewer tokens a micro-batch, offload inputs (tiered_zero.activations), or compute the loss in parts"
    if is_given:
        return lines, f"Activations do not fit: {fact}. {way[0].upper()}{way[1:]}."
    return [*lines, f"In sum {fact}, so they do not fit: {way}."], ""


def seconds_facts(step: StepSeconds) -> dict[str, Any]:
    """Return for `--json` what `seconds_lines` prints: the prediction of a step's seconds."""
    return {
        **asdict(step),
        "tokens_per_s": step.tokens_per_s,
        "bound_by": step.bound_by,
        "shorter_by": remedy_of(step.bound_by),
    }


def seconds_lines(step: StepSeconds, plan: Plan, machine: Machine) -> Iterator[str]:
    """Yield lines about the predicted step: its seconds by resource, the least tokens per step that hide each tier's
    transfers, and what would shorten the step."""
    sizes = ((tier, plan.nbytes(tier)) for tier in TIERS)
    yield f"Predicted step on {machine.name}:"
    yield f"  bytes     {', '.join(f'{tier} {format_nbytes(nbytes)}' for tier, nbytes in sizes if nbytes)}"
    rate = f"{step.tokens_per_s:,.0f} tokens/s"
    yield f"  seconds   {step.seconds:.3g} for {step.tokens:,} tokens, {rate}; bound by {step.bound_by}"
    for lane, seconds in step.by_resource.items():
        if seconds:
            yield f"  {seconds:9.3g}   {lane} ({seconds / step.seconds:.0%} busy)"
    for tier, tokens in step.hidden_from_tokens.items():
        up_to = f"no, it adds time at every step of up to {step.searched_tokens[tier]:,} tokens"
        yield f"  hidden    {tier}: {up_to if tokens is None else f'from {tokens:,} tokens a step on'}"
    if remedy := remedy_of(step.bound_by):
        yield f"  shorter   by {remedy}, as far as there is room"
