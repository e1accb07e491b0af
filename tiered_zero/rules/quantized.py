"""Store Adam's moments in 8 bits, with one scale for each block of elements. This is lossy."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, final

import torch

from tiered_zero.layout.subgroups import QUANTIZED_BLOCK_NUMEL
from tiered_zero.native.update import Moments, UpdateKernel
from tiered_zero.rules.native_rules import AdamRule
from tiered_zero.rules.rule import Slice, StateField, UpdateRule, batches, packed
from tiered_zero.rules.state_layout import hash_noise

_CPU_CHUNK_NUMEL = 1 << 19
_SCALE = "_scale"
_SIGNED = 127
_UNSIGNED = 255
_TINY = torch.finfo(torch.float32).tiny


def _decoded_bytes() -> dict[torch.dtype, torch.Tensor]:
    """Return dtype of codes -> table, [256] fp32. Entry b of a table is the decoded value of byte b, for a scale of
    1."""
    code = torch.arange(256, dtype=torch.float64)
    # Products, without pow, so that the tables are equal on every processor. The kernel reads them too.
    signed, square = torch.where(code < 128, code, code - 256) / _SIGNED, (code / _UNSIGNED).square()
    return {torch.int8: (signed * signed.abs()).float(), torch.uint8: (square * square).float()}


_TABLES = _decoded_bytes()


@final
class QuantizedAdam(UpdateRule):
    """Adam with moments of 8 bits: dequantizes one chunk to fp32, steps it as AdamRule does, and quantizes it again.

    A block is QUANTIZED_BLOCK_NUMEL neighbouring elements with one scale, their largest magnitude. Blocks are not cut,
    and every parameter begins a new block, so that codes do not depend on the placement. The first moment is scale *
    sign * (code / 127)^2, the second scale * (code / 255)^4.
    """

    elementwise = True

    def __init__(self, inner: AdamRule) -> None:
        self.name, self.kernel = inner.name, inner.kernel
        self._inner = inner
        self._floats: dict[str, torch.Tensor] = {}

    def state_fields(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> list[StateField]:
        names = [field.name for field in self._inner.state_fields(shape, hyper)]
        scales = (-(-prod(shape) // QUANTIZED_BLOCK_NUMEL),)
        return [StateField(name=name, shape=shape, dtype=_dtype(name)) for name in names] + [
            StateField(name=_scale(name), shape=scales, dtype=torch.float32, block_numel=QUANTIZED_BLOCK_NUMEL)
            for name in names
        ]

    def update(self, slices: Sequence[Slice]) -> None:
        alike: dict[Hashable, list[Slice]] = {}
        for part in slices:
            alike.setdefault(self._inner.kind_of(part), []).append(part)
        for group in alike.values():
            scalars, scales = group[0].scalars, [name for name in group[0].state if name.endswith(_SCALE)]
            for batch in batches(group, _part, _CPU_CHUNK_NUMEL):
                with packed(batch, QUANTIZED_BLOCK_NUMEL, scales) as joined:
                    scalars = self._update_chunk(joined)
            for part in group:
                part.scalars = dict(scalars)

    def first_state(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> dict[str, Any]:
        return self._inner.first_state(shape, hyper)

    def export_state(self, state: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> dict[str, Any]:
        floats: dict[str, torch.Tensor] = {}
        for name, codes in state.items():
            if _scale(name) in state:
                floats[name] = torch.empty(codes.shape, device=codes.device)
                dequantize(codes, state[_scale(name)], floats[name], None)
        return self._inner.export_state(floats, scalars)

    def check_state(self, values: Mapping[str, Any], shape: tuple[int, ...], hyper: Mapping[str, Any]) -> None:
        self._inner.check_state(values, shape, hyper)

    def import_state(
        self, values: Mapping[str, Any], state: Mapping[str, torch.Tensor], hyper: Mapping[str, Any]
    ) -> dict[str, Any]:
        names = [name for name in state if _scale(name) in state]
        floats = {name: torch.empty(state[name].shape, device=state[name].device) for name in names}
        scalars = self._inner.import_state(values, floats, hyper)
        for name, array in floats.items():
            quantize(state[name], state[_scale(name)], array, None, None)
        return scalars

    def load_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        return self._inner.load_scalars(scalars)

    def announce(self) -> None:
        self._inner.announce()

    def _update_chunk(self, chunk: Slice) -> dict[str, Any]:
        """Step a chunk through fp32 copies of its moments. Return the chunk's new scalars."""
        kernel = self.kernel if chunk.master.is_cpu else None
        arrays = {
            name: (array, chunk.state[_scale(name)], self._scratch(name, array))
            for name, array in chunk.state.items()
            if _scale(name) in chunk.state
        }
        for array in arrays.values():
            dequantize(*array, kernel)
        floats = {name: values for name, (_, _, values) in arrays.items()}
        stepped = replace(chunk, state=floats, scalars=dict(chunk.scalars))
        self._inner.update([stepped])
        seed = self._inner.seed_of(stepped.scalars["step"])
        for which, array in enumerate(arrays.values()):
            quantize(*array, seed + which, kernel)
        return stepped.scalars

    def _scratch(self, name: str, array: torch.Tensor) -> torch.Tensor:
        """Return fp32 memory, [n], to decode `array` into. `array`: the codes of the state array `name`."""
        kept, numel = self._floats.get(name), array.numel()  # all chunks share it: it stays in the cache
        if kept is None or kept.numel() < numel or kept.device != array.device:
            kept = self._floats[name] = torch.empty(numel, device=array.device)
        return kept[:numel]


