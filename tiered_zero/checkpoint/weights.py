"""Write weights to safetensors files, which transformers' `from_pretrained` and the library safetensors load. Tensors
are read and written one at a time. An export can take over the tensor names, config and tokenizer of a transformers
model."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, final

import torch
from torch import nn

from tiered_zero.checkpoint.index import BUFFER, MASTER, PARAM, VALUE_KINDS, state_tensors, torch_dtype
from tiered_zero.checkpoint.load import TensorReader
from tiered_zero.errors import InternalError, ModelError, RankError, StoreError
from tiered_zero.hardware.ranks.collectives import Collectives, agree
from tiered_zero.record.files import sync_directory, write_new_file
from tiered_zero.sizes import MIB, align_up, format_nbytes
from tiered_zero.unit.weights import Conversion, open_safetensors, to_files, weight_paths

WEIGHTS_NAME = "model.safetensors"
MAX_SHARD_NBYTES = 5 * 10**9
"""The default size limit of a file in bytes, as in transformers 4."""

_EXPORT: Final = "save_16bit_model"

_CHUNK_NUMEL: Final = 8 * MIB
"""The number of elements that are read from a checkpoint at once."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@final
@dataclass(frozen=True, kw_only=True)
class WeightTensor:
    """A tensor to write. `read`: yields its row-major elements in order, as CPU tensors of any shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def model_weights(
    model: nn.Module,
    copy_of: Callable[[nn.Parameter], torch.Tensor],
    unit_of: Callable[[nn.Parameter], int],
    *,
    exclude_frozen: bool = False,
) -> list[WeightTensor]:
    """Return the tensors of `model.state_dict()`: parameters in the order of their units, then buffers. A tied tensor
    is returned once for each name. `copy_of`: returns a CPU copy of a parameter. `unit_of`: returns the index of a
    parameter's unit. `exclude_frozen`: leave out parameters that require no gradient. Raises ModelError for a dtype
    that safetensors does not have."""
    names: dict[torch.Tensor, list[str]] = {}  # by identity
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name, tensor in state_tensors(model):
        if name not in ignored and (tensor.requires_grad or not exclude_frozen or not isinstance(tensor, nn.Parameter)):
            names.setdefault(tensor, []).append(name)
    found = []
    for tensor in sorted(names, key=lambda each: unit_of(each) if isinstance(each, nn.Parameter) else math.inf):
        dtype, shape = tensor.dtype, tuple(tensor.shape)
        if dtype not in _DTYPES:
            raise ModelError(
                f"{names[tensor][0]} is of dtype {dtype}, which safetensors does not know. Exclude or cast it."
            )
        read = partial(_read, tensor, copy_of)
        # strict loading needs all names
        found += [WeightTensor(name=name, dtype=dtype, shape=shape, read=read) for name in names[tensor]]
    return found


def _read(tensor: torch.Tensor, copy_of: Callable[[nn.Parameter], torch.Tensor]) -> Iterator[torch.Tensor]:
    yield copy_of(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach().to("cpu")


def as_saved(model: nn.Module, tensors: Sequence[WeightTensor]) -> list[WeightTensor]:
    """Rename and split the tensors of `model` as `save_pretrained` of transformers 5 does."""
    own = {tensor.name: tensor for tensor in tensors}
    found = []
    for conversion in to_files(model, list(own)):
        made = conversion.convert(lambda name: torch.empty(own[name].shape, dtype=own[name].dtype, device="meta"))
        parts: dict[str, torch.Tensor] = {}  # the first read makes all parts; each stays until it is read
        for name, value in made.items():
            read = partial(_read_part, conversion, own, parts, name)
            found.append(WeightTensor(name=name, dtype=value.dtype, shape=tuple(value.shape), read=read))
    return found or list(tensors)


def _read_part(
    conversion: Conversion, own: Mapping[str, WeightTensor], parts: dict[str, torch.Tensor], name: str
) -> Iterator[torch.Tensor]:
    if conversion.converter is None:
        yield from own[conversion.sources[0][1]].read()
        return

    def whole(source: str) -> torch.Tensor:
        return torch.cat([part.reshape(-1) for part in own[source].read()]).view(own[source].shape)

    if name not in parts:
        parts.update(conversion.convert(whole))
    yield parts.pop(name)


def list_weights(
    reader: TensorReader, dtype: torch.dtype = torch.float32, *, with_frozen: bool = True
) -> list[WeightTensor]:
    """Return the weights of a checkpoint. A tied weight is returned once for each name. `dtype`: the dtype of
    floating-point parameters; other parameters and all buffers keep their own. `with_frozen`: include parameters
    without a master. Raises StoreError if there are no weights. Reading a weight raises CorruptionError, or StoreError
    for a value that `dtype` cannot hold."""
    aliases: dict[str, list[str]] = {}
    for alias, name in reader.manifest.aliases.items():
        aliases.setdefault(name, []).append(alias)
    found: dict[str, WeightTensor] = {}
    for key, entry in reader.manifest.tensors.items():
        kind, _, name = key.partition("/")
        if kind not in VALUE_KINDS or (kind == PARAM and not with_frozen):
            continue
        own = torch_dtype(entry.dtype)
        target = dtype if kind != BUFFER and own.is_floating_point else own
        read = partial(_read_chunks, reader, key, target)
        for each in (name, *aliases.get(name, ())):
            if each in found:
                raise StoreError(
                    f"{each} is there twice, as {key} too: this checkpoint is damaged. Export another one."
                )
            found[each] = WeightTensor(name=each, dtype=target, shape=entry.shape, read=read)
    if not any(key.startswith((f"{MASTER}/", f"{PARAM}/")) for key in reader.manifest.tensors):
        raise StoreError("There are no weights in this checkpoint. Export another one.")
    return list(found.values())


def _read_chunks(reader: TensorReader, key: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield chunks of a tensor's row-major elements, converted to `dtype`."""
    entry = reader.manifest.tensors[key]
    # in one piece if it is saved in another memory order
    step = _CHUNK_NUMEL if entry.order is None else max(1, entry.numel)
    for start in range(0, entry.numel, step):
        values = reader.read(key, start, min(start + step, entry.numel))
        result = values.to(dtype)
        if dtype.itemsize < values.dtype.itemsize and not torch.equal(result.isfinite(), values.isfinite()):
            raise StoreError(
                f"{key} has values that {str(dtype).removeprefix('torch.')} cannot hold: the largest is "
                f"{values[values.isfinite()].abs().max():.4g}. Export it as bf16 or fp32."
            )
        yield result


