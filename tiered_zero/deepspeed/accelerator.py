"""Provide DeepSpeed's `accelerator`: an object that describes the device on which torch computes."""

from __future__ import annotations

import functools
import resource
from contextlib import suppress
from typing import Any, final

import torch

from tiered_zero.errors import ConfigError, MissingNameError
from tiered_zero.hardware.ranks.launcher import HOST_BACKEND, device_backend, local_rank
from tiered_zero.hardware.runtime import find_device

__all__ = ["CurrentAccelerator", "get_accelerator"]


@functools.cache
def get_accelerator() -> CurrentAccelerator:
    """Return the accelerator of this process: a GPU where torch finds one, else the CPU."""
    return CurrentAccelerator()


@final
class CurrentAccelerator:
    """DeepSpeed's object for the device on which torch computes. Attributes not defined here, such as `synchronize`,
    come from torch's module for the device."""

    def __init__(self) -> None:
        self._type = find_device("auto").type
        self._module = torch.get_device_module(self._type)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self._module, name):
            return getattr(self._module, name)
        raise MissingNameError(
            f"get_accelerator().{name} of DeepSpeed does not exist here for {self._type}: take torch.accelerator, or "
            f"torch.{self._type}."
        )

    def device_name(self, device_index: int | None = None) -> str:
        """Return the device's name as torch writes it: "cpu", "cuda" or "cuda:1"."""
        return self._type if device_index is None or self._type == "cpu" else f"{self._type}:{device_index}"

    def current_device(self) -> int:
        """Return the index of the current device; on a CPU this process's rank on its host, as in DeepSpeed."""
        return local_rank() if self._type == "cpu" else int(self._module.current_device())

    def current_device_name(self) -> str:
        """Return the name of the current device: "cpu" or "cuda:0"."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        """Return torch.distributed's backend for the device. It is gloo for a CPU and for a device without a
        backend."""
        with suppress(ConfigError):
            return HOST_BACKEND if self._type == "cpu" else device_backend(torch.device(self._type))
        return HOST_BACKEND

    def empty_cache(self) -> None:
        """Free the device memory that torch caches. A CPU has none."""
        if self._type != "cpu":
            self._module.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of tensors on the device; on a CPU the process's resident memory."""
        if self._type != "cpu":
            return int(self._module.memory_allocated(device_index))
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the largest `memory_allocated` so far."""
        if self._type != "cpu":
            return int(self._module.max_memory_allocated(device_index))
        return max(self.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bfloat16."""
        return self._type == "cpu" or bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Return True: a CPU computes in float16 too, slowly."""
        return True

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor in pinned memory; on a CPU the tensor itself."""
        return tensor if self._type == "cpu" else tensor.pin_memory()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on the device."""
        return tensor.device.type == self._type
