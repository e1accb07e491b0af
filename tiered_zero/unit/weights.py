"""Read tensors from the safetensors files that the option `tiered_zero.weights` names: files, an index, or a directory.

A model of transformers 5 may name and split its tensors, such as the experts of a mixture, in another way than the
files do. The table of conversions in transformers then says how to make the model's tensors from those of the files,
and the reverse."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from torch import nn

from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import ParamSpec
from tiered_zero.record.files import error_text, kind_text
from tiered_zero.sizes import MIB, format_nbytes

WHOLE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
"""The end of an index file's name, as transformers and huggingface_hub write it. The file holds {"weight_map": {tensor
name: name of a file in the same directory}}."""

_NUM_NAMED = 5
"""The most names that a message lists."""
_MOST_INDEX_NBYTES = 64 * MIB
"""The most bytes that an index file may have; the index of a large model has some megabytes."""


def open_safetensors(path: str | Path) -> Any:
    """Open a safetensors file for torch. Raises OSError if the path is no regular file, and any error of
    safetensors."""
    _nbytes(path)  # opening a FIFO would block
    return safe_open(path, framework="pt")


def _nbytes(path: str | Path) -> int:
    """Return the size of a regular file in bytes. Raises OSError for anything else."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is {kind_text(status.st_mode)}; expected a file")
    return status.st_size


def weight_paths(given: Sequence[str]) -> list[str]:
    """List the safetensors files that `given` names, each once. `given`: paths of files, indexes and directories.
    Raises ModelError if an index or directory cannot be read, or does not say which files to take. Other paths are not
    checked."""
    return list(dict.fromkeys(str(path) for text in given for path in _files_of(Path(text).expanduser())))


def _files_of(path: Path) -> Iterator[Path]:
    try:
        if path.is_dir():
            path = _of_directory(path)
    except OSError as error:
        raise ModelError(
            f"tiered_zero.weights: {path} cannot be read ({error_text(error)}). Name a path that this user may read."
        ) from error
    if path.name.endswith(INDEX_SUFFIX):
        yield from _of_index(path)
    else:
        yield path


def _of_directory(directory: Path) -> Path:
    """Return the path of the weights in a directory: the index if there is exactly one, else model.safetensors, else
    the only safetensors file. Raises ModelError if none of these is found."""
    names = sorted(path.name for path in directory.iterdir())
    files = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    for found in (indexes, [name for name in files if name == WHOLE], files):
        if len(found) == 1:
            return directory / found[0]
    pickled = "" if files else "; *.bin and *.pt files are pickles, which are not read"
    found_text = ", ".join(indexes or files or names[:5]) or "nothing"
    raise ModelError(
        f"tiered_zero.weights: expected an index (*{INDEX_SUFFIX}), {WHOLE} or one other safetensors file in "
        f"{directory}; found {found_text}{pickled}. Name the files themselves."
    )


def _of_index(path: Path) -> Iterator[Path]:
    try:
        if _nbytes(path) > _MOST_INDEX_NBYTES:
            raise ValueError(f"it has {format_nbytes(_nbytes(path))}, more than {format_nbytes(_MOST_INDEX_NBYTES)}")
        files = json.loads(path.read_bytes())["weight_map"].values()
        names = dict.fromkeys(Path(name) for name in files)
        if outside := [str(name) for name in names if name.is_absolute() or ".." in name.parts]:
            raise ValueError(f"{outside[0]} is not in its directory")
        missing = [name for name in names if not (path.parent / name).is_file()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(
            f'tiered_zero.weights: expected {{"weight_map": {{tensor: file}}}} in {path}; {type(error).__name__}: '
            f"{error}. Name the files themselves."
        ) from error
    if missing:
        raise ModelError(
            f"tiered_zero.weights: {path} names {len(names)} files; {missing[0]} is not beside it, of {len(missing)} "
            "that are missing. Copy all of them to one directory."
        )
    yield from (path.parent / name for name in names)


@final
@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Makes tensors of a model from tensors of files, or the reverse. `converter`: an entry of transformers' table of
    weight conversions; None: the only source is renamed to `target`. `sources`: a pair for each tensor to read: the
    pattern in the table that matches its name, and the name. `rename`: a function that is applied to the names that the
    converter returns."""

    model: Any
    target: str
    converter: Any
    rename: Callable[[str], str] = str
    sources: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the converted tensors by name. `read`: returns the source tensor with a given name. Raises the errors
        of transformers' conversion operations."""
        if self.converter is None:
            return {self.target: read(self.sources[0][1])}
        converter = deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, partial(read, name))
        found = converter.convert(self.target, model=self.model, config=self.model.config)
        return {self.rename(name): value[0] if isinstance(value, list) else value for name, value in found.items()}


def from_files(model: nn.Module, names: Iterable[str]) -> list[Conversion]:
    """List the conversions from tensors of files to tensors of `model`. The list is empty if `model` is not from
    transformers 5. `names`: the names of the tensors in the files."""
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
    """List the conversions from the model's tensors `names` to the tensors that `save_pretrained` writes. The list is
    empty if `model` is not a model of transformers 5."""
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
    """Return transformers 5's module for converting tensors if `model` is one of transformers' own; else None."""
    models: Any = sys.modules.get("transformers.modeling_utils")
    is_own = models is not None and isinstance(model, models.PreTrainedModel)
    return sys.modules.get("transformers.core_model_loading") if is_own else None


def _table(model: nn.Module, **options: Any) -> list[Any]:
    return list(import_module("transformers.conversion_mapping").get_model_conversion_mapping(model, **options))


