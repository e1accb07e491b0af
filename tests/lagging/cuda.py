"""Puts the lagging device in CUDA's place, for the rest of this process.

A CPU build of torch has CUDA's dispatch key, Python module, autograd and autocast, but no kernels and no runtime. The
library brings kernels, streams, events and memory; here are the few functions of `torch.cuda` that ask the runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._meta_registrations  # shapes of results, of operators that have them in Python
import torch.distributed as dist

NUM_DEVICES = 2
BACKEND = "lagging"
"""What `torch.distributed.get_default_backend_for_device("cuda")` returns."""


class LaggingDevice:
    """The settings and counts of the devices."""

    def __init__(self, library: Path) -> None:
        if torch.version.cuda is not None:
            raise RuntimeError("the lagging device takes the place of CUDA: use a CPU build of torch")
        torch.ops.load_library(library)
        self._library = ctypes.CDLL(str(library))
        self._library.lagging_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
        self._library.lagging_hold.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
        self._library.lagging_counts.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._library.lagging_pin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._library.lagging_unpin.argtypes = [ctypes.c_void_p]
        self._library.lagging_pinned_nbytes.restype = ctypes.c_size_t
        self._library.lagging_use_pool.argtypes = [ctypes.c_int64]
        self._library.lagging_serve_others.argtypes = [ctypes.c_int, ctypes.c_int64]
        self._library.lagging_drop_pool.argtypes = [ctypes.c_int, ctypes.c_int64]
        self._library.lagging_private_nbytes.restype = ctypes.c_size_t
        self._library.lagging_resize_storage.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        _replace_functions(self._library)
        _register_backend()
        self.reset()

    def set(self, **settings: float) -> None:
        """delay_seed, kernel_s, flops_per_s, h2d_bytes_per_s, d2h_bytes_per_s, comm_bytes_per_s, capacity_nbytes,
        splits_blocks, one_queue: see streams.h."""
        for name, value in settings.items():
            assert self._library.lagging_set(name.encode(), float(value)), f"there is no setting {name}"

    def reset(self) -> None:
        """As it is at first: no delays, 8 GiB."""
        rates = ("flops_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "comm_bytes_per_s")
        off = ("kernel_s", "splits_blocks", "one_queue", *rates)
        self.set(delay_seed=-1, capacity_nbytes=8 << 30, **dict.fromkeys(off, 0.0))
        self.take_counts()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let the current stream run nothing inside of the block: whoever waits for it on the host, waits for ever."""
        stream = torch.accelerator.current_stream()
        self._library.lagging_hold(stream.device_index, stream.stream_id, 1)
        try:
            yield
        finally:
            self._library.lagging_hold(stream.device_index, stream.stream_id, 0)

    def take_counts(self) -> dict[str, int]:
        """Return what was counted since the last call: kernels, copies, events, and the host's waits by cause."""
        text = ctypes.create_string_buffer(1 << 20)
        assert self._library.lagging_counts(text, len(text))
        return {name: int(count) for name, count in (line.split() for line in text.value.decode().splitlines())}

    def private_nbytes(self) -> int:
        """Bytes that private pools of the first device have reserved at most, since the peaks were reset."""
        return int(self._library.lagging_private_nbytes(0))

    def pinned_nbytes(self) -> int:
        """Bytes of host memory that are registered, or of torch's pinned tensors."""
        return int(self._library.lagging_pinned_nbytes())


class _Runtime:
    """What `torch.cuda.cudart()` returns: host registration."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return 0 if self._library.lagging_pin(address, nbytes) else 712  # already registered

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self._library.lagging_unpin(address) else 713  # not registered


class Event(torch.Event):
    """As `torch.cuda.Event`, takes the streams of `torch.cuda` alone. `sleeps`: so does a thread that waits for it; one
    that waits for a `torch.Event` spins, whatever its arguments are."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Event:
        event = super().__new__(cls, enable_timing=enable_timing)
        event.sleeps = blocking
        return event

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(_own(stream))

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(_own(stream))


class Stream(torch.Stream):
    """What `torch.cuda` returns, in place of its own."""


