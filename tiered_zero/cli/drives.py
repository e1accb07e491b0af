"""Say what a plan needs in its swap directories, and whether it fits, on this machine's file systems or on disks of a
described machine."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tiered_zero.layout.extents import file_nbytes
from tiered_zero.plan.machine import Disk
from tiered_zero.plan.traffic import written_on_nvme
from tiered_zero.sizes import PAGE_NBYTES, align_up, format_nbytes

if TYPE_CHECKING:
    from tiered_zero.assembly.spec import RunSpec

_WRITTEN = "written_nbytes_per_step"


def written_per_step(run: RunSpec) -> tuple[int, int]:
    """Bytes of trained parameters, and of masters and state with the gradients that find no window. Of two homes, or
    two slots for commits, a step writes one."""
    in_backward, accumulation = run.plan.update_policy.optimizer_in_backward, run.config.gradient_accumulation_steps
    written = written_on_nvme(run.plan.units, accumulation, in_backward=in_backward)
    return written["param"], written["state"] + written["gradient"]


def written_per_commit(run: RunSpec) -> int:
    """Bytes copied from memory to one of their two places; what is frozen has one, and is written once."""
    return sum(slot.nbytes for slot in run.slots if slot.kind == "commit_copy" and slot.num_durable > 1)


def directory_needs(run: RunSpec, ranks: int = 1) -> list[dict[str, Any]]:
    """Return rows of the directories of the stores that the run would open, parameters and state first: what `ranks` of
    one host need there, and write in a step, with an in-place commit after each. Stripes are of one size, as on drives
    of one speed. Activations are not in what is written."""
    from tiered_zero.tiers.rack import nvme_needs, scratch_needs  # imports torch, which no help text needs

    zero = run.config.zero_optimization
    stores = (zero.offload_param.nvme_paths, zero.offload_optimizer.nvme_paths)
    written = Counter[tuple[str, ...]]()
    for paths, nbytes in zip(stores, written_per_step(run), strict=True):
        written[paths] += nbytes
    written[stores[1]] += align_up(written_per_commit(run), PAGE_NBYTES)
    rows: dict[str, dict[str, Any]] = {}
    for paths, nbytes in (*nvme_needs(run.config, run.plan).items(), *scratch_needs(run.config, run.plan).values()):
        for name, total in {"nbytes": nbytes, _WRITTEN: written.pop(paths, 0)}.items():
            for path, share in zip(paths, file_nbytes(total, [1.0] * len(paths)), strict=True):
                row = rows.setdefault(path, {"path": path, "nbytes": 0, _WRITTEN: 0})
                row[name] += ranks * share
    return [*rows.values()]


def look_at_drives(needs: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the directories with what exists, and rows of their file systems: what is needed and free
    there, and whether it fits."""
    directories = []
    drives: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    for need in needs:
        status, exists, free_nbytes = _look(need["path"])
        directories.append({**need, "exists": exists})
        drives.setdefault(status.st_dev, (free_nbytes, []))[1].append(need)
    return directories, [_drive_row(own, free_nbytes) for free_nbytes, own in drives.values()]


def fill_drives(needs: Sequence[dict[str, Any]], disks: Sequence[Disk]) -> list[dict[str, Any]]:
    """Return rows as `look_at_drives` does. As many disks as directories have one each, in the order of the config;
    other numbers of disks share all bytes evenly, as `nvme_path` with a directory on each has them."""
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


def _look(path: str) -> tuple[os.stat_result, bool, int]:
    """Look at a directory, or the nearest one above it that exists: its status, whether it is itself, free bytes."""
    wanted = place = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    return os.stat(place), place == wanted, shutil.disk_usage(place).free


def drive_lines(directories: Sequence[Mapping[str, Any]], drives: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what the swap directories need and have, or the disks of a described machine; and what a step moves."""
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
    """Yield what does not fit onto disks."""
    for drive in drives:
        if not drive["fits"]:
            free = format_nbytes(drive["free_nbytes"])
            found = f"disk {drive['disk']} has {free}" if "disk" in drive else f"{free} are free there"
            way = "Give a larger disk, or more" if "disk" in drive else "Free space, or name another disk in nvme_path"
            yield (
                f"The plan needs {format_nbytes(drive['nbytes'])} in {', '.join(drive['directories'])}; {found}. {way}."
            )