def write_model_config(model: nn.Module, directory: Path) -> None:
    """Write config.json and generation_config.json for `from_pretrained`, if `model` is a transformers model."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    config = deepcopy(config)
    floating = (param.dtype for param in model.parameters() if param.is_floating_point())
    config.dtype = str(next(floating, torch.float32)).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    generation: Any = getattr(model, "generation_config", None)
    try:
        config.save_pretrained(directory)
        if callable(getattr(generation, "save_pretrained", None)):
            generation.save_pretrained(directory)
    except OSError as error:
        raise StoreError(f"The model's config cannot be written to {directory}: {error.strerror}.") from error


def write_weights(
    directory: Path,
    tensors: Sequence[WeightTensor],
    *,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    file_name: str = WEIGHTS_NAME,
    replaces: bool = True,
) -> list[Path]:
    """Write weights to the file `file_name`. If they exceed `max_shard_nbytes`, write numbered files and an index
    instead. Return the paths, the index last. A tensor above the limit gets a file of its own. A reader never finds a
    mixture of old and new weights. `replaces`: False refuses to replace another model's weights. Raises StoreError."""
    stem = file_name.removesuffix(".safetensors")
    shards = _split(tensors, max_shard_nbytes)
    names = [f"{stem}-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    index_name = f"{file_name}.index.json"
    total_nbytes = sum(tensor.nbytes for tensor in tensors)
    if len(shards) == 1:
        names = [file_name]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not replaces:
            _check_model(directory, stem, tensors)
        free_nbytes = shutil.disk_usage(directory).free
        if free_nbytes < total_nbytes:
            raise StoreError(
                f"The weights take {format_nbytes(total_nbytes)}; {format_nbytes(free_nbytes)} are free in "
                f"{directory}. Free some, or name another directory. Nothing was written."
            )
        with _hidden_directory(directory) as temporary:
            for name, shard in zip(names, shards, strict=True):
                _write_shard(temporary / name, shard)
            if len(shards) > 1:
                weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
                index = {"metadata": {"total_size": total_nbytes}, "weight_map": dict(sorted(weight_map.items()))}
                write_new_file(temporary / index_name, [json.dumps(index, indent=2).encode() + b"\n"])
                names.append(index_name)
            _publish(directory, temporary, names, stem)
    except OSError as error:
        raise StoreError(
            f"The weights ({format_nbytes(total_nbytes)}) cannot be written to {directory}: {error.strerror or error}. "
            "Free some space, or name another directory."
        ) from error
    return [directory / name for name in names]


@contextmanager
def _hidden_directory(directory: Path) -> Iterator[Path]:
    """Return a context manager that makes a hidden directory for new files, and removes it at the end. First, it
    removes such directories of killed processes on this host."""
    prefix = f".part-{socket.gethostname()}-"
    for path in directory.iterdir():
        left = re.fullmatch(rf"{re.escape(prefix)}(\d+)-\w+", path.name)
        if left and not Path(f"/proc/{left[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)
    with TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=directory, ignore_cleanup_errors=True) as made:
        yield Path(made)


def reading_order(tensors: Sequence[WeightTensor], max_shard_nbytes: int) -> list[WeightTensor]:
    """Return `tensors` in the order in which `write_weights` reads them."""
    return [tensor for shard in _split(tensors, max_shard_nbytes) for tensor in shard]


def _split(tensors: Sequence[WeightTensor], max_nbytes: int) -> list[list[WeightTensor]]:
    """Distribute tensors, in order, over files of at most `max_nbytes`. In each file, wide dtypes come first."""
    shards: list[list[WeightTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > max_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    # the widest dtype first: readers that map tensors into memory need them aligned
    return [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in shards]


def _write_shard(path: Path, tensors: Sequence[WeightTensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        if tensor.name in header:
            raise StoreError(f"safetensors cannot hold a tensor of the name {tensor.name!a} here. Rename it.")
        stop = start + tensor.nbytes
        header[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(align_up(len(text), 8))
    write_new_file(path, _shard_bytes(text, tensors))


def _shard_bytes(header: bytes, tensors: Sequence[WeightTensor]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in tensors:
        written = 0
        for part in tensor.read():
            if part.dtype != tensor.dtype:
                raise InternalError(f"{tensor.name} was to be written as {tensor.dtype}; found {part.dtype}.")
            raw = part.detach().contiguous().reshape(-1).view(torch.uint8)
            written += raw.numel()
            if raw.numel():
                yield memoryview(raw.numpy())  # type: ignore[arg-type]
        if written != tensor.nbytes:
            raise InternalError(f"{tensor.name} was to be written with {tensor.nbytes} bytes; found {written}.")


def weight_files(directory: Path, stem: str) -> list[Path]:
    """Return the weight files in the directory: `<stem>.safetensors`, and numbered `<stem>-*-of-*.safetensors`."""
    pattern = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?\.safetensors")
    return [path for path in directory.iterdir() if pattern.fullmatch(path.name)]


def _check_model(directory: Path, stem: str, tensors: Sequence[WeightTensor]) -> None:
    """Check that the weights in the directory have the names and shapes of `tensors`. Raises StoreError."""
    found: dict[str, tuple[int, ...]] = {}
    files = weight_files(directory, stem)
    for path in files:
        try:
            with open_safetensors(path) as file:
                found.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
        except Exception:
            found[f"{path.name}, which cannot be read"] = ()
    own = {tensor.name: tensor.shape for tensor in tensors}
    if files and found != own:
        names = sorted(name for name in {*found, *own} if found.get(name) != own.get(name))
        raise StoreError(
            f"{directory} holds weights of another model: {', '.join(path.name for path in sorted(files)[:3])}; they "
            f"differ in {names[0]}, of {len(names)} names. Name another directory, or replace them with --force. "
            "Nothing was written."
        )


def _publish(directory: Path, temporary: Path, names: Sequence[str], stem: str) -> None:
    """Replace the weight files `<stem>...` in the directory with the files `names` from `temporary`."""
    for path in [directory / f"{stem}.safetensors.index.json", *weight_files(directory, stem)]:
        if len(names) > 1 or path.name not in names:  # else one rename replaces the file
            path.unlink(missing_ok=True)  # until the last rename a reader finds no weights, and never a mixture
    sync_directory(directory)
    for name in names[:-1]:
        os.replace(temporary / name, directory / name)
    sync_directory(directory)
    os.replace(temporary / names[-1], directory / names[-1])  # last: readers open it first
    sync_directory(directory)


# -- an export of several ranks ----------------------------------------------------------------------------------------


def write_together(
    ranks: Collectives, tensors: Sequence[WeightTensor], write: Callable[[Sequence[WeightTensor]], None]
) -> None:
    """Call `write` on rank 0 with `tensors`, which are split over ranks. All ranks read all tensors, in the same order,
    because a read may need every rank. An error in `write` is raised on all ranks. A failed read ends the run: the
    failing rank raises the read's error, the others raise RankError."""
    begun: list[WeightTensor] = []
    failed: list[Exception] = []

    def noting(tensor: WeightTensor) -> WeightTensor:
        def read() -> Iterator[torch.Tensor]:
            begun.append(tensor)
            try:
                yield from tensor.read()
            except Exception as error:
                failed.append(error)
                ranks.fail(f"{_EXPORT}: {tensor.name}: {type(error).__name__}: {error}")
                raise

        return replace(tensor, read=read)

    def act() -> None:
        noted = [noting(tensor) for tensor in tensors]
        try:
            if ranks.rank == 0:
                write(noted)
        except Exception:
            if not failed:
                _read_all(noted[len(begun) :])
            raise
        _read_all(noted[len(begun) :])

    try:
        agree(ranks, _EXPORT, act)
    except RankError:
        if failed:
            raise failed[0] from None  # `fail` has closed the groups
        raise


def _read_all(tensors: Sequence[WeightTensor]) -> None:
    for tensor in tensors:
        deque(tensor.read(), maxlen=0)


# -- a model's directory as the pattern of an export -------------------------------------------------------------------


_COPIED = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
"""Suffixes of the files, other than weights, that `copy_config` copies."""


def named_as_in(directory: Path, tensors: Sequence[WeightTensor], tied: Container[str]) -> list[WeightTensor]:
    """Return `tensors`, renamed and split as in the safetensors files of `directory`. Without such files, rename and
    split as `save_pretrained` does. `tied`: names that the files may lack. Raises ModelError if the files lack another
    name, or have a name that no tensor has."""
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
    """Copy a model's files other than weights, such as config and tokenizer. Return the copies' paths. In config.json,
    set `dtype` and remove quantization_config. Raises StoreError."""
    copied = []
    try:
        with _hidden_directory(out) as temporary:
            for path in sorted(directory.iterdir()):
                if path.suffix in _COPIED and not path.name.endswith(".index.json") and path.is_file():
                    raw = path.read_bytes()
                    if path.name == "config.json":
                        config = {**json.loads(raw), "dtype": dtype}
                        for name in ("torch_dtype", "quantization_config"):
                            config.pop(name, None)
                        raw = json.dumps(config, indent=2).encode() + b"\n"
                    write_new_file(temporary / path.name, [raw])
                    os.replace(temporary / path.name, out / path.name)
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
    """Build the model of the config in `directory`, on the meta device (without values). Raises ModelError."""
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
