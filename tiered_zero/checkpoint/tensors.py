"""Tensors of PyTorch as stored ones: their dtypes, and copies of parts of them on the calling thread."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tiered_zero.checkpoint.boxes import Box, boxes
from tiered_zero.checkpoint.tag_manifest import ITEMSIZES, TensorEntry
from tiered_zero.errors import StoreError

_STEP_NUMEL = 1 << 15
"""The most elements that `copy_` converts on the calling thread alone (at::internal::GRAIN_SIZE)."""


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32". Raises StoreError for a dtype that a checkpoint cannot hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZES:
        raise StoreError(f"A checkpoint cannot hold a tensor of {dtype}; it can hold {', '.join(sorted(ITEMSIZES))}.")
    return name


def describe(dtype: torch.dtype, shape: Sequence[int], order: Sequence[int] | None = None) -> TensorEntry:
    """A tensor as a manifest has it, without parts. Raises StoreError for a dtype that a checkpoint cannot hold."""
    return TensorEntry(dtype=dtype_name(dtype), shape=tuple(shape), order=None if order is None else tuple(order))


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a checked manifest's entry. Raises StoreError where this PyTorch has none of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StoreError(f"PyTorch {torch.__version__} has no dtype {name}, which this checkpoint needs.")
    return dtype


def window(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))


def copy_flat(into: torch.Tensor, tensor: torch.Tensor, begin: int, end: int) -> None:
    """`into` [end - begin] = the row-major elements `[begin, end)` of `tensor`, which may have any strides."""
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        copy_bytes(into, tensor.view(-1)[begin:end])
        return
    at = 0
    for box in boxes(tensor.shape, begin, end):
        into[at : at + box.numel].view(box.sizes).copy_(tensor[window(box)])
        at += box.numel


def copy_values(into: torch.Tensor, values: torch.Tensor) -> None:
    """`values`: of the same shape. Contiguous CPU memory is copied on this thread alone."""
    plain = into.is_contiguous() and values.is_contiguous() and into.is_cpu and values.is_cpu
    if plain and into.dtype == values.dtype:
        copy_bytes(into, values)
    elif plain:
        for start in range(0, into.numel(), _STEP_NUMEL):
            own = slice(start, start + _STEP_NUMEL)
            into.view(-1)[own].copy_(values.view(-1)[own])
    else:
        into.copy_(values)


def copy_bytes(into: torch.Tensor, values: torch.Tensor) -> None:
    """Contiguous CPU memory to such memory, on this thread alone: `copy_` shares 2 MiB among all of PyTorch's threads,
    and waits for them, which on busy processors took 2.5 times as long, and for 4 MiB up to 10."""
    ctypes.memmove(into.data_ptr(), values.data_ptr(), values.nbytes)