class WeightFiles:
    """Reads tensors by name from safetensors files. The constructor raises ModelError for a file that cannot be
    read."""

    def __init__(self, paths: Sequence[str]) -> None:
        """`paths`: safetensors files, indexes of such files, or directories of models."""
        self._kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._paths: dict[str, str] = {}
        self._converted: dict[str, Conversion] = {}
        """Name of a tensor in the model -> the conversion that makes it."""
        for path in weight_paths(paths):
            try:
                with open_safetensors(path) as file:
                    names = list(file.keys())
                    tensors = {name: file.get_tensor(name) for name in names}  # mapped; nothing is read
                    self._kinds.update({name: (tuple(each.shape), each.dtype) for name, each in tensors.items()})
                    del tensors
            except Exception as error:
                raise ModelError(
                    f"tiered_zero.weights: {path} cannot be read as safetensors ({error}). Name safetensors files, the "
                    "index of such files, or the directory of a model."
                ) from error
            self._paths.update(dict.fromkeys(names, path))

    def check(self, model: nn.Module, specs: Mapping[nn.Parameter, ParamSpec]) -> list[str]:
        """Check that the files fit the model. Return warnings about tensors in the files that the model does not use.
        Raises ModelError if no parameter of the model is on meta, or if the files lack such a parameter. Also raises
        ModelError if a tensor on meta has another shape in the files, or a dtype that cannot be converted."""
        missing_values = [spec for param, spec in specs.items() if param.is_meta]
        if not missing_values:
            raise ModelError(
                "tiered_zero.weights names files for a model built on the meta device; found one with values of its "
                "own, which they would not change. Build it under torch.device('meta'), or remove the key."
            )
        used = self._convert_names(model)
        wanted = {spec.name: self._find(names_of(spec)) for spec in missing_values}
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        extra = sorted(
            self._paths.keys() - used - known - {name for name, _ in model.named_buffers(remove_duplicate=False)}
        )
        if missing := [name for name, found in wanted.items() if found is None]:
            in_place = f", and without use {format_names(extra)}" if extra else ""
            raise ModelError(
                "tiered_zero.weights: expected every parameter on the meta device in the files, which hold "
                f"{len(self._paths)} tensors; found none for {format_names(missing)}{in_place}. Name the file that has "
                "them. Files that name or split them in another way are read for models of transformers 5."
            )
        for name, own in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
            if not own.is_meta or name not in self._kinds:
                continue
            shape, dtype = self._kinds[name]
            if shape != own.shape:
                raise ModelError(
                    f"tiered_zero.weights: expected {name} of shape {tuple(own.shape)}, as in the model; found "
                    f"{shape}. Name files of a model of this configuration."
                )
            if dtype is not own.dtype and not (_is_float(dtype) and _is_float(own.dtype)):
                others = ", or as another float of 16 to 64 bits" if _is_float(own.dtype) else ""
                raise ModelError(
                    f"tiered_zero.weights: expected {name} as {own.dtype}, as in the model{others}; found {dtype}. "
                    "Name files of the model's own values: those that were quantized have to be dequantized first."
                )
        return [f"tiered_zero.weights: the model has no use for {format_names(extra)} in the files."] if extra else []

    def has(self, names: Iterable[str]) -> bool:
        return self._find(names) is not None

    def fill(self, target: torch.Tensor, names: Iterable[str]) -> None:
        """Copy a tensor of the files into `target`, rounded to the dtype of `target`. `names`: the names that the
        tensor may have. Do nothing if the files have no such tensor."""
        if (name := self._find(names)) is not None:
            with ExitStack() as opened:
                files: dict[str, Any] = {}  # open for one tensor only: mapped pages count as resident memory

                def read(source: str) -> torch.Tensor:
                    path = self._paths[source]
                    if path not in files:
                        files[path] = opened.enter_context(open_safetensors(path))
                    found: torch.Tensor = files[path].get_tensor(source)
                    return found

                conversion = self._converted.get(name)
                target.copy_(read(name) if conversion is None else conversion.convert(read)[name])

    def _convert_names(self, model: nn.Module) -> set[str]:
        """Find the tensors of the model that transformers makes from tensors with other names in the files, and record
        a conversion for each. Return the names in the files. Raises ModelError if transformers cannot make a tensor."""
        used: set[str] = set()
        for conversion in from_files(model, self._paths):
            try:
                made = conversion.convert(
                    lambda name: torch.empty(self._kinds[name][0], dtype=self._kinds[name][1], device="meta")
                )
            except Exception as error:
                raise ModelError(
                    f"tiered_zero.weights: transformers cannot make {conversion.target} of "
                    f"{format_names([name for _, name in conversion.sources])} in the files ({error}). Name all files "
                    "of one model of this configuration."
                ) from error
            for name in made.keys() - self._paths.keys():
                self._converted[name] = conversion
                self._kinds[name] = tuple(made[name].shape), made[name].dtype
                used.update(source for _, source in conversion.sources)
        return used

    def _find(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name in self._paths or name in self._converted), None)


def _is_float(dtype: torch.dtype) -> bool:
    """Return whether `dtype` is a float dtype of 16 bits or more. Values of such a dtype can be rounded to another one.
    This does not hold for float8 values, because they need scales."""
    return dtype.is_floating_point and dtype.itemsize > 1


def names_of(spec: ParamSpec) -> tuple[str, ...]:
    return spec.name, *spec.aliases


def format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more
