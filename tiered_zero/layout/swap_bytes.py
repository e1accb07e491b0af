"""Bytes on NVMe from sizes alone: how flats are padded, how stripes are laid, what a GPT needs in each directory.

Standard library only and nothing of this package, so that tools/swap_capacity.py runs from this one file on a storage
host. The package takes its own arithmetic from here: `flat` the padding, `units` the cap, `store` the stripes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

PAGE_NBYTES = 4096

PARAM_ALIGNMENT_NBYTES = 128
"""Start of each parameter in its flat: a whole cache line pair, which every GEMM library is content with."""

CUT_NUMEL = PAGE_NBYTES // 2
"""Flats end and sub-groups cut at multiples of this many elements: a page even in 16 bit, so that any tier can write a
cut part.
"""

AUTO_SUB_GROUP_NUMEL = 1 << 20
"""Elements of a sub-group that nobody sized: 12 MiB of fp32 Adam state. With many of them on their way the disk never
runs dry, and the next forward waits for less at a time; 48 MiB and three on their way took a tenth longer a step.
"""

MAX_SUB_GROUP_NUMEL = 1 << 22
"""More than so many elements are not asked for: DeepSpeed's default, 1e9, stands in most configs, and would make one
sub-group of a small model, with nothing to move beside its update.
"""

QUANTIZED_BLOCK_NUMEL = PARAM_ALIGNMENT_NBYTES // 4
"""Moments of 8 bits that share a scale. Every parameter starts with a block, in any dtype; cuts fall between two."""

MAX_UNIT_NUMEL = 1 << 28
"""A quarter of a billion elements: half a GiB in 16 bit, far past the size at which any link is at full rate."""

STRIPE_NBYTES = 4 << 20
"""One stripe: large enough for a disk to run at full rate, small enough that one record uses every disk."""

STRIPES_A_TURN = 64
"""Stripes in one turn over all paths; a weight is met to within 1/128 of the whole."""


def align_up(value: int, alignment: int) -> int:
    """As in sizes.py."""
    return -(-value // alignment) * alignment


# Flats.


def param_starts(numels: Sequence[int], itemsize: int) -> list[int]:
    """First element of each parameter in their flat, one after another."""
    starts, position = [], 0
    for numel in numels:
        starts.append(position)
        position = align_up(position + numel, max(1, PARAM_ALIGNMENT_NBYTES // itemsize))
    return starts


def flat_numel(stop: int, itemsize: int, world_size: int = 1) -> int:
    """Elements of a flat whose last parameter ends at `stop`: padded so that each rank's shard is whole pages."""
    return align_up(stop, max(CUT_NUMEL, PAGE_NBYTES // itemsize) * world_size)


def unit_cap(total_numel: int, given: int | None) -> int:
    """Most elements of a unit: at least four units where the model has them."""
    return given or min(MAX_UNIT_NUMEL, max(1, total_numel // 4))


# Sub-groups, and the tiers of their state.

TIERS = ("device", "host", "nvme")
"""Fastest first."""


@dataclass(frozen=True)
class FlatSubGroup:
    """`stretches`: (index of the flat, its first element, elements). `embedding`: of embeddings, where they are cut
    apart.
    """

    stretches: tuple[tuple[int, int, int], ...]
    embedding: bool = False


def cut_flats(
    flats: Sequence[tuple[int, Sequence[tuple[int, int]]]], size_numel: int, elementwise: bool, apart: bool
) -> list[FlatSubGroup]:
    """Sub-groups of at most `size_numel` elements (rounded up to a page's worth) over flats in their order.

    `flats`: elements, and (start, stop) of each embedding in it. Cuts fall inside parameters if `elementwise`, else
    between flats only, so that a larger flat is a sub-group alone. `apart`: embeddings share a sub-group with each
    other and with what lies in the same page; where cuts fall between flats only, with the rest of their flat.
    """
    limit = max(CUT_NUMEL, align_up(size_numel, CUT_NUMEL))
    subgroups: list[FlatSubGroup] = []
    stretches: list[tuple[int, int, int]] = []
    filled, kind = 0, False

    def close() -> None:
        nonlocal stretches, filled
        if stretches:
            subgroups.append(FlatSubGroup(tuple(stretches), kind))
        stretches, filled = [], 0

    for index, (flat, embeddings) in enumerate(flats):
        for start, stop, embedding in _stretches(flat, embeddings if apart else (), elementwise):
            if embedding != kind or (not elementwise and filled + stop - start > limit):
                close()
            kind = embedding
            while start < stop:
                numel = min(limit - filled, stop - start) if elementwise else stop - start
                stretches.append((index, start, numel))
                filled += numel
                start += numel
                if filled >= limit:
                    close()
    close()
    return subgroups


def _stretches(numel: int, embeddings: Sequence[tuple[int, int]], elementwise: bool) -> list[tuple[int, int, bool]]:
    """(start, stop, holds embeddings) of the parts of a flat, at cuts that any tier can write."""
    if not elementwise or not embeddings:
        return [(0, numel, bool(embeddings))]
    parts: list[tuple[int, int, bool]] = []
    position = 0
    for start, stop in embeddings:
        start, stop = start // CUT_NUMEL * CUT_NUMEL, align_up(stop, CUT_NUMEL)
        if parts and start <= position:
            parts[-1] = (parts[-1][0], stop, True)
        else:
            parts += [(position, start, False), (start, stop, True)]
        position = stop
    return [part for part in [*parts, (position, numel, False)] if part[0] < part[1]]


def is_split(last: str, ratio: float, limits: Mapping[str, int]) -> bool:
    """Whether `place_state` may use more tiers than one."""
    return last != "device" and (ratio < 1 or any(tier in limits for tier in TIERS[: TIERS.index(last)]))


def place_state(subgroups: Sequence[tuple[int, bool]], last: str, ratio: float, limits: Mapping[str, int]) -> list[str]:
    """The tier of each sub-group: as much as may rest on each faster tier than `last`, the others on `last`.

    `subgroups`: bytes, and whether it holds embeddings. `ratio`: the share of all bytes that leaves the device.
    `limits`: tier -> most bytes on it (on `last` the plan checks it). Embeddings come first, since their gradients are
    the last of a backward and they the first of a forward; then what the next forward needs first.
    """
    total = sum(nbytes for nbytes, _ in subgroups)
    room = {"device": round((1 - ratio) * total), **limits}
    tiers = [last] * len(subgroups)
    left = sorted(range(len(subgroups)), key=lambda index: (not subgroups[index][1], index))
    for tier in TIERS[: TIERS.index(last)]:
        free, passed = room.get(tier, 0), []
        for index in left:
            if subgroups[index][0] <= free:
                tiers[index] = tier
                free -= subgroups[index][0]
            else:
                passed.append(index)
        left = passed
    return tiers


# Stripes.


def stripe_turn(weights: Sequence[float]) -> list[int]:
    """File index of each stripe of a turn: file i occurs in proportion to weights[i], evenly spread."""
    credit = [0.0] * len(weights)
    turn = []
    for _ in range(STRIPES_A_TURN):
        credit = [have + weights[index] for index, have in enumerate(credit)]
        index = credit.index(max(credit))
        credit[index] -= sum(weights)
        turn.append(index)
    return turn


def file_nbytes(capacity_nbytes: int, weights: Sequence[float]) -> list[int]:
    """Bytes of each file of a store; they sum to the capacity exactly."""
    if len(weights) == 1:
        return [capacity_nbytes]
    turn = stripe_turn(weights)
    num_turns, rest = divmod(capacity_nbytes, STRIPE_NBYTES * len(turn))
    sizes = [num_turns * turn.count(index) * STRIPE_NBYTES for index in range(len(weights))]
    for index in turn:
        piece = min(rest, STRIPE_NBYTES)
        sizes[index] += piece
        rest -= piece
    return sizes


# The built-in GPT.


@dataclass(frozen=True)
class GPTShape:
    """demo/gpt.py's GPTConfig without torch. `heads` 0: one for each 64 channels."""

    layers: int = 8
    hidden: int = 384
    heads: int = 0
    vocab: int = 256
    context: int = 256
    tied: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for a shape that no GPT can have."""
        if not self.heads:
            object.__setattr__(self, "heads", max(1, self.hidden // 64))
        if min(self.layers, self.hidden, self.heads, self.vocab, self.context) < 1 or self.hidden % self.heads:
            raise ValueError(f"{self}: expected sizes of at least 1, and a hidden size that divides into its heads")

    def __str__(self) -> str:
        return "gpt:" + ",".join(f"{field.name}={int(getattr(self, field.name))}" for field in fields(self))

    @property
    def leaves(self) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Elements of each parameter of each leaf module: before the blocks, of one block, after them."""
        h = self.hidden
        block = [[h, h], [3 * h * h, 3 * h], [h * h, h], [h, h], [4 * h * h, 4 * h], [4 * h * h, h]]
        return [[self.vocab * h], [self.context * h]], block, [[h, h]] + ([] if self.tied else [[self.vocab * h]])

    @property
    def num_parameters(self) -> int:
        """Tied weights count once."""
        before, block, after = (sum(map(sum, leaves)) for leaves in self.leaves)
        return before + self.layers * block + after


def parse_gpt(text: str) -> GPTShape:
    """'gpt:layers=24,hidden=2048' -> its shape. Raises ValueError."""
    family, _, settings = text.partition(":")
    if family.strip() != "gpt":
        raise ValueError(f"the built-in model is written gpt:layers=24,hidden=2048; found {text!r}")
    known = [field.name for field in fields(GPTShape)]
    values: dict[str, Any] = {}
    for setting in filter(None, (part.strip() for part in settings.split(","))):
        name, _, number = (part.strip() for part in setting.partition("="))
        if name not in known or name in values:
            problem = "is given twice" if name in values else "is not one of its settings"
            raise ValueError(f"{text!r}: {name!r} {problem} ({', '.join(known)})")
        try:
            values[name] = int(number)
        except ValueError:
            raise ValueError(f"{text!r}: {name} must be a whole number, not {number!r}") from None
    if values.get("tied", 1) not in (0, 1):
        raise ValueError(f"{text!r}: tied must be 0 or 1")
    return GPTShape(**{**values, "tied": bool(values.get("tied", 1))})


def gpt_of_size(num_wanted: float) -> GPTShape:
    """A GPT of about that many parameters with the usual proportion, hidden = 128 * layers. Raises ValueError."""
    if not 1e6 <= num_wanted < float("inf"):
        raise ValueError(f"a model given by its size has at least 1e6 parameters, not {num_wanted:g}")
    hidden = max(64, round((num_wanted * 128 / 12) ** (1 / 3) / 64) * 64)
    one = GPTShape(layers=1, hidden=hidden)
    per_block = sum(map(sum, one.leaves[1]))
    return GPTShape(layers=max(1, round((num_wanted - one.num_parameters) / per_block) + 1), hidden=hidden)


# What a run needs.


@dataclass(frozen=True)
class SwapSettings:
    """What of a config decides the bytes on NVMe. `param_paths`, `state_paths`: empty where the device is not nvme.

    `itemsize`: of a compute parameter. `persistence_numel`: 0 where parameters are not paged. `state_arrays`: arrays a
    parameter, see `count_state_arrays`; with `whole_parameters` each is a page-aligned array of its own. `ratio`,
    `state_limits`: see `place_state`.
    """

    itemsize: int
    param_paths: tuple[str, ...] = ()
    state_paths: tuple[str, ...] = ()
    persistence_numel: int = 0
    max_persistent_numel: int = 1 << 62
    max_host_param_numel: int = 0
    unit_cap_numel: int | None = None
    state_arrays: int = 2
    whole_parameters: bool = False
    delayed: bool = False
    state_format: str = "fp32"
    sub_group_numel: int = AUTO_SUB_GROUP_NUMEL
    ratio: float = 1.0
    state_limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SwapNeed:
    """Bytes by kind, as the plan has them. `param_back`: the second home of the delayed update. `param_reads`: of each
    parameter in a step, for forward, for backward and, where masters are made of them, for the update.
    """

    param: int = 0
    param_back: int = 0
    state: int = 0
    param_reads: int = field(default=2, compare=False)

    @property
    def total(self) -> int:
        return self.param + self.param_back + self.state

    @property
    def written_a_step(self) -> int:
        """Masters, state and parameters once each; of two homes of the parameters, one."""
        return self.param + self.state

    @property
    def read_a_step(self) -> int:
        """Masters and state once, parameters as often as they are read."""
        return self.param_reads * self.param + self.state


NO_OPTIMIZER = "the config names no optimizer; two fp32 arrays per parameter are assumed, as Adam has them"

_STATE_ARRAYS = {"adam": 2, "adamw": 2, "adagrad": 1, "lion": 1, "adadelta": 2, "adamax": 2, "nadam": 2, "radam": 2}
_STATE_ARRAYS.update({"asgd": 1, "rprop": 2, "sgd": 0, "rmsprop": 1})
_ONE_MORE = {"amsgrad": ("adam", "adamw"), "momentum": ("sgd", "rmsprop"), "centered": ("rmsprop",)}


def count_state_arrays(name: str, params: Mapping[str, Any]) -> tuple[int, bool] | None:
    """`optimizer.type` and `.params` -> (fp32 arrays per parameter, whole parameters?); None for one not known here."""
    name = name.strip().lower()
    if name not in _STATE_ARRAYS:
        return None
    more = 0
    for option, names in _ONE_MORE.items():
        value = params.get(option)
        more += name in names and value not in (None, "auto") and float(value) != 0
    return _STATE_ARRAYS[name] + more, params.get("fused") is True


def gpt_need(shape: GPTShape, settings: SwapSettings) -> SwapNeed:
    """What layout/units.py, optim/state_layout.py and plan/planner.py come to for the built-in GPT, to the byte."""
    param = persistent_numel = 0
    room = settings.max_host_param_numel
    flats: list[tuple[int, list[tuple[int, int]]]] = []
    members_of: list[list[int]] = []
    for group in _groups(shape, settings.unit_cap_numel):
        units: dict[bool, list[tuple[int, bool]]] = {}
        for numel, embedding in group:
            persistent = (
                numel <= settings.persistence_numel and persistent_numel + numel <= settings.max_persistent_numel
            )
            persistent_numel += numel if persistent else 0
            units.setdefault(persistent, []).append((numel, embedding))
        for persistent, entries in units.items():
            members = [numel for numel, _ in entries]
            starts = param_starts(members, settings.itemsize)
            padded = flat_numel(starts[-1] + members[-1], settings.itemsize)
            spans = [(starts[i], starts[i] + numel) for i, (numel, embedding) in enumerate(entries) if embedding]
            flats.append((padded, spans))
            members_of.append(members)
            if persistent:
                continue
            if sum(members) <= room:
                room -= sum(members)
            else:
                param += padded * settings.itemsize
    param = param if settings.param_paths else 0
    state = _nvme_state(flats, members_of, settings) if settings.state_paths else 0
    reads = 3 if settings.state_format == "bf16_remainder" else 2
    return SwapNeed(param, param if settings.delayed else 0, state, reads)


STATE_ITEMSIZES = {
    "fp32": (4, 4),
    "bf16_remainder": (2, 4),
    "lossy_bf16_moments": (4, 2),
    "lossy_8bit_moments": (4, 1),
}
"""state_format -> bytes of a master, and of an element of a state array."""


def sub_group_numel(given: int) -> int:
    """Where sub-groups are cut. `given`: zero_optimization.sub_group_size."""
    return given if given <= MAX_SUB_GROUP_NUMEL else AUTO_SUB_GROUP_NUMEL


def _nvme_state(
    flats: Sequence[tuple[int, Sequence[tuple[int, int]]]], members_of: Sequence[Sequence[int]], settings: SwapSettings
) -> int:
    """Of an optimizer whose last tier is nvme. `members_of`: elements of the parameters of each flat."""
    apart = is_split("nvme", settings.ratio, settings.state_limits)
    if not apart and not settings.whole_parameters:  # cut anywhere: all sub-groups but the last are full
        size = max(CUT_NUMEL, align_up(settings.sub_group_numel, CUT_NUMEL))
        count, rest = divmod(sum(numel for numel, _ in flats), size)
        return count * _state_nbytes(size, (), settings) + _state_nbytes(rest, (), settings)
    sized = []
    for subgroup in cut_flats(flats, settings.sub_group_numel, not settings.whole_parameters, apart):
        numel = sum(numel for _, _, numel in subgroup.stretches)
        members = [member for index, _, _ in subgroup.stretches for member in members_of[index]]
        sized.append((_state_nbytes(numel, members, settings), subgroup.embedding))
    tiers = place_state(sized, "nvme", settings.ratio, settings.state_limits)
    return sum(nbytes for index, (nbytes, _) in enumerate(sized) if tiers[index] == "nvme")


def _state_nbytes(numel: int, members: Sequence[int], settings: SwapSettings) -> int:
    """Of a sub-group; with `whole_parameters` its parameters have `members` elements."""
    if settings.whole_parameters:
        return 4 * numel + settings.state_arrays * sum(align_up(4 * member, PAGE_NBYTES) for member in members)
    master, array = STATE_ITEMSIZES[settings.state_format]
    one = align_up(array * numel, PAGE_NBYTES)
    if settings.state_format == "lossy_8bit_moments":
        one += align_up(4 * numel // QUANTIZED_BLOCK_NUMEL, PAGE_NBYTES)
    return master * numel + settings.state_arrays * one


def _groups(shape: GPTShape, given_cap: int | None) -> list[list[tuple[int, bool]]]:
    """Elements of the parameters of each group that the walk of layout/units.py stops at, in its order, and whether
    each is an embedding.
    """
    before, block, after = ([[(numel, False) for numel in leaf] for leaf in leaves] for leaves in shape.leaves)
    before = [[(numel, True) for numel, _ in leaf] for leaf in before]
    total = shape.num_parameters
    cap = unit_cap(total, given_cap)
    whole_block = [[entry for leaf in block for entry in leaf]]
    if shape.layers == 1 and total <= cap:
        return [[entry for group in before + whole_block + after for entry in group]]
    whole = sum(numel for numel, _ in whole_block[0]) <= cap
    return before + (whole_block if whole else block) * shape.layers + after


# Directories and drives.


@dataclass(frozen=True)
class DirectoryNeed:
    """`written_a_step`: on average, where two homes of the parameters are written in turn."""

    path: str
    nbytes: int
    written_a_step: int


def directory_needs(need: SwapNeed, settings: SwapSettings) -> list[DirectoryNeed]:
    """A store a list of directories: parameters first, then state, in stripes over them. In the order of the config."""
    stores: dict[tuple[str, ...], list[int]] = {}
    in_params = (settings.param_paths, 0, need.param + need.param_back)
    for paths, place, nbytes in (in_params, (settings.state_paths, 1, need.state)):
        if nbytes:
            stores.setdefault(paths, [0, 0])[place] = nbytes
    found: dict[str, DirectoryNeed] = {}
    for paths, (params, state) in stores.items():
        weights = [1.0] * len(paths)
        sizes = file_nbytes(params + state, weights)
        unwritten = file_nbytes(params, weights) if need.param_back else [0] * len(paths)
        for index, path in enumerate(paths):
            before = found.get(path, DirectoryNeed(path, 0, 0))
            written = before.written_a_step + sizes[index] - unwritten[index] // 2
            found[path] = DirectoryNeed(path, before.nbytes + sizes[index], written)
    return list(found.values())


def capacity_report(
    model: str,
    num_parameters: int,
    need: SwapNeed,
    settings: SwapSettings,
    tbw: float | None = None,
    step_s: float | None = None,
    note: str = "",
) -> dict[str, Any]:
    """What a run needs, whether it fits, and how it wears the drives. `tbw`: TB (10**12 bytes) that one drive is rated
    to take; each file system counts as one drive. Its own bookkeeping, a few KiB a file, is not in these bytes."""
    drives: dict[int, dict[str, Any]] = {}
    directories = []
    for directory in directory_needs(need, settings):
        status, exists, free_nbytes = _look(directory.path)
        row = {"path": directory.path, "exists": exists, "nbytes": directory.nbytes}
        directories.append({**row, "written_nbytes_per_step": directory.written_a_step})
        drive = drives.setdefault(status.st_dev, {"directories": [], "nbytes": 0, "free_nbytes": free_nbytes})
        drive["directories"].append(directory.path)
        drive["nbytes"] += directory.nbytes
        drive["written_nbytes_per_step"] = drive.get("written_nbytes_per_step", 0) + directory.written_a_step
    for drive in drives.values():
        drive["fits"] = drive["nbytes"] <= drive["free_nbytes"]
        written = drive["written_nbytes_per_step"]
        if step_s is not None:
            drive["tb_per_day"] = written * 86400 / step_s / 1e12
        if tbw is not None:
            drive["steps_to_tbw"] = int(tbw * 1e12 // written)
        if tbw is not None and step_s is not None:
            drive["days_to_tbw"] = tbw / drive["tb_per_day"]
    return {
        "model": model,
        "num_parameters": num_parameters,
        "nbytes": need.total,
        "kinds": {"param": need.param, "param_back": need.param_back, "state": need.state},
        "written_nbytes_per_step": need.written_a_step if need.total else 0,
        "tbw": tbw,
        "step_seconds": step_s,
        "directories": directories,
        "drives": list(drives.values()),
        "fits": all(drive["fits"] for drive in drives.values()),
        "notes": [note] if note else [],
    }


def _look(path: str) -> tuple[os.stat_result, bool, int]:
    """Of a directory, or of the nearest one above it that exists: its status, whether it is itself, free bytes."""
    wanted = place = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    space = os.statvfs(place)
    return os.stat(place), place == wanted, space.f_bavail * space.f_frsize


_KINDS = {"param": "parameters", "param_back": "parameters, second home", "state": "master weights and state"}


def capacity_lines(report: Mapping[str, Any]) -> list[str]:
    """The report in words."""
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
        verdict = f"fits, {size_text(spare)} to spare" if drive["fits"] else f"does NOT fit: {size_text(-spare)} short"
        lines.append(f"{_line('free there', drive['free_nbytes'])}  {verdict}{_names(report, drive)}")
    lines.append(_line("written per step", report["written_nbytes_per_step"]))
    for drive in report["drives"]:
        lines += [line + _names(report, drive) for line in _wear(report, drive)]
    return lines + [f"note: {note}" for note in report["notes"]]


def _wear(report: Mapping[str, Any], drive: Mapping[str, Any]) -> list[str]:
    lines = []
    if "steps_to_tbw" in drive:
        days = f", {drive['days_to_tbw']:,.1f} days" if "days_to_tbw" in drive else ""
        lines.append(f"{'endurance':<28}{report['tbw']:g} TB written after {drive['steps_to_tbw']:,} steps{days}")
    if "tb_per_day" in drive:
        lines.append(
            f"{'at ' + format(report['step_seconds'], 'g') + ' s per step':<28}{drive['tb_per_day']:.3g} TB per day"
        )
    return lines


def _names(report: Mapping[str, Any], drive: Mapping[str, Any]) -> str:
    """Which directories a line is about, where there is more than one drive."""
    return f"  [{', '.join(drive['directories'])}]" if len(report["drives"]) > 1 else ""


def _line(name: str, nbytes: int) -> str:
    return f"{name:<28}{size_text(nbytes):>10}  {nbytes:,} bytes"


def size_text(nbytes: float) -> str:
    """As sizes.format_nbytes."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
