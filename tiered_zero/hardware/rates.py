"""Measure the rates of this machine for plans: matrix products, a small model, host memory, the link to the device.

assembly/machine_rates.py measures the optimizer's rates, and stores all of them. Main thread; the device is idle.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiered_zero.hardware.check import COPY_NBYTES, NUM_COPIES, copy_buffers, launch_seconds
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.sizes import MIB

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

REPEATS: Final = 5

LIMIT_S: Final = 1.0
"""The seconds after which one rate is measured no further: slow work is repeated less often."""

_SHAPES: Final = {True: (512, 512), False: (4096, 4096)}
"""Tokens and hidden size of the products, on the CPU and on others. On two cores of Zen 5, alone, 512 x 512 reaches
0.95 of the rate of 2048 x 2048 in fp32 and in bf16. With fewer tokens reading the weights takes additional time."""

_MODEL_SHAPES: Final = {True: (256, 2, 8192), False: (4096, 2, 16384)}
"""Tokens, blocks and vocabulary of the small model. Its hidden size is that of the products."""

_SLOW: Final = 0.1
"""The small model does not run in a dtype that the device multiplies at less than this part of its rate in fp32."""

_COPIED_NBYTES: Final = 128 * MIB


def median_rate(amount: float, work: Callable[[], object]) -> float:
    """Return `amount` per second, from the median of REPEATS calls of `work`. A first call before them counts only if
    that call alone takes LIMIT_S. `amount`: bytes or operations of one call."""
    seconds: list[float] = []
    while not seconds or (len(seconds) <= REPEATS and sum(seconds) < LIMIT_S):
        began_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_s)
    return amount / max(statistics.median(seconds[1:] or seconds), 1e-9)


def product_rates(accelerator: Accelerator) -> Mapping[str, float]:
    """Return name of dtype -> operations per second of an MLP's matrix products, one of forward and two of backward.
    Dtypes that the device cannot multiply are left out."""
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
    """Return name of dtype -> elements per second of what a model computes besides its matrix products, in forward and
    backward together: elements of the hidden states of transformer blocks, and logits of a loss. `products`: the result
    of `product_rates`. Dtypes that the device multiplies slowly, or whose model has no room, are left out."""
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
    """Return `amount` per second of `work` without its products; at least a tenth of its time is without them."""
    seconds = 1 / median_rate(1.0, work)
    return amount / max(seconds - product_s, seconds / 10)


def _model_parts(
    accelerator: Accelerator, dtype: torch.dtype, tokens: int, hidden: int, layers: int, vocab: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that run forward and backward of a model's blocks, and of its last layer and loss."""
    device = accelerator.device
    block = nn.TransformerEncoderLayer(
        hidden, max(1, hidden // 64), 4 * hidden, activation="gelu", batch_first=True, norm_first=True
    )
    blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False).to(device, dtype)
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
    """Return bytes read plus bytes written per second by a copy within host memory, on torch's threads."""
    source, target = (torch.ones(_COPIED_NBYTES, dtype=torch.uint8) for _ in range(2))
    return median_rate(2 * _COPIED_NBYTES, lambda: target.copy_(source))


def link_rates(accelerator: Accelerator) -> tuple[float | None, float | None]:
    """Return bytes per second of copies from pinned memory to the device, and back; None if the device is the CPU."""
    if accelerator.device.type == "cpu":
        return None, None
    with copy_buffers(accelerator) as launches:
        seconds = [statistics.median(launch_seconds(accelerator, each) for _ in range(REPEATS)) for each in launches]
    to_device, from_device = (NUM_COPIES * COPY_NBYTES / each for each in seconds)
    return to_device, from_device
