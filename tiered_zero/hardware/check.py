"""Check the device for `tiered-zero doctor --device`, and measure the rates of memory, link and compute for plans.

Each check takes an open accelerator and returns one finding. Call the checks on the main thread, while the device is
idle. Errors of torch are raised unchanged."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.memory.host_memory import HostArena
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.sizes import MIB, format_nbytes
from tiered_zero.system import BAD, GOOD, POOR, Finding
from tiered_zero.telemetry.spans import Ledger

COPY_NBYTES = 256 * MIB
NUM_COPIES = 4
SIDE = 4096
"""Rows and columns of the matrices that are multiplied."""

BUSY_S = 0.1
"""Seconds for which the device computes while a thread waits for it."""

Launch = Callable[[], Transfer]
_ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def check_memory(accelerator: Accelerator) -> Finding:
    free, total = torch.accelerator.get_memory_info(accelerator.device)
    found = f"{format_nbytes(free)} of {format_nbytes(total)} free"
    fix = "" if free > 0.9 * total else "stop what else uses the device (nvidia-smi)"
    return Finding("device memory", POOR if fix else GOOD, found, fix)


def check_kernel(accelerator: Accelerator) -> Finding:
    """Launch a kernel on the device. The launch fails if this torch was not built for the device's architecture."""
    device, built = accelerator.device, f"torch {torch.__version__}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        built = f"sm_{major}{minor}, {built} for {' '.join(torch.cuda.get_arch_list()) or 'what it does not say'}"
    try:
        float((torch.ones(1024, device=device) * 2).sum())
    except RuntimeError as error:
        found = f"does not run ({built}): {str(error).partition(chr(10))[0]}"
        return Finding("kernel", BAD, found, "install a torch built for this device, and a driver new enough for it")
    return Finding("kernel", GOOD, f"runs ({built})")


def check_copies(accelerator: Accelerator) -> Finding:
    """Measure copy rates to the device, from the device, and in both directions at once, from pinned and pageable
    memory."""
    rates, fix = {}, ""
    for pins in (True, False):
        with copy_buffers(accelerator, pins) as (up, down):
            up_s, down_s, both_s = (launch_seconds(accelerator, *each) for each in ([up], [down], [up, down]))
        to, from_, both = (NUM_COPIES * COPY_NBYTES / seconds / 1e9 for seconds in (up_s, down_s, both_s / 2))
        rates[pins] = f"{to:.3g} to the device, {from_:.3g} from it, {both:.3g} both at once"
        if pins and both_s > 0.85 * (up_s + down_s):
            fix = "see pinned memory; look at what else uses the link, and at its width (nvidia-smi -q)"
    found = f"GB/s pinned: {rates[True]}; pageable: {rates[False]}"
    return Finding("copies", POOR if fix else GOOD, found, fix)


def check_overlap(accelerator: Accelerator) -> Finding:
    """Measure which share of a copy runs at the same time as matrix products."""
    with copy_buffers(accelerator) as (up, _):
        copy_s = launch_seconds(accelerator, up)
        products, products_s = _products(accelerator, copy_s)
        hidden = (copy_s + products_s - launch_seconds(accelerator, up, products)) / min(copy_s, products_s)
    found = f"{max(0.0, min(1.0, hidden)):.0%} of a copy runs during a product"
    fix = "" if hidden > 0.5 else "see copies and pinned memory; until then a step takes the sum of compute and copies"
    return Finding("overlap", POOR if fix else GOOD, found, fix)


def check_sleep(accelerator: Accelerator) -> Finding:
    """Measure the CPU time of a thread that waits for the device."""
    products, _ = _products(accelerator, BUSY_S)
    transfer = products()
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    transfer.wait()
    share = (time.thread_time() - began_cpu_s) / max(time.perf_counter() - began_s, 1e-9)
    found = f"a thread that waits for the device takes {share:.0%} of a core"
    fix = "" if share < 0.5 else "give the process a core more: the update has one less while the device is waited for"
    return Finding("waits", POOR if fix else GOOD, found, fix)


def check_allocator(accelerator: Accelerator) -> Finding:
    """Check that torch's device allocator gives the memory of freed units back to the device. The finding names the
    allocator."""
    device = accelerator.device
    backend = torch.cuda.memory.get_allocator_backend() if device.type == "cuda" else device.type
    conf = next((f"{name}={os.environ[name]}" for name in _ALLOC_CONF if name in os.environ), "no PYTORCH_ALLOC_CONF")
    before = torch.accelerator.memory_reserved(device)
    with accelerator.unit_memory():
        block = torch.empty(COPY_NBYTES, dtype=torch.uint8, device=device)
    del block
    accelerator.release_cached_memory()
    kept = torch.accelerator.memory_reserved(device) - before
    fix = "" if kept <= 0 else "leave PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF unset"
    if device.type == "cuda" and backend != "native":
        fix = "leave backend out of PYTORCH_CUDA_ALLOC_CONF: units have a pool of their own in the native allocator"
    found = f"{backend}, {conf}; of {format_nbytes(COPY_NBYTES)} for units {format_nbytes(max(0, kept))} are kept"
    return Finding("allocator", POOR if fix else GOOD, found, fix)


