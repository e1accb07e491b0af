"""Save and load an offloaded optimizer's state as safetensors files, with one parameter in memory at a time.

The last tensor is an index with the checksums of all other tensors. If a byte of them has changed, nothing is
loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tiered_zero.checkpoint.driver import from_json, to_json
from tiered_zero.checkpoint.weights import WeightTensor, weight_files, write_weights
from tiered_zero.errors import CorruptionError, StoreError
from tiered_zero.record.files import JsonFile
from tiered_zero.record.manifest import digest
from tiered_zero.unit.weights import open_safetensors
from tiered_zero.update.state_view import ParamState

_STEM = "optimizer"
_INDEX = "index"
"""The name of the tensor that holds an `_Index`."""
STAND_IN = "state_files"
"""The key that marks a state dict without tensors. Its value is the `StateFiles.key` of the files that hold the
state."""


class _Index(JsonFile):
    """The JSON index of a saved optimizer. `groups`: the option values of each group, from `to_json`. `sizes`: the
    number of parameters in each group. `state`: for each parameter, the state values that are not tensors, from
    `to_json`. `tensors`: maps each tensor's name to its description from `_text`. A tensor's name, such as "3/exp_avg",
    is the parameter's number and the value's name."""

    format_name = "tiered_zero.optimizer_state"

    groups: list[Any]
    sizes: list[int]
    state: list[Any]
    tensors: dict[str, str]


def write_state(
    directory: Path, states: Mapping[nn.Parameter, ParamState], groups: Sequence[Mapping[str, Any]]
) -> list[Path]:
    """Write the state of all parameters of `groups` to safetensors files, and return their paths. `states`: parameter
    -> its state; each access reads the state of one parameter. Raises StoreError, and ModelError for a value that
    cannot be saved."""
    values = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    options = to_json(values, "param_groups")
    sizes = [len(group["params"]) for group in groups]
    others: list[Any] = []
    texts: dict[str, str] = {}
    found: list[WeightTensor] = []

    def read(param: nn.Parameter, key: str, name: str) -> list[Tensor]:
        value: Tensor = states[param][key]
        texts[name] = _text(value, _digest(value))
        return [value]

    for number, param in enumerate(param for group in groups for param in group["params"]):
        state = states[param]
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        others.append(to_json({key: state[key] for key in state if key not in tensors}, f"state {number}"))
        for key, tensor in tensors.items():
            name, shape = f"{number}/{key}", tuple(tensor.shape)
            texts[name] = _text(tensor, 0)
            found.append(WeightTensor(name=name, dtype=tensor.dtype, shape=shape, read=partial(read, param, key, name)))

    def read_index() -> list[Tensor]:
        index = _Index(groups=options, sizes=sizes, state=others, tensors=texts)
        return [torch.frombuffer(bytearray(index.encode()), dtype=torch.uint8)]

    shape = tuple(read_index()[0].shape)  # the final shape: every checksum has 16 digits
    found.append(WeightTensor(name=_INDEX, dtype=torch.uint8, shape=shape, read=read_index))  # written last
    return write_weights(directory, found, file_name=f"{_STEM}.safetensors")


def _text(tensor: Tensor, checksum: int) -> str:
    """Describe a tensor by its dtype, shape and checksum."""
    return f"{tensor.dtype} {list(tensor.shape)} with checksum {checksum:016x}"


def _digest(tensor: Tensor) -> int:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return digest(raw.numpy().data if raw.numel() else b"")


class StateFiles(Mapping[nn.Parameter, ParamState]):
    """A mapping from the parameters of `groups` to their state in the files of `write_state`. Each access reads the
    files. Use it as a context manager.

    Raises StoreError if the files do not fit `groups` or are not complete, and CorruptionError if bytes have
    changed."""

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
        names: list[str] = []
        paths = sorted(weight_files(directory, _STEM))
        for path in paths:
            file = self._open.enter_context(open_safetensors(path))
            names += file.keys()
            self._files.update(dict.fromkeys(file.keys(), (path, file)))
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
        self._texts = index.tensors
        if sorted(names) != sorted([_INDEX, *self._texts]):
            raise StoreError(
                f"{directory} was expected to hold all files of one optimizer.save_state(), and no others; the index "
                f"in {path.name} names {len(self._texts)} tensors, and the files {paths[0].name} to {paths[-1].name} "
                f"have {len(names) - 1}. Copy the files of one save to a directory of their own."
            )
        self._names: dict[str, list[str]] = defaultdict(list)
        """The number of a parameter, as text -> the names of its state tensors."""
        for name in self._texts:
            number, _, key = name.partition("/")
            self._names[number].append(key)
        self._others = index.state
        self._number = {id(param): n for n, param in enumerate(p for group in groups for p in group["params"])}
        values, others = from_json(index.groups), from_json(index.state)
        are_dicts = all(type(value) is dict for value in (*values, *others))
        if not are_dicts or len(others) != len(self._number) or len(values) != len(groups):
            raise ValueError(f"its index has {len(others)} parameters in {len(values)} groups")
        self.groups = [{**own, "params": group["params"]} for own, group in zip(values, groups, strict=True)]
        """The param groups: the parameters of `groups`, with the option values from the files."""

    def __getitem__(self, param: nn.Parameter) -> ParamState:
        number = self._number[id(param)]
        tensors = {key: self._tensor(f"{number}/{key}") for key in self._names[str(number)]}
        return {**from_json(self._others[number]), **tensors}

    def __iter__(self) -> Iterator[nn.Parameter]:
        for group in self.groups:
            yield from group["params"]

    def __len__(self) -> int:
        return len(self._number)

    def _tensor(self, name: str) -> Tensor:
        """Read the tensor `name`. Raises CorruptionError if its dtype, shape or checksum differs from the index."""
        path, file = self._files[name]
        tensor: Tensor = file.get_tensor(name)
        if (found := _text(tensor, _digest(tensor))) != self._texts[name]:
            raise CorruptionError(
                f"{path}: the bytes of tensor {name} are not those written by optimizer.save_state(): expected "
                f"{self._texts[name]}; found {found}. Nothing was loaded. Load another save, and look at the disk."
            )
        return tensor

    def __enter__(self) -> StateFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
