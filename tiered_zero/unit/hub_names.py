"""Tensors as the files of transformers 5 name and cut them: its own table of conversions, between files and a model.

A mixture of experts has one tensor for each expert in its files, and one for all in memory. The table is asked for
models of transformers alone, which have imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, final

import torch
from torch import nn


@final
@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Makes tensors of one side from those of the other. `sources`: (pattern of the table, name), in order; without
    `converter` the only one is renamed to `target`. `rename`: what is done to names that a converter gives."""

    model: Any
    target: str
    converter: Any
    rename: Callable[[str], str] = str
    sources: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors by name. `read`: a source, by its name. Raises whatever the table's operations do."""
        if self.converter is None:
            return {self.target: read(self.sources[0][1])}
        converter = deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, partial(read, name))
        found = converter.convert(self.target, model=self.model, config=self.model.config)
        return {self.rename(name): value[0] if isinstance(value, list) else value for name, value in found.items()}


def from_files(model: nn.Module, names: Iterable[str]) -> list[Conversion]:
    """List what makes the tensors of `model` from those of files, which have `names`."""
    library = _library(model)
    if library is None:
        return []
    renamings, converters = _sorted(library, _table(model))
    own = model.state_dict()
    found: dict[str, Conversion] = {}
    for name in sorted(names, key=library.dot_natural_key):
        target, pattern = library.rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if target in own:
            _collect(found, model, target, pattern, name, converters)
    return [*found.values()]


def to_files(model: nn.Module, names: Sequence[str]) -> list[Conversion]:
    """List what makes the tensors that `save_pretrained` writes from those of `model`, which have `names`."""
    library = _library(model)
    if library is None:
        return []
    table = getattr(model, "_weight_conversions", None)
    if table is None:  # as save_pretrained does for a model that no file was loaded into
        table = [each for each in _table(model, add_legacy=False) if not isinstance(each, library.PrefixChange)]
    renamings, converters = _sorted(library, [each.reverse_transform() for each in reversed(table)])

    def rename(name: str) -> str:
        return str(library.apply_renamings(name, renamings))

    found: dict[str, Conversion] = {}
    for name in names:
        target, pattern = library.apply_converters(name, converters)
        _collect(found, model, target if pattern is not None else rename(name), pattern, name, converters, rename)
    for each in found.values():
        each.sources.sort(key=lambda source: library.dot_natural_key(source[1]))
    return [*found.values()]


def _collect(
    found: dict[str, Conversion],
    model: nn.Module,
    target: str,
    pattern: str | None,
    name: str,
    converters: Sequence[Any],
    rename: Callable[[str], str] = str,
) -> None:
    converter = next((each for each in converters if pattern in each.source_patterns), None)
    one = Conversion(model=model, target=target, converter=converter, rename=rename)
    found.setdefault(target, one).sources.append((pattern or name, name))


def _sorted(library: Any, table: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return (
        [each for each in table if isinstance(each, library.WeightRenaming)],
        [each for each in table if isinstance(each, library.WeightConverter)],
    )


def _library(model: nn.Module) -> Any:
    """Return the module of transformers 5 that converts, if `model` is one of its own."""
    models: Any = sys.modules.get("transformers.modeling_utils")
    is_own = models is not None and isinstance(model, models.PreTrainedModel)
    return sys.modules.get("transformers.core_model_loading") if is_own else None


def _table(model: nn.Module, **options: Any) -> list[Any]:
    return list(import_module("transformers.conversion_mapping").get_model_conversion_mapping(model, **options))