def check_pinning(accelerator: Accelerator, nbytes: int) -> Finding:
    """Pin `nbytes` of host memory, and measure how many seconds this takes."""
    if nbytes > (available := available_host_nbytes()):
        found = f"{format_nbytes(nbytes)} asked for, {format_nbytes(available)} of host memory may be taken"
        return Finding("pinned memory", BAD, found, "lower tiered_zero.host_memory_limit")
    began_s = time.perf_counter()
    with _arena(accelerator, nbytes) as arena:
        arena.take(nbytes, "param")
        seconds, pinned = time.perf_counter() - began_s, arena.pinned_nbytes
    found = f"{format_nbytes(pinned and nbytes)} of {format_nbytes(nbytes)} pinned in {seconds:.2f} s"
    fix = "" if pinned else "see the driver's log; raise the container's limits; under WSL its memory limit"
    return Finding("pinned memory", POOR if fix else GOOD, found, fix)


@contextmanager
def _arena(accelerator: Accelerator, nbytes: int, pins: bool = True) -> Iterator[HostArena]:
    arena = HostArena(nbytes, accelerator, pin=pins, ledger=Ledger())
    try:
        yield arena
    finally:
        accelerator.synchronize()
        arena.close()


@contextmanager
def copy_buffers(accelerator: Accelerator, pins: bool = True) -> Iterator[tuple[Launch, Launch]]:
    """Yield two functions. The first launches NUM_COPIES copies of COPY_NBYTES to the device, the second launches as
    many copies back. `pins`: whether the host memory is pinned."""
    with _arena(accelerator, 2 * COPY_NBYTES, pins) as arena:
        host = [arena.take(COPY_NBYTES, "param").fill_(0) for _ in range(2)]
        on_device = [torch.zeros(COPY_NBYTES, dtype=torch.uint8, device=accelerator.device) for _ in range(2)]

        def launch(lane: str, target: torch.Tensor, source: torch.Tensor) -> Transfer:
            def copy() -> None:
                for _ in range(NUM_COPIES):
                    accelerator.copy(target, source)

            return accelerator.lane(lane).submit(copy)

        up = partial(launch, "fetch", on_device[0], host[0])
        down = partial(launch, "reduce", host[1], on_device[1])
        launch_seconds(accelerator, up, down)  # the first copies also set up the lanes
        yield up, down


def _products(accelerator: Accelerator, seconds: float) -> tuple[Launch, float]:
    """Return a function that launches matrix products for about `seconds`, and the seconds measured for it."""
    square = torch.ones(SIDE, SIDE, device=accelerator.device)

    def launch(number: int = 1) -> Transfer:
        for _ in range(number):
            square @ square
        return accelerator.record_compute()

    launch().wait()
    number = math.ceil(seconds / launch_seconds(accelerator, launch))
    products = partial(launch, number)
    return products, launch_seconds(accelerator, products)


def launch_seconds(accelerator: Accelerator, *launches: Launch) -> float:
    """Call all `launches`, and return the seconds until all of their work is complete."""
    accelerator.synchronize()
    began_s = time.perf_counter()
    for transfer in [launch() for launch in launches]:
        transfer.wait()
    return time.perf_counter() - began_s


DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

REPEATS: Final = 5

LIMIT_S: Final = 1.0
"""`median_rate` stops repeating its work after this many seconds."""

_SHAPES: Final = {True: (512, 512), False: (4096, 4096)}
"""The number of tokens and the hidden size of the measured matrix products, for the CPU (True) and other devices
(False). 512 is enough on the CPU: two idle Zen 5 cores reach 0.95 of the rate of products of size 2048."""

_MODEL_SHAPES: Final = {True: (256, 2, 8192), False: (4096, 2, 16384)}
"""Whether the device is the CPU -> numbers of tokens, blocks and vocabulary entries of the small model. The model's
hidden size is in `_SHAPES`."""

_SLOW: Final = 0.1
"""A dtype is slow if its matrix products reach less than this share of the fp32 rate. The small model skips slow
dtypes."""

_COPIED_NBYTES: Final = 128 * MIB


