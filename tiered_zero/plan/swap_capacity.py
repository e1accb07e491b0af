"""Bytes on NVMe of a run of the built-in GPT: what its plan says, whether that fits, and how it wears the drives.

It runs on a storage host without torch: config, layout and planner are a run's; only optimizer state is counted here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered_zero.config.schema import Config, ZeroSection
from tiered_zero.errors import ConfigError
from tiered_zero.layout.extents import file_nbytes
from tiered_zero.layout.flat import CUT_NUMEL, DType
from tiered_zero.layout.subgroups import QUANTIZED_BLOCK_NUMEL, cut_subgroups, sub_group_numel
from tiered_zero.layout.units import find_units
from tiered_zero.plan.gpt_shape import GPTConfig, describe_gpt, num_parameters
from tiered_zero.plan.planner import Plan, make_plan
from tiered_zero.plan.request import SubGroupSize, plan_request, unit_rules
from tiered_zero.sizes import PAGE_NBYTES, align_up, format_nbytes

_KINDS = {
    "param": "parameters",
    "param_back": "parameters, second home",
    "state": "master weights and state",
    "commit_param": "parameters, for commits",
    "commit": "masters and state, likewise",
    "commit_copy": "kept from memory, likewise",
    "gradient": "gradients",
    "activation": "activations, their budget",
}
"""Of the rows of a plan for nvme, in words of at most 26 characters."""

_NO_OPTIMIZER = "the config names no optimizer; two fp32 arrays per parameter are assumed, as Adam has them"

_WRITTEN_BESIDES = {
    "gradient": "gradients are written besides: at most their bytes in each micro-batch, in their own store",
    "activation": "activations are written besides: as many bytes a step as forward saves, in their own store",
}

_STATE_ARRAYS = {"adam": 2, "adamw": 2, "adagrad": 1, "lion": 1, "adadelta": 2, "adamax": 2, "nadam": 2, "radam": 2}
_STATE_ARRAYS.update({"asgd": 1, "rprop": 2, "sgd": 0, "rmsprop": 1})
_ONE_MORE = {"amsgrad": ("adam", "adamw"), "momentum": ("sgd", "rmsprop"), "centered": ("rmsprop",)}
"""Optimizer's argument -> the optimizers that keep one more array with it."""

STATE_ITEMSIZES = {"fp32": (4, 4), "bf16_remainder": (2, 4), "lossy_bf16_moments": (4, 2), "lossy_8bit_moments": (4, 1)}
"""state_format -> bytes of a master, and of an element of a state array."""


@dataclass(frozen=True, kw_only=True)
class SwapNeed:
    """Bytes by kind, as the plan has them. `param_back`: the second home of the delayed update. `commit_param`,
    `commit`, `commit_copy`: what in-place commits take besides. `activation`: their budget. `param_reads`: of each
    parameter in a step, for forward, for backward and, where masters are made of them, for the update.
    """

    param: int = 0
    param_back: int = 0
    state: int = 0
    commit_param: int = 0
    commit: int = 0
    commit_copy: int = 0
    gradient: int = 0
    activation: int = 0
    param_reads: int = field(default=2, compare=False)

    @classmethod
    def of(cls, plan: Plan) -> SwapNeed:
        """Read the NVMe rows of a plan."""
        kinds = {kind: plan.nbytes("nvme", kind) for kind in _KINDS}
        return cls(**kinds, param_reads=3 if plan.request.state.format == "bf16_remainder" else 2)

    @property
    def total(self) -> int:
        return self.param_store + self.state_store + self.gradient + self.activation

    @property
    def param_store(self) -> int:
        """Bytes of the store that holds parameters."""
        return self.param + self.param_back + self.commit_param

    @property
    def state_store(self) -> int:
        """Bytes of the store that holds masters and state."""
        return self.state + self.commit + self.commit_copy

    @property
    def written_per_step(self) -> int:
        """Masters, state and parameters once each; of two homes of the parameters one, and of two slots one."""
        return self.param + self.state

    @property
    def written_per_commit(self) -> int:
        """Parameters copied from memory, one of their two places. The built-in GPT has no frozen ones, which are
        written once."""
        return self.commit_copy // 2

    @property
    def read_per_step(self) -> int:
        """Masters and state once, parameters as often as they are read."""
        return self.param_reads * self.param + self.state


