"""Tensors of PyTorch as stored ones: their dtypes, their order in memory, and copies on the calling thread."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from tiered_zero.checkpoint.index import ITEMSIZES, TensorEntry
from tiered_zero.errors import StoreError

_STEP_NUMEL = 1 << 15
"""The most elements that `copy_` converts on the calling thread alone (at::internal::GRAIN_SIZE)."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32". Raises StoreError for a dtype that a checkpoint cannot hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZES:
        raise StoreError(f"A checkpoint cannot hold a tensor of {dtype}; it can hold {', '.join(sorted(ITEMSIZES))}.")
    return name


@cache
def describe(dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> TensorEntry:
    """A tensor as a manifest has it, without parts. Raises StoreError for a dtype that a checkpoint cannot hold."""
    return TensorEntry(dtype=dtype_name(dtype), shape=tuple(shape), order=order)


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a checked manifest's entry. Raises StoreError if this PyTorch has none of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StoreError(f"PyTorch {torch.__version__} has no dtype {name}, which this checkpoint needs.")
    return dtype


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """[n]: the elements of a dense tensor as they lie in memory, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def permuted(values: torch.Tensor, entry: TensorEntry, order: Sequence[int] | None) -> torch.Tensor:
    """[n]: all elements of a tensor, which `values` has in the entry's order, in another."""
    dims = range(len(entry.shape))
    whole = values.view(entry.memory_shape)
    if entry.order is not None:
        whole = whole.permute([entry.order.index(dim) for dim in dims])
    return whole.permute([*(dims if order is None else order)]).reshape(-1)


def copy_values(into: torch.Tensor, values: torch.Tensor) -> None:
    """`values`: of the same shape. Contiguous CPU memory is copied on this thread alone: `copy_` shares 2 MiB among all
    of PyTorch's threads, and waits for them, which on busy processors took 2.5 times as long, and for 4 MiB up to 10.
    """
    plain = into.is_contiguous() and values.is_contiguous() and into.is_cpu and values.is_cpu
    if plain and into.dtype == values.dtype:
        ctypes.memmove(into.data_ptr(), values.data_ptr(), values.nbytes)
    elif plain:
        for start in range(0, into.numel(), _STEP_NUMEL):
            own = slice(start, start + _STEP_NUMEL)
            into.view(-1)[own].copy_(values.view(-1)[own])
    else:
        into.copy_(values)
