"""Adam with its moments in 8 bits, block by block: lossy, opt-in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from tiered_zero.layout.swap_bytes import QUANTIZED_BLOCK_NUMEL
from tiered_zero.optim.adam import AdamRule
from tiered_zero.optim.formats import hash_noise
from tiered_zero.optim.rule import Run, StateField, UpdateRule

_CHUNK_NUMEL = 1 << 16
_SIGNED = 127.0
_UNSIGNED = 255.0
_TINY = torch.finfo(torch.float32).tiny


@final
class QuantizedAdam(UpdateRule):
    """AdamRule on chunks of moments that are decoded before it and encoded after it.

    A block is QUANTIZED_BLOCK_NUMEL elements, which is what parameters are aligned to in every dtype: so no block holds
    two of them, none is cut, and its codes depend on its own elements and the step alone. Its scale is its largest
    magnitude. Codes are roots, which gives small values their share: the first moment is scale * sign * (code / 127)^2,
    the second scale * (code / 255)^4. They are rounded stochastically, since a second moment moves by less than a code
    in a step; and one that is not zero never becomes zero, or the next step would divide by nothing.
    """

    elementwise = True

    def __init__(self, inner: AdamRule) -> None:
        self.name = inner.name
        self._inner = inner

    def state_fields(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> list[StateField]:
        names = [field.name for field in self._inner.state_fields(shape, hyper)]
        scales = (-(-shape[0] // QUANTIZED_BLOCK_NUMEL),)
        return [StateField(name, shape, _dtype(name)) for name in names] + [
            StateField(_scale(name), scales, torch.float32, QUANTIZED_BLOCK_NUMEL) for name in names
        ]

    def init_state(self, run: Run) -> None:
        """Zeros."""

    def update(self, runs: Sequence[Run]) -> None:
        for run in runs:
            scalars = run.scalars
            for start in range(0, run.master.numel(), _CHUNK_NUMEL):
                scalars = self._update_chunk(run, start, start + _CHUNK_NUMEL)
            run.scalars = scalars

    def announce(self) -> None:
        self._inner.announce()

    def close(self) -> None:
        self._inner.close()

    def _update_chunk(self, run: Run, start: int, stop: int) -> dict[str, Any]:
        part = slice(start, stop)
        blocks = slice(start // QUANTIZED_BLOCK_NUMEL, -(-stop // QUANTIZED_BLOCK_NUMEL))
        names = [name for name in run.state if _scale(name) in run.state]
        state = {name: decode(run.state[name][part], run.state[_scale(name)][blocks]) for name in names}
        out = None if run.out is None else run.out[part]
        chunk = Run(
            run.master[part], run.grad[part], state, dict(run.scalars), run.hyper, out, run.grad_scale
        )
        self._inner.update([chunk])
        for which, name in enumerate(names):
            seed = self._inner.seed_of(chunk.scalars["step"]) + which
            codes, scales = encode(state[name], run.state[name].dtype, seed)
            run.state[name][part] = codes
            run.state[_scale(name)][blocks] = scales
        return chunk.scalars


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[n] int8 (signed squares) or uint8 (fourth powers), and a scale a block -> [n] fp32."""
    values = codes.to(torch.float32)
    if codes.dtype is torch.int8:
        values.div_(_SIGNED)
        values.mul_(values.abs())
    else:
        values.div_(_UNSIGNED).square_().square_()
    return values.mul_(_spread(scales, values.numel()))


def encode(values: torch.Tensor, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[n] fp32 -> (codes, scales), with noise of each value and `seed`."""
    padded = torch.nn.functional.pad(values.abs(), (0, -values.numel() % QUANTIZED_BLOCK_NUMEL))
    scales = padded.view(-1, QUANTIZED_BLOCK_NUMEL).amax(1)
    share = values.abs().div_(_spread(scales, values.numel()).clamp_(min=_TINY)).nan_to_num_(0.0)
    noise = hash_noise(values, seed).to(torch.float32).div_(1 << 16)
    if dtype is torch.int8:
        codes = share.sqrt_().mul_(_SIGNED).add_(noise).floor_().clamp_(max=_SIGNED)
        return codes.copysign_(values).to(dtype), scales
    codes = share.sqrt_().sqrt_().mul_(_UNSIGNED).add_(noise).floor_().clamp_(max=_UNSIGNED)
    return torch.where(values != 0, codes.clamp_(min=1.0), 0.0).to(dtype), scales


def _spread(scales: torch.Tensor, numel: int) -> torch.Tensor:
    return scales.repeat_interleave(QUANTIZED_BLOCK_NUMEL)[:numel]


def _scale(name: str) -> str:
    return f"{name}_scale"


def _dtype(name: str) -> torch.dtype:
    return torch.int8 if name == "exp_avg" else torch.uint8
