"""A dispatch key for tensors whose bytes are away: torch's C++ code meets it where no class is asked.

`torch.tensor(param)`, `Tensor.set_`, TorchScript and the like take a tensor past `__torch_function__`. Each then calls
an operator, and the dispatcher looks at the tensor's keys first. A parameter that is offloaded carries a key for which
torch has no kernels (it keeps it for its own tests), and the kernel registered here brings the bytes, or raises.
DLPack calls no operator, it takes the address: so the storage of such a parameter is marked, and torch raises.
`param.data = keyed` gives it the key and that storage, `param.data = plain` takes both away, 0.3 us each: hooks and
version counter stay, and operators on a parameter in use cost what they always cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

_NAME = "TESTING_ONLY_GenericWrapper"
_key: Any = torch._C._parse_dispatch_key(_NAME)
_KEYS = torch._C.DispatchKeySet(_key)
_WRAPPER_KEYS = (
    _KEYS
    | torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
)
_libraries: list[torch.library.Library] = []
"""Registrations last as long as these."""


class _Keyed(torch.Tensor):
    """torch makes tensors with more keys only of a class with this method."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{func} of a tensor that lends its keys alone")


def keyed(plain: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the geometry and storage of `plain` and the key, to be assigned to `param.data`.

    From then on torch raises RuntimeError where the address of that storage is asked for."""
    size, stride, offset = plain.size(), plain.stride(), plain.storage_offset()
    with torch.inference_mode(False):
        wrapper: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            _Keyed, size, stride, offset, dtype=plain.dtype, device=plain.device, _extra_dispatch_keys=_KEYS
        )
        with torch._C._ExcludeDispatchKeyGuard(_WRAPPER_KEYS):
            wrapper.set_(plain.untyped_storage(), offset, size, stride)
        found = torch.empty(0, dtype=plain.dtype, device=plain.device)
        found.data = wrapper  # all but the keys of Python, which inference mode would look at
    torch._C._set_throw_on_mutable_data_ptr(found)
    return found


@final
class without_key(torch._C._ExcludeDispatchKeyGuard):
    """Call torch's own kernels within: for what asks nothing of the bytes."""

    def __init__(self) -> None:
        super().__init__(_KEYS)


def register(fetch: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], bool]) -> None:
    """Let `fetch(operator, args, kwargs)` bring the bytes of all tensors with the key before the operator runs, or
    raise; False: the operator needs no bytes. Once per process; any thread."""
    if _libraries:
        return

    def kernel(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if fetch(operator, args, kwargs):
            return operator(*args, **kwargs)
        with without_key():
            return operator(*args, **kwargs)

    library: Any = torch.library.Library
    everything, aten = library("_", "IMPL"), library("aten", "IMPL")
    everything.fallback(kernel, _NAME)
    # which `param.data = ...` calls
    aten.impl("_has_compatible_shallow_copy_type", torch.library.fallthrough_kernel, _NAME)
    _libraries.extend((everything, aten))