@dataclass(frozen=True, kw_only=True)
class StateArrays:
    """`count` arrays of optimizer state a parameter. `whole`: each is a page-aligned array of its own, for a rule that
    steps whole parameters; else it spans the sub-group.
    """

    count: int
    whole: bool
    format: str

    def nbytes(self, numel: int, params: Iterable[int] = ()) -> int:
        """Bytes of a sub-group's slot, as rules/state_layout.py lays it. `params`: elements of each parameter in it."""
        if self.whole:
            return 4 * numel + self.count * sum(align_up(4 * param, PAGE_NBYTES) for param in params)
        master, itemsize = STATE_ITEMSIZES[self.format]
        array = align_up(itemsize * numel, PAGE_NBYTES)
        if self.format == "lossy_8bit_moments":
            array += align_up(4 * numel // QUANTIZED_BLOCK_NUMEL, PAGE_NBYTES)
        return master * numel + self.count * array


def state_arrays(config: Config) -> StateArrays | None:
    """Count the state of the config's optimizer, Adam's without one; None for an optimizer not known here."""
    name, params = (config.optimizer.type, config.optimizer.params) if config.optimizer else ("adamw", {})
    name = name.strip().lower()
    if name not in _STATE_ARRAYS:
        return None
    more = 0
    for option, names in _ONE_MORE.items():
        more += name in names and params.get(option) is not None and float(params[option]) != 0
    state_format = config.tiered_zero.state_format
    whole = params.get("fused") is True and state_format == "fp32"
    return StateArrays(count=_STATE_ARRAYS[name] + more, whole=whole, format=state_format)


def plan_gpt(config: Config, shape: GPTConfig) -> Plan:
    """Plan what rests where in a run of the built-in GPT on a GPU, without the limits of a machine.

    Sub-groups on one tier are planned as one of their sum, for a model of 1e12 parameters has a million; so the staging
    of state is not the run's. Raises ConfigError for an optimizer whose state only torch can count.
    """
    arrays = state_arrays(config)
    if arrays is None:
        name = config.optimizer.type if config.optimizer else None
        raise ConfigError(f"optimizer.type {name!r} is not known here; `tiered-zero swap capacity` can try it")
    dtype = DType(name=config.param_dtype_name, itemsize=4 if config.param_dtype_name == "float32" else 2)
    tree, specs = describe_gpt(shape, dtype)
    units = find_units(tree, specs, unit_rules(config))
    request = plan_request(config, limits={}, shares_cores=False)
    size = sub_group_numel(config.zero_optimization.sub_group_size, units)
    if request.state.is_split or arrays.whole:
        group_of = {spec.name: 0 for spec in specs}
        sizes = [
            SubGroupSize(
                state_nbytes=arrays.nbytes(subgroup.numel, (piece.numel for piece in subgroup.pieces)),
                parts=subgroup.parts,
                embedding=subgroup.embedding,
            )
            for subgroup in cut_subgroups(
                units, group_of, size, elementwise=not arrays.whole, apart=request.state.is_split
            )
        ]
    else:
        parts = {unit.index: unit.numel for unit in units}
        count, rest = divmod(sum(parts.values()), align_up(size, CUT_NUMEL))
        state_nbytes = count * arrays.nbytes(align_up(size, CUT_NUMEL)) + arrays.nbytes(rest)
        sizes = [SubGroupSize(state_nbytes=state_nbytes, parts=parts)]
    return make_plan(units, sizes, request)


@dataclass(frozen=True, kw_only=True)
class DirectoryNeed:
    """`written_per_step`: on average, where two homes of the parameters are written in turn; commits included."""

    path: str
    nbytes: int
    written_per_step: int


def directory_needs(
    need: SwapNeed, zero: ZeroSection, save_every: int = 1, activation_paths: tuple[str, ...] = ()
) -> list[DirectoryNeed]:
    """List the directories in the order of the config: a store for each list of paths, striped over them, of parameters
    and state; then gradients and activations, in stores of their own. `save_every`: steps between in-place commits."""
    copied = align_up(-(-need.written_per_commit // save_every), PAGE_NBYTES)
    stores: dict[tuple[tuple[str, ...], str], list[int]] = {}
    state_paths = zero.offload_optimizer.nvme_paths
    for paths, own, nbytes, written in (
        (zero.offload_param.nvme_paths, "", need.param_store, need.param),
        (state_paths, "", need.state_store, need.state + copied),
        (state_paths, "gradient", need.gradient, 0),
        (activation_paths, "activation", need.activation, 0),
    ):
        if nbytes:
            sums = stores.setdefault((paths, own), [0, 0])
            sums[0], sums[1] = sums[0] + nbytes, sums[1] + written
    found: dict[str, DirectoryNeed] = {}
    for (paths, _), (total, per_step) in stores.items():
        weights = [1.0] * len(paths)
        sizes, parts = file_nbytes(total, weights), file_nbytes(per_step, weights)
        for index, path in enumerate(paths):
            before = found.get(path, DirectoryNeed(path=path, nbytes=0, written_per_step=0))
            written = before.written_per_step + parts[index]
            found[path] = DirectoryNeed(path=path, nbytes=before.nbytes + sizes[index], written_per_step=written)
    return list(found.values())


def capacity_report(
    config: Config,
    shape: GPTConfig,
    need: SwapNeed,
    tbw: float | None = None,
    step_s: float | None = None,
    save_every: int = 1,
) -> dict[str, Any]:
    """Say what a run needs, whether it fits, and how it wears the drives.

    `tbw`: TB (10**12 bytes) that one drive is rated to take; each file system counts as one drive. `save_every`:
    steps from one in-place commit to the next. The store's own bookkeeping, a few KiB a file, is not in these bytes.
    """
    directories, drives = look_at_drives(
        directory_needs(need, config.zero_optimization, save_every, config.tiered_zero.activations.nvme_paths)
    )
    for drive in drives:
        written = drive["written_nbytes_per_step"]
        if step_s is not None:
            drive["tb_per_day"] = written * 86400 / step_s / 1e12
        if tbw is not None and written:
            drive["steps_to_tbw"] = int(tbw * 1e12 // written)
        if tbw is not None and step_s is not None and written:
            drive["days_to_tbw"] = tbw / drive["tb_per_day"]
    return {
        "model": str(shape),
        "num_parameters": num_parameters(shape),
        "nbytes": need.total,
        "kinds": {kind: getattr(need, kind) for kind in _KINDS},
        "written_nbytes_per_step": need.written_per_step if need.total else 0,
        "written_nbytes_per_commit": need.written_per_commit,
        "save_every": save_every,
        "tbw": tbw,
        "step_seconds": step_s,
        "directories": directories,
        "drives": drives,
        "fits": all(drive["fits"] for drive in drives),
        "notes": [_NO_OPTIMIZER] * (config.optimizer is None)
        + [note for kind, note in _WRITTEN_BESIDES.items() if getattr(need, kind)],
    }


def look_at_drives(needs: Iterable[DirectoryNeed]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows of the directories, and of their file systems: what is needed and free there, and whether it fits."""
    directories = []
    drives: dict[int, dict[str, Any]] = {}
    for need in needs:
        status, exists, free_nbytes = _look(need.path)
        row = {"path": need.path, "exists": exists, "nbytes": need.nbytes}
        directories.append({**row, "written_nbytes_per_step": need.written_per_step})
        empty = {"directories": [], "nbytes": 0, "free_nbytes": free_nbytes, "written_nbytes_per_step": 0}
        drive = drives.setdefault(status.st_dev, empty)
        drive["directories"].append(need.path)
        drive["nbytes"] += need.nbytes
        drive["fits"] = drive["nbytes"] <= drive["free_nbytes"]
        drive["written_nbytes_per_step"] += need.written_per_step
    return directories, list(drives.values())


def _look(path: str) -> tuple[os.stat_result, bool, int]:
    """Look at a directory, or the nearest one above it that exists: its status, whether it is itself, free bytes."""
    wanted = place = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    return os.stat(place), place == wanted, shutil.disk_usage(place).free


def capacity_lines(report: Mapping[str, Any]) -> list[str]:
    """Write the report in words."""
    lines = [f"{report['num_parameters']:,} parameters ({report['model']})"]
    if not report["nbytes"]:
        return [*lines, "Nothing rests on NVMe under this config."]
    lines.append(_line("needed on NVMe", report["nbytes"]))
    lines += [_line(f"  {_KINDS[kind]}", nbytes) for kind, nbytes in report["kinds"].items() if nbytes]
    lines.append("directories")
    for row in report["directories"]:
        lines.append(_line(f"  {row['path']}", row["nbytes"]) + ("" if row["exists"] else "  (does not exist yet)"))
    for drive in report["drives"]:
        spare = drive["free_nbytes"] - drive["nbytes"]
        short = f"does NOT fit: {format_nbytes(-spare)} short"
        fit = f"fits, {format_nbytes(spare)} to spare" if drive["fits"] else short
        lines.append(f"{_line('free there', drive['free_nbytes'])}  {fit}{_names(report, drive)}")
    lines.append(_line("written per step", report["written_nbytes_per_step"]))
    if nbytes := report["written_nbytes_per_commit"]:
        often = "each step" if report["save_every"] == 1 else f"every {report['save_every']} steps"
        lines.append(f"{_line('  and per commit', nbytes)}  (one after {often})")
    for drive in report["drives"]:
        lines += [line + _names(report, drive) for line in _wear(report, drive)]
    return lines + [f"note: {note}" for note in report["notes"]]


def _wear(report: Mapping[str, Any], drive: Mapping[str, Any]) -> list[str]:
    lines = []
    if "steps_to_tbw" in drive:
        days = f", {drive['days_to_tbw']:,.1f} days" if "days_to_tbw" in drive else ""
        lines.append(f"{'endurance':<28}{report['tbw']:g} TB written after {drive['steps_to_tbw']:,} steps{days}")
    if "tb_per_day" in drive:
        pace = f"at {report['step_seconds']:g} s per step"
        lines.append(f"{pace:<28}{drive['tb_per_day']:.3g} TB per day")
    return lines


def _names(report: Mapping[str, Any], drive: Mapping[str, Any]) -> str:
    """Return the directories that a line is about, where there is more than one drive."""
    return f"  [{', '.join(drive['directories'])}]" if len(report["drives"]) > 1 else ""


def _line(name: str, nbytes: int) -> str:
    return f"{name:<28}{format_nbytes(nbytes):>10}  {nbytes:,} bytes"