def median_rate(amount: float, work: Callable[[], object]) -> float:
    """Time repeated calls of `work`. Return `amount`, the bytes or operations of one call, divided by the median
    time."""
    seconds: list[float] = []  # the first is dropped, unless it is the only one
    while not seconds or (len(seconds) <= REPEATS and sum(seconds) < LIMIT_S):
        began_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_s)
    return amount / max(statistics.median(seconds[1:] or seconds), 1e-9)


def product_rates(accelerator: Accelerator) -> Mapping[str, float]:
    """Measure the matrix products of a linear layer, as in forward and backward. Return dtype name -> operations per
    second."""
    tokens, hidden = _SHAPES[accelerator.device.type == "cpu"]
    rates = {}
    for name, dtype in DTYPES.items():
        with suppress(RuntimeError):  # the device cannot multiply this type
            inputs, grads, weights = (
                torch.randn(shape, device=accelerator.device).to(dtype)
                for shape in ((tokens, hidden), (tokens, 4 * hidden), (4 * hidden, hidden))
            )

            def multiply(inputs: Tensor = inputs, grads: Tensor = grads, weights: Tensor = weights) -> None:
                inputs @ weights.t(), grads @ weights, grads.t() @ inputs
                accelerator.record_compute().wait()

            rates[name] = median_rate(3 * 2 * tokens * hidden * 4 * hidden, multiply)
    return rates


def model_rates(
    accelerator: Accelerator, products: Mapping[str, float]
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Measure a small model's forward and backward, and subtract the time of its matrix products. Return two maps from
    dtype names to rates. The first has hidden-state elements per second in the blocks, the second has logits per second
    in the loss. Both leave out slow dtypes (`_SLOW`) and dtypes in which the model does not run."""
    tokens, layers, vocab = _MODEL_SHAPES[accelerator.device.type == "cpu"]
    hidden = _SHAPES[accelerator.device.type == "cpu"][1]
    in_blocks, logits = {}, {}
    for name, rate in products.items():
        if rate < _SLOW * products.get("fp32", 0.0):
            continue
        with suppress(RuntimeError):  # no room, or no operation of this type
            run_blocks, run_loss = _model_parts(accelerator, DTYPES[name], tokens, hidden, layers, vocab)
            product_s = 6 * tokens * hidden * layers * (12 * hidden + tokens) / rate
            in_blocks[name] = _rate_besides(tokens * layers * hidden, product_s, run_blocks)
            logits[name] = _rate_besides(tokens * vocab, 6 * tokens * hidden * vocab / rate, run_loss)
    return in_blocks, logits


def _rate_besides(amount: float, product_s: float, work: Callable[[], object]) -> float:
    """Time `work`, and subtract `product_s`, the seconds of its matrix products. Return `amount` divided by the
    difference, which counts as at least a tenth of the time."""
    seconds = 1 / median_rate(1.0, work)
    return amount / max(seconds - product_s, seconds / 10)


def _model_parts(
    accelerator: Accelerator, dtype: torch.dtype, tokens: int, hidden: int, layers: int, vocab: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions that run forward and backward: one for a model's blocks, one for its last layer and loss."""
    device = accelerator.device
    heads = max(1, hidden // 64)
    block = nn.TransformerEncoderLayer(
        hidden, heads, 4 * hidden, activation="gelu", batch_first=True, norm_first=True, device=device, dtype=dtype
    )
    blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    head = nn.Linear(hidden, vocab, bias=False, device=device, dtype=dtype)
    inputs = torch.randn(1, tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (tokens,), device=device)
    mask = nn.Transformer.generate_square_subsequent_mask(tokens, device=device, dtype=dtype)

    def run_blocks() -> None:
        blocks.zero_grad()
        torch.autograd.backward(blocks(inputs, mask=mask, is_causal=True).sum())
        accelerator.record_compute().wait()

    def run_loss() -> None:
        head.zero_grad()
        torch.autograd.backward(functional.cross_entropy(head(inputs)[0].float(), labels))
        accelerator.record_compute().wait()

    return run_blocks, run_loss


def copy_rate() -> float:
    """Copy within host memory on torch's threads. Return the bytes read plus the bytes written, per second."""
    source, target = (torch.ones(_COPIED_NBYTES, dtype=torch.uint8) for _ in range(2))
    return median_rate(2 * _COPIED_NBYTES, lambda: target.copy_(source))


def link_rates(accelerator: Accelerator) -> tuple[float | None, float | None]:
    """Return the bytes per second of copies from pinned memory to the device, and of copies back; (None, None) on the
    CPU."""
    if accelerator.device.type == "cpu":
        return None, None
    with copy_buffers(accelerator) as launches:
        seconds = [statistics.median(launch_seconds(accelerator, each) for _ in range(REPEATS)) for each in launches]
    to_device, from_device = (NUM_COPIES * COPY_NBYTES / each for each in seconds)
    return to_device, from_device
