"""Describe a machine for plans: sizes and rates, measured (hardware/check.py) or given in a file or by options."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from tiered_zero.config.load import read_json
from tiered_zero.errors import ConfigError
from tiered_zero.sizes import parse_hardware_nbytes


def _read_rate(text: str) -> int:
    """Return the bytes per second of a rate such as "7GB/s". Raises ValueError."""
    return parse_hardware_nbytes(text.strip().removesuffix("/s"))


def _read_tera(text: str, unit: str) -> int:
    """Read a number with T or P before `unit`, such as "1200TBW" or "1.2PBW". Raises ValueError."""
    found = re.fullmatch(rf"(\d+\.?\d*) *([tp]){unit}", text.strip().lower())
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r:.100} is no number above zero with T{unit.upper()} or P{unit.upper()}")
    return int(float(found[1]) * {"t": 10**12, "p": 10**15}[found[2]])


def _or_text(read: Callable[[str], int]) -> BeforeValidator:
    """Make a validator that accepts a number, or a text that `read` converts to a number."""
    return BeforeValidator(lambda value: read(value) if isinstance(value, str) else value)


_Nbytes = Annotated[int, _or_text(parse_hardware_nbytes), Field(gt=0)]
_Written = Annotated[int, _or_text(partial(_read_tera, unit="bw")), Field(gt=0)]
_Rate = Annotated[float, _or_text(_read_rate), Field(gt=0, allow_inf_nan=False)]
_PerSecond = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Flops = Annotated[float, _or_text(partial(_read_tera, unit="flops")), Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The disk of a directory, or a disk that a text describes. A field is None if its value is not known."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    path: str  # the directory, or the text
    nbytes: _Nbytes | None = None  # free for this user
    read_bytes_per_s: _Rate | None = None
    write_bytes_per_s: _Rate | None = None
    mixed_bytes_per_s: _Rate | None = None  # of reads and writes together, with as many bytes read as written
    rated_nbytes: _Written | None = None  # may be written in the disk's life, by its maker's rating

    def __post_init__(self) -> None:
        read, write = self.read_bytes_per_s, self.write_bytes_per_s
        if (read is None) != (write is None):
            raise ValueError("expected both read_bytes_per_s and write_bytes_per_s, or neither")
        if self.mixed_bytes_per_s is None and read and write:  # as if it read and wrote in turn
            object.__setattr__(self, "mixed_bytes_per_s", 2 / (1 / read + 1 / write))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Sizes and rates of a machine. A value that is not known is None, or missing in its mapping."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    name: str
    source: str = ""  # where the numbers come from
    date: str = ""  # of the measurement, ISO 8601
    num_cores: Annotated[int, Field(gt=0)] | None = None
    device: str = "cpu"  # or "cuda", ...
    device_nbytes: _Nbytes | None = None  # free for this user
    host_nbytes: _Nbytes | None = None  # free for this user
    flops_per_s: Mapping[str, _Flops] = field(default_factory=dict)  # "bf16", "fp16", "fp32" -> matrix products
    block_elements_per_s: Mapping[str, _PerSecond] = field(default_factory=dict)  # work besides products: elements
    logits_per_s: Mapping[str, _PerSecond] = field(default_factory=dict)  # dtype -> logits
    copy_bytes_per_s: _Rate | None = None  # read plus written by a copy within host memory
    update_bytes_per_s: _Rate | None = None  # read plus written by AdamW on all cores
    to_device_bytes_per_s: _Rate | None = None  # from pinned memory; None if the device is the CPU
    from_device_bytes_per_s: _Rate | None = None  # to pinned memory; None if the device is the CPU
    disks: tuple[Disk, ...] = ()

    def save(self, path: Path) -> None:
        """Write the machine to the file `path` as JSON, with mode 0600. Replaces an earlier file. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with open(temporary, "wb", opener=partial(os.open, mode=0o600)) as file:
            file.write(json.dumps(asdict(self), indent=2).encode() + b"\n")
        os.replace(temporary, path)


_READER: Final = TypeAdapter(Machine)


def load_machine(path: Path) -> Machine:
    """Read a machine from a JSON file, as `Machine.save` writes it. Sizes and rates may be text: "24GiB", "7GB/s",
    "150TFLOPS", "1200TBW". Raises ConfigError."""
    try:
        return _READER.validate_json(json.dumps(read_json(path)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path} describes no machine: {where:.200}: {first['msg']}.") from error


def default_path() -> Path:
    """Return the path of the file with the rates that were measured on this machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "tiered_zero" / "machine.json"


DESCRIBED = "the machine that options describe"
"""The name of a machine that only options describe."""


def from_description(
    base: Machine | None = None,
    *,
    device_nbytes: int | None = None,
    host_nbytes: int | None = None,
    disks: Sequence[Disk] = (),
) -> Machine:
    """Return `base` with the given sizes and disks instead of its own. If `base` is None, start from a machine without
    rates. If `device_nbytes` is given and the base has no accelerator, add one without rates."""
    machine = base or Machine(name=DESCRIBED)
    if device_nbytes is not None and machine.device == "cpu":  # add an accelerator without known rates
        machine = replace(machine, device="cuda", flops_per_s={}, block_elements_per_s={}, logits_per_s={})
    return replace(
        machine,
        device_nbytes=device_nbytes or machine.device_nbytes,
        host_nbytes=host_nbytes or machine.host_nbytes,
        disks=tuple(disks) or machine.disks,
    )


def parse_disk(text: str) -> Disk:
    """Read a disk from text: "2TB", "2TB:7GB/s,5GB/s" or "2TB:7GB/s,5GB/s:1200TBW". Raises ConfigError."""
    size, rates, rating, *more = (*text.split(":"), "", "")
    try:
        if any(more):
            raise ValueError("it has more than three parts")
        both = [_read_rate(rate) for rate in rates.split(",")] if rates else []
        if rates and len(both) != 2:
            raise ValueError(f"{rates!r:.100} is not two rates, of reads and of writes")
        read, write = both or (None, None)
        return Disk(
            path=text,
            nbytes=parse_hardware_nbytes(size),
            read_bytes_per_s=read,
            write_bytes_per_s=write,
            rated_nbytes=_read_tera(rating, "bw") if rating else None,
        )
    except ValueError as error:
        form = "expected SIZE[:READ,WRITE[:TBW]], such as 2TB:7GB/s,5GB/s:1200TBW"
        raise ConfigError(f"{form}; found {text!r:.100}: {error}") from error
