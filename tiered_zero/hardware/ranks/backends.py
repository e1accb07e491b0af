"""Choose torch.distributed backends: one for host memory, and the one of each kind of device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tiered_zero.errors import ConfigError

HOST_BACKEND = "gloo"
"""Carries control messages, and bytes in host memory."""

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output, input, group), one tensor each. torch 2.13 has renamed `all_gather_into_tensor` and warns about the old
name, the only one in 2.11 and 2.12."""


def device_backend(device: torch.device) -> str:
    """Return the backend that carries tensors on `device`, an accelerator. Raises ConfigError if this torch has
    none."""
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError:
        backend = ""
    if not backend or backend == HOST_BACKEND or not dist.is_backend_available(backend):
        found = f"its backend {backend} is not in this build" if backend not in ("", HOST_BACKEND) else "it has none"
        raise ConfigError(
            f"tiered_zero.device: expected a device on which this torch ({torch.__version__}) can communicate, as "
            f"several ranks do; found {device.type}, and {found}. Install a build of torch with a backend of "
            f"torch.distributed for {device.type}, set tiered_zero.device to cpu, or start one process."
        )
    return backend