def _part(part: Slice, start: int, stop: int) -> Slice:
    """Return the elements [start, stop) of `part` with their scales. `start` must be the first element of a block."""
    blocks = slice(start // QUANTIZED_BLOCK_NUMEL, -(-stop // QUANTIZED_BLOCK_NUMEL))
    found = part.cut(start, stop)
    found.state |= {name: array[blocks] for name, array in part.state.items() if name.endswith(_SCALE)}
    return found


def dequantize(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, kernel: UpdateKernel | None) -> None:
    """Compute `values`, [n] fp32, from `codes`, [n] int8 (first moments) or uint8 (second moments), and `scales`, one
    per block. `kernel`: the native kernel that computes the values; None: use torch."""
    if kernel is not None:
        kernel.convert(_moments(codes, scales, values))
        return
    table = _table(codes.dtype, codes.device)
    values.copy_(table[codes.view(torch.uint8).to(torch.int64)]).mul_(_spread(scales, values.numel()))


@cache  # a copy to a device waits for everything launched before it
def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the table of decoded values for codes of `dtype`, on a device."""
    return _TABLES[dtype].to(device)


def quantize(
    codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, seed: int | None, kernel: UpdateKernel | None
) -> None:
    """Compute `codes` and `scales` from `values`, [n] fp32. `seed`: the seed of stochastic rounding; None: torch rounds
    to nearest, and values from `dequantize` get their old codes. torch and the kernel give the same bits."""
    if kernel is not None and seed is not None:
        kernel.convert(_moments(codes, scales, values, seed & 0xFFFFFFFF, quantizes=True))
        return
    signed = codes.dtype is torch.int8
    top = _SIGNED if signed else _UNSIGNED
    magnitude = values.abs()
    padded = torch.nn.functional.pad(magnitude, (0, -values.numel() % QUANTIZED_BLOCK_NUMEL))
    scales.copy_(padded.view(-1, QUANTIZED_BLOCK_NUMEL).amax(1))
    root = _exact_root(magnitude / _spread(scales, values.numel()).clamp_(min=_TINY))
    # Stochastic, because a second moment changes by less than one code in a step.
    noise = 0.5 if seed is None else hash_noise(values, seed).to(torch.float32) / (1 << 16)
    found = (root if signed else _exact_root(root)).mul_(top).add_(noise).nan_to_num_(0.0).clamp_(max=top).floor_()
    # A nonzero second moment never becomes zero: the next step divides by its root.
    codes.copy_(found.copysign_(values) if signed else torch.where(values != 0, found.clamp_(min=1.0), 0.0))


def _exact_root(values: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded fp32 square root. torch's own root may differ ([Note: bits of torch])."""
    # An error of one unit in double precision does not change the result: the root of a 24-bit number is at least four
    # such units away from every value at which fp32 rounding changes.
    return values.to(torch.float64).sqrt_().to(torch.float32)


def _moments(
    codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, seed: int = 0, quantizes: bool = False
) -> Moments:
    addresses = (tensor.data_ptr() for tensor in (codes, scales, values, _TABLES[codes.dtype]))
    return Moments(*addresses, values.numel(), codes.dtype is torch.int8, quantizes, seed)


def _spread(scales: torch.Tensor, numel: int) -> torch.Tensor:
    return scales.repeat_interleave(QUANTIZED_BLOCK_NUMEL)[:numel]


def _scale(name: str) -> str:
    return name + _SCALE


def _dtype(name: str) -> torch.dtype:
    return torch.int8 if name == "exp_avg" else torch.uint8