def _own(stream: torch.Stream | None) -> torch.Stream:
    if stream is None:
        return _current_stream()
    if not isinstance(stream, Stream):
        raise TypeError(f"torch.cuda.Event reads the memory of a torch.cuda.Stream; found a {type(stream)}")
    return stream


def _current_stream(device: Any = None) -> Stream:
    stream = torch.accelerator.current_stream(device)
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def _private_pools(library: ctypes.CDLL) -> dict[str, Any]:
    """What `torch.cuda` has of private pools: those of what a thread allocates in the block."""
    numbers = itertools.count(1)

    class MemPool:
        def __init__(self, use_on_oom: bool = False) -> None:
            index, self.number = torch.accelerator.current_device_index(), next(numbers)
            if use_on_oom:
                library.lagging_serve_others(index, self.number)
            weakref.finalize(self, library.lagging_drop_pool, index, self.number)

    @contextlib.contextmanager
    def use_mem_pool(pool: MemPool, device: torch.device) -> Iterator[None]:
        library.lagging_use_pool(pool.number)
        try:
            yield
        finally:
            library.lagging_use_pool(0)

    return {"MemPool": MemPool, "use_mem_pool": use_mem_pool}


def _replace_functions(library: ctypes.CDLL) -> None:
    """Replace what the CPU build's torch.cuda has no runtime for."""
    accelerator, cuda = torch.accelerator, torch.cuda
    runtime = _Runtime(library)

    def exchange_device(index: int) -> int:
        before = accelerator.current_device_index()
        if index >= 0:
            accelerator.set_device_index(index)
        return before

    def properties(device: Any = None) -> SimpleNamespace:
        _, total = accelerator.get_memory_info(device)
        return SimpleNamespace(name="lagging device", total_memory=total, multi_processor_count=1, major=9, minor=0)

    for name, value in {
        "_cuda_getDeviceCount": lambda: NUM_DEVICES,
        "_cuda_getDevice": accelerator.current_device_index,
        "_cuda_setDevice": accelerator.set_device_index,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_getCurrentRawStream": lambda index: accelerator.current_stream(index).stream_id,
    }.items():  # which are not there
        setattr(torch._C, name, value)
    replaced: dict[str, Any] = {
        "_initialized": True,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": accelerator.synchronize,
        "Stream": Stream,
        "Event": Event,
        "current_stream": _current_stream,
        "default_stream": lambda device=None: torch.Stream(device=device, stream_id=0, device_type=1),
        "set_stream": accelerator.set_stream,
        "is_current_stream_capturing": lambda: False,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "empty_cache": accelerator.empty_cache,
        "mem_get_info": accelerator.get_memory_info,
        "memory_stats": accelerator.memory_stats,
        "memory_allocated": accelerator.memory_allocated,
        "max_memory_allocated": accelerator.max_memory_allocated,
        "memory_reserved": accelerator.memory_reserved,
        "max_memory_reserved": accelerator.max_memory_reserved,
        "reset_peak_memory_stats": accelerator.reset_peak_memory_stats,
        **_private_pools(library),
        "cudart": lambda: runtime,
        "CudaError": lambda code: RuntimeError(f"error {code} of the lagging device"),
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_arch_list": lambda: ["sm_90"],
        "default_generators": tuple(torch.Generator(f"cuda:{index}") for index in range(NUM_DEVICES)),
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    torch.UntypedStorage.resize_ = _resize_with(library, torch.UntypedStorage.resize_)


def _register_backend() -> None:
    """Make the device's process group that of CUDA, as NCCL is in a build with CUDA. See collectives.h."""

    def make(options: Any, _: object) -> Any:
        group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        torch.ops.lagging.add_backend(group.boxed(), options.timeout.total_seconds())
        return group._get_backend(torch.device("cuda"))

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cuda"])
    dist.Backend.default_device_backend_map["cuda"] = BACKEND  # register_backend leaves NCCL there


def _resize_with(library: ctypes.CDLL, resize: Any) -> Any:
    """`UntypedStorage.resize_` of the CPU build knows no CUDA."""

    def resize_storage(self: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, nbytes)
        if not library.lagging_resize_storage(self._cdata, nbytes):
            raise torch.OutOfMemoryError(f"CUDA out of memory (lagging device): tried to allocate {nbytes} bytes")
        return self

    return resize_storage
