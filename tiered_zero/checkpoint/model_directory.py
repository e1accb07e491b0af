"""The directory of a model of transformers as the pattern of an export: its names, its config, its tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiered_zero.checkpoint.weights import WeightTensor, as_saved
from tiered_zero.errors import ModelError, StoreError
from tiered_zero.record.files import write_new_file
from tiered_zero.unit.weight_paths import open_safetensors, weight_paths

_COPIED = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
"""Suffixes of a model's files other than weights."""


def named_as_in(directory: Path, tensors: Sequence[WeightTensor], tied: Container[str]) -> list[WeightTensor]:
    """Name and cut tensors as the safetensors files in `directory` do, or as `save_pretrained` of its model would if
    there are none. `tied`: names that other names have too, which may be left out. Raises ModelError.
    """
    names = _names(directory)
    if not names or not names <= {tensor.name for tensor in tensors}:
        tensors = as_saved(_on_meta(directory), tensors)
    found = {tensor.name for tensor in tensors}
    different = sorted(names - found) + sorted(name for name in found - names if name not in tied)
    if names and different:
        raise ModelError(
            f"--like {directory}: expected the weights of the same model; {len(different)} names are on one side only, "
            f"the first is {different[0]}. Name the directory of the model that was trained."
        )
    return [tensor for tensor in tensors if not names or tensor.name in names]


def copy_config(directory: Path, out: Path, dtype: str) -> list[Path]:
    """Copy files other than weights, such as the config and the tokenizer. The config gets the dtype of the export and
    loses its entries about quantised weights. Raises StoreError."""
    copied = []
    try:
        for path in sorted(directory.iterdir()):
            if path.suffix in _COPIED and not path.name.endswith(".index.json") and path.is_file():
                raw = path.read_bytes()
                if path.name == "config.json":
                    config = {**json.loads(raw), "dtype": dtype}
                    own = {name: config[name] for name in config if name not in ("torch_dtype", "quantization_config")}
                    raw = json.dumps(own, indent=2).encode() + b"\n"
                part = out / f".{path.name}.part-{os.getpid()}-"
                part.unlink(missing_ok=True)
                write_new_file(part, [raw])
                os.replace(part, out / path.name)
                copied.append(out / path.name)
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"The files next to the weights in {directory} cannot be copied to {out}: {error}.") from error
    return copied


def _names(directory: Path) -> set[str]:
    names: set[str] = set()
    if any(directory.glob("*.safetensors")):
        for path in weight_paths([str(directory)]):
            with open_safetensors(path) as file:
                names.update(file.keys())
    return names


def _on_meta(directory: Path) -> nn.Module:
    """Build the model of a directory without values. Raises ModelError."""
    try:
        library: Any = import_module("transformers")
        config = library.AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            model: nn.Module = getattr(library, config.architectures[0])(config)
    except Exception as error:
        raise ModelError(
            f"--like {directory}: expected the names of the checkpoint there, or the config of a model that "
            f"transformers can build; {type(error).__name__}: {error}. Install transformers 5, or leave --like out."
        ) from error
    return model
