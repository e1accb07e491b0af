"""The state of an offloaded optimizer as safetensors files, parameter by parameter: memory is that of one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from tiered_zero.checkpoint.weights import WeightTensor, write_weights
from tiered_zero.errors import StoreError
from tiered_zero.optim.consolidate import describe, rebuild
from tiered_zero.update.state_view import ParamState

_NAME = "optimizer.safetensors"
_INDEX = "index"
"""The tensor that holds, as JSON, the values of param groups and what the state of each parameter is made of."""


def write_state(
    directory: Path, states: Mapping[nn.Parameter, ParamState], groups: Sequence[Mapping[str, Any]]
) -> list[Path]:
    """Write the state of the groups' parameters. `states`: reads one at each access. Raises StoreError."""
    group_tensors: list[Tensor] = []
    values = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    index: dict[str, Any] = {
        "groups": describe(values, group_tensors),
        "sizes": [len(group["params"]) for group in groups],
        "state": [],
    }
    found = [_tensor(f"groups/{n}", tensor, partial(_only, tensor)) for n, tensor in enumerate(group_tensors)]
    for number, param in enumerate(param for group in groups for param in group["params"]):
        tensors: list[Tensor] = []
        index["state"].append(describe(dict(states[param]), tensors))
        for place, tensor in enumerate(tensors):
            found.append(_tensor(f"{number}/{place}", tensor, partial(_read, states, param, place)))
    text = torch.frombuffer(bytearray(json.dumps(index).encode()), dtype=torch.uint8)
    found.append(_tensor(_INDEX, text, partial(_only, text)))
    return write_weights(directory, found, file_name=_NAME)


def _tensor(name: str, tensor: Tensor, read: Any) -> WeightTensor:
    return WeightTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), read=read)


def _only(tensor: Tensor) -> list[Tensor]:
    return [tensor]


def _read(states: Mapping[nn.Parameter, ParamState], param: nn.Parameter, place: int) -> list[Tensor]:
    tensors: list[Tensor] = []
    describe(dict(states[param]), tensors)
    return [tensors[place]]


class StateFiles(Mapping[nn.Parameter, ParamState]):
    """What `write_state` has written, for the parameters of `groups`: reads the state of one at each access.

    Raises StoreError if the files are not of as many parameters in the same groups. Use as a context manager.
    """

    def __init__(self, directory: Path, groups: Sequence[Mapping[str, Any]]) -> None:
        self._open = ExitStack()
        self._file_of: dict[str, Any] = {}
        try:
            for path in sorted(directory.glob(f"{_NAME.removesuffix('.safetensors')}*.safetensors")):
                file = self._open.enter_context(safe_open(path, framework="pt"))
                self._file_of.update(dict.fromkeys(file.keys(), file))
            index = json.loads(bytes(self._get(_INDEX).numpy()))
        except Exception as error:
            self._open.close()
            raise StoreError(
                f"{directory} was expected to hold the files of optimizer.save_state(); reading them raised "
                f"{type(error).__name__}: {error}. Name the directory that was saved to."
            ) from error
        sizes = [len(group["params"]) for group in groups]
        if index["sizes"] != sizes:
            self._open.close()
            raise StoreError(
                f"{directory} was expected to hold state of param groups of {sizes} parameters, as this optimizer has; "
                f"found {index['sizes']}. Build the optimizer over the same parameters in the same groups."
            )
        self._states: list[Any] = index["state"]
        self._number = {id(param): n for n, param in enumerate(p for group in groups for p in group["params"])}
        values = self._rebuilt(index["groups"], "groups")
        self.groups = [{**own, "params": group["params"]} for own, group in zip(values, groups, strict=True)]
        """The groups of the optimizer, with the values in the files."""

    def __getitem__(self, param: nn.Parameter) -> ParamState:
        number = self._number[id(param)]
        state: ParamState = self._rebuilt(self._states[number], str(number))
        return state

    def __iter__(self) -> Iterator[nn.Parameter]:
        for group in self.groups:
            yield from group["params"]

    def __len__(self) -> int:
        return len(self._number)

    def _rebuilt(self, described: Sequence[Any], prefix: str) -> Any:
        places = iter(range(len(self._file_of)))
        return rebuild(described, lambda *_: self._get(f"{prefix}/{next(places)}"))

    def _get(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def __enter__(self) -> StateFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
