"""Save and load an offloaded optimizer's state as safetensors files, with one parameter in memory at a time.

The last tensor is an index with the checksums of the others: if bytes have changed, nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tiered_zero.checkpoint.weights import WeightTensor, weight_files, write_weights
from tiered_zero.errors import CorruptionError, ModelError, StoreError
from tiered_zero.record.files import JsonFile
from tiered_zero.record.manifest import digest
from tiered_zero.unit.weights import open_safetensors
from tiered_zero.update.state_view import ParamState

_STEM = "optimizer"
_INDEX = "index"
"""The name of the tensor that holds an `_Index`."""
STAND_IN = "state_files"
"""The key that marks a state dict without tensors; its value is the `StateFiles.key` of the files with the state."""


class _Index(JsonFile):
    """What the index holds, as JSON. `groups`, `state`: from `describe`. `sizes`: the number of parameters in each
    group. `digests`: the name of a tensor -> its checksum, 16 hexadecimal digits."""

    format_name = "tiered_zero.optimizer_state"

    groups: list[Any]
    sizes: list[int]
    state: list[Any]
    digests: dict[str, str]


def write_state(
    directory: Path, states: Mapping[nn.Parameter, ParamState], groups: Sequence[Mapping[str, Any]]
) -> list[Path]:
    """Write the state of all parameters of `groups` to safetensors files, and return their paths. `states`: reads one
    parameter's state at each access. Raises StoreError."""
    group_tensors: list[Tensor] = []
    values = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    described_groups = describe(values, group_tensors)
    digests: dict[str, str] = {}
    sizes = [len(group["params"]) for group in groups]
    found = [_hashed(f"groups/{n}", tensor, tensor.detach, digests) for n, tensor in enumerate(group_tensors)]
    described_states = []
    for number, param in enumerate(param for group in groups for param in group["params"]):
        tensors: list[Tensor] = []
        described_states.append(describe(dict(states[param]), tensors))
        for place, tensor in enumerate(tensors):
            found.append(_hashed(f"{number}/{place}", tensor, partial(_read, states, param, place), digests))

    def read_index() -> list[Tensor]:
        index = _Index(groups=described_groups, sizes=sizes, state=described_states, digests=digests)
        return [torch.frombuffer(bytearray(index.encode()), dtype=torch.uint8)]

    shape = tuple(read_index()[0].shape)  # the final shape: every checksum has 16 digits
    found.append(WeightTensor(name=_INDEX, dtype=torch.uint8, shape=shape, read=read_index))  # written last
    return write_weights(directory, found, file_name=f"{_STEM}.safetensors")


def _hashed(name: str, tensor: Tensor, read: Callable[[], Tensor], digests: dict[str, str]) -> WeightTensor:
    """Return a WeightTensor that adds its checksum to `digests` when it is written. `tensor`: gives dtype and shape.
    `read`: returns the values."""

    def read_and_hash() -> list[Tensor]:
        value = read()
        digests[name] = _digest(value)
        return [value]

    digests[name] = f"{0:016x}"
    return WeightTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), read=read_and_hash)


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return f"{digest(raw.numpy().data if raw.numel() else b''):016x}"


def _read(states: Mapping[nn.Parameter, ParamState], param: nn.Parameter, place: int) -> Tensor:
    tensors: list[Tensor] = []
    describe(dict(states[param]), tensors)
    return tensors[place]


