"""Define the types of config values, and the base classes of sections.

Counts may be written as `8`, `"8"`, `1e9` or `"1e9"`. A conversion raises ValueError with the expected form; the caller
adds the key's path and the value.
"""

from __future__ import annotations

import math
import os
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
)

from tiered_zero.sizes import parse_nbytes

_VARIABLE = re.compile(r"\$(\w|\{\w)")
_URL = re.compile(r"[a-z0-9+.-]+://", re.IGNORECASE)


def number(value: Any) -> float:
    """Convert a number or a numeric string to a finite float."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("expected a number")
    try:
        result = float(value)
    except (ValueError, OverflowError):
        raise ValueError("expected a number") from None
    if not math.isfinite(result):
        raise ValueError("expected a finite number")
    return result


def shown(value: Any) -> str:
    """Format a value for an error: its repr, cut after 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def whole(value: Any) -> int:
    """Convert an int, an integral float (1e9), or a string of one of them, to an int. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return _int(value)
    try:
        result = number(value)
    except ValueError as error:
        raise ValueError(str(error).replace("number", "whole number")) from None
    if not result.is_integer():
        raise ValueError("expected a whole number")
    return int(result)


def switch(value: Any) -> Any:
    """Convert 0, 1, "0", "1", "false" and "true" to a bool, as DeepSpeed does; return other values unchanged."""
    if not isinstance(value, (int, float, str)):
        return value
    words = {0: False, 1: True, "0": False, "1": True, "false": False, "true": True}
    return words.get(value.lower() if isinstance(value, str) else value, value)


def number_or_same(value: Any) -> Any:
    """Convert numeric strings to numbers, also inside lists; return other values unchanged. Raises ValueError for NaN
    and infinity."""
    if isinstance(value, (list, tuple)):
        return [number_or_same(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    if not isinstance(value, str):
        return value
    try:
        parsed = number(value)
    except ValueError as error:
        if "finite" in str(error):
            raise
        return value
    return _int(value) if value.strip().lstrip("+-").isdecimal() else parsed


def _int(digits: str) -> int:
    number(digits)  # raises beyond the range of a float
    return int(digits)


def _elements(value: Any, info: ValidationInfo) -> int:
    """Convert a number of elements to an int, as `whole` does, but round a fraction down and add a notice. Trainers
    compute such fractions."""
    exact = number(value)
    if exact.is_integer():
        return whole(value)
    if info.context is not None:
        info.context.append(f"{info.field_name}: {value} elements rounded down to {int(exact)}")
    return int(exact)


def _nbytes(value: Any) -> int | None:
    nbytes = None if value is None or isinstance(value, bool) else parse_nbytes(value)
    if isinstance(value, bool) or (nbytes is not None and nbytes <= 0):
        raise ValueError('expected a size above zero: bytes, or text such as "1.5GiB"')
    return nbytes


def _path(value: str) -> str:
    if _VARIABLE.search(value) and not os.path.exists(value):
        raise ValueError("expected a path, in which no variable is replaced: write what it stands for")
    if _URL.match(value):
        raise ValueError("expected a path of this machine, and no address")
    return value


def _paths(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    for path in value.split(",") if isinstance(value, str) else value:
        _path(path.strip())
    return value


Whole = Annotated[int, BeforeValidator(whole)]
Elements = Annotated[int, BeforeValidator(_elements)]
Number = Annotated[float, BeforeValidator(number)]
PathText = Annotated[str, AfterValidator(_path)]
PathList = Annotated[str | tuple[str, ...], AfterValidator(_paths)]
WholeOrNone = Annotated[int | None, BeforeValidator(lambda value: None if value is None else whole(value))]
Nbytes = Annotated[int | None, BeforeValidator(_nbytes), WithJsonSchema({"type": ["integer", "string", "null"]})]


class Section(BaseModel):
    """A frozen section of the config, which refuses unknown keys. `model_fields_set`: the names of the fields that the
    file sets. A section can be read like a dict: `config["zero_optimization"].get("stage")`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    def __getitem__(self, key: str) -> Any:
        for name, field in type(self).model_fields.items():
            if key == (field.alias or name):
                return getattr(self, name)
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return any(key == (field.alias or name) for name, field in type(self).model_fields.items())

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, spelled as in the JSON; `default` if it is null or missing."""
        try:
            value = self[key]
        except KeyError:
            return default
        return default if value is None else value


class SwitchedSection(Section):
    """A section whose first field switches it on. If this field is off (false or "none"), defaults replace invalid
    values of the other fields."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _ignore_while_off(cls, value: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        switch, name = next(iter(cls.model_fields)), info.field_name or ""
        try:
            return validate(value)
        except ValidationError:
            if name == switch or info.data.get(switch) not in (False, "none"):
                raise
            return cls.model_fields[name].default


Device = Literal["none", "cpu", "nvme"]
_PATH_LIST = "one directory, several separated by commas, or a list; used where device is nvme"


class OffloadSection(SwitchedSection):
    """Where one kind of bytes rests between uses: a device and, for nvme, its swap directories."""

    device: Device = Field(
        "none", description="where the bytes rest between uses: none (device), cpu (host memory), nvme"
    )
    nvme_path: PathList | None = Field(None, description=f"swap directories: {_PATH_LIST}")

    @property
    def nvme_paths(self) -> tuple[str, ...]:
        """The swap directories in order, with `~` as the home directory; empty if none is given."""
        given = self.nvme_path.split(",") if isinstance(self.nvme_path, str) else self.nvme_path or ()
        return tuple(os.path.expanduser(path.strip()) for path in given if path.strip())