class StateFiles(Mapping[nn.Parameter, ParamState]):
    """A mapping from the parameters of `groups` to their state in the files of `write_state`. Each access reads the
    files. Use it as a context manager.

    Raises StoreError if the saved groups have other sizes, and CorruptionError if bytes have changed."""

    def __init__(self, directory: Path, groups: Sequence[Mapping[str, Any]]) -> None:
        self._open = ExitStack()
        self._files: dict[str, tuple[Path, Any]] = {}
        try:
            self._load_index(directory, groups)
        except Exception as error:
            self._open.close()
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"{directory} was expected to hold the files of optimizer.save_state(); reading them raised "
                f"{type(error).__name__}: {error}. Name the directory that was saved to."
            ) from error

    def _load_index(self, directory: Path, groups: Sequence[Mapping[str, Any]]) -> None:
        """Read the index of the files. Raises StoreError, or any other exception for files that `write_state` has not
        written."""
        for path in sorted(weight_files(directory, _STEM)):
            file = self._open.enter_context(open_safetensors(path))
            for name in file.keys():  # noqa: SIM118
                if name in self._files:
                    raise StoreError(
                        f"{directory} was expected to hold the files of one optimizer.save_state(); {path.name} and "
                        f"{self._files[name][0].name} both have {name!a}. Remove the file of the other save."
                    )
                self._files[name] = path, file
        if _INDEX not in self._files:
            raise StoreError(
                f"{directory} was expected to hold the files of optimizer.save_state(); no file there has an index. "
                "Name the directory that was saved to."
            )
        path, file = self._files[_INDEX]
        raw = bytes(file.get_tensor(_INDEX).numpy())
        self.key = f"{digest(raw):016x}"
        """The checksum of the index. The index has the checksums of all tensors, so each state has its own key."""
        index = _Index.decode(raw, path)
        sizes = [len(group["params"]) for group in groups]
        if index.sizes != sizes:
            raise StoreError(
                f"{directory} was expected to hold state of param groups of {sizes} parameters, as this optimizer has; "
                f"found {index.sizes}. Build the optimizer over the same parameters in the same groups."
            )
        self._digests = index.digests
        if missing := sorted(self._digests.keys() - self._files.keys()):
            raise StoreError(
                f"{directory} was expected to hold all files of one optimizer.save_state(); {len(missing)} tensors are "
                f"not in {path.name} or the files next to it. Copy all of them to one directory."
            )
        self._states = index.state
        self._number = {id(param): n for n, param in enumerate(p for group in groups for p in group["params"])}
        values = _rebuild(index.groups, "groups", self._tensor)
        for number, described in enumerate(self._states):
            _rebuild(described, str(number), self._stand_in)
        if len(self._states) != len(self._number) or len(values) != len(groups):
            raise ValueError(f"its index has {len(self._states)} parameters in {len(values)} groups")
        self.groups = [{**own, "params": group["params"]} for own, group in zip(values, groups, strict=True)]
        """The param groups: the parameters of `groups`, with the option values from the files."""

    def __getitem__(self, param: nn.Parameter) -> ParamState:
        number = self._number[id(param)]
        state: ParamState = _rebuild(self._states[number], str(number), self._tensor)
        return state

    def __iter__(self) -> Iterator[nn.Parameter]:
        for group in self.groups:
            yield from group["params"]

    def __len__(self) -> int:
        return len(self._number)

    def _stand_in(self, name: str, *_: Any) -> Tensor:
        """Return a placeholder for the tensor `name`, which is read later. Raises KeyError if no file has it."""
        return torch.zeros(len(self._digests[name]), device="meta")

    def _tensor(self, name: str, dtype: str, shape: Sequence[int]) -> Tensor:
        """Read the tensor `name`, and compare it with `dtype`, `shape` and its checksum. Raises CorruptionError."""
        path, file = self._files[name]
        tensor: Tensor = file.get_tensor(name)
        found = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _digest(tensor)
        if found != (dtype, shape, self._digests[name]):
            raise CorruptionError(
                f"{path}: the bytes of tensor {name} are not those written by optimizer.save_state(): expected "
                f"{dtype} {shape} with checksum {self._digests[name]}; found {found[0]} {found[1]} with {found[2]}. "
                "Nothing was loaded. Load another save, and look at the disk."
            )
        return tensor

    def __enter__(self) -> StateFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def _rebuild(described: Any, prefix: str, read: Callable[[str, str, Sequence[int]], Tensor]) -> Any:
    """Rebuild a value from `described`, a result of `describe`. `read`: reads a tensor by name, dtype and
    shape. Names are `prefix`/0, `prefix`/1 and so on."""
    num_read = 0

    def read_next(dtype: str, shape: Sequence[int]) -> Tensor:
        nonlocal num_read
        num_read += 1
        return read(f"{prefix}/{num_read - 1}", dtype, shape)

    return rebuild(described, read_next)


def describe(value: Any, tensors: list[Tensor]) -> list[Any]:
    """Return a description of a value that JSON can hold, and append the value's tensors, in order, to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if type(value) in (list, tuple):
        return [type(value).__name__, [describe(item, tensors) for item in value]]
    if isinstance(value, Mapping):
        return ["dict", [[describe(name, tensors), describe(item, tensors)] for name, item in value.items()]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    raise ModelError(
        f"The state of a parameter was expected to be tensors, numbers, text, and lists and dicts of these; found "
        f"{type(value).__name__}. Save optimizer.state_dict() instead."
    )


def rebuild(described: Sequence[Any], read: Callable[[str, Sequence[int]], Tensor]) -> Any:
    kind, *rest = described
    if kind == "tensor":
        return read(*rest)
    if kind == "value":
        return rest[0]
    if kind == "dict":
        return {rebuild(name, read): rebuild(item, read) for name, item in rest[0]}
    items = [rebuild(item, read) for item in rest[0]]
    return tuple(items) if kind == "tuple" else items
