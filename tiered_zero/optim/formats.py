"""How master weights and state may rest in 16 bits: exactly, as `bf16_remainder`, or lossy, as bf16 moments.

[Note: bf16 and remainder] A fp32 master as its bf16 parameter and 16 more bits, 4 bytes for both instead of 6:

    master = (bits of the parameter << 16) + remainder + (mark << 16)

The parameter is the master rounded to nearest, ties to even, as in every other format, and the master loses nothing.
The remainder is a signed 16-bit number: the low half of the master. One bit is missing, for an even parameter stands
for 65,537 masters, both ties beside it included. The mark is that bit: set where a tie lies above (in magnitude) the
even parameter that it was rounded to. It rests in the sign of Adam's second moment, which is never negative.
Infinities stay; every NaN becomes the same one.
"""

from __future__ import annotations

import torch

_NAN = 0x7FC00000
_WORD = 0xFFFFFFFF


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 -> (bf16 parameter, int16 remainder, bool mark), each of the same shape."""
    bits = torch.where(master.isnan(), _NAN, master.view(torch.int32))
    return bits.view(torch.float32).to(torch.bfloat16), bits.to(torch.int16), (bits & 0x1FFFF) == 0x8000


def join_master(parameter: torch.Tensor, remainder: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    """The fp32 master, bit for bit."""
    high = (parameter.view(torch.int16).to(torch.int32) + mark) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def hash_noise(values: torch.Tensor, seed: int) -> torch.Tensor:
    """16 random bits for each fp32 value, int32, as in the native kernel: a hash of the value and the seed, not of a
    position, so that no cut changes it. The seed differs from step to step and from array to array."""
    noise = values.view(torch.int32) ^ _signed(seed)
    noise = (noise ^ ((noise >> 16) & 0xFFFF)) * _signed(0x85EBCA6B)
    noise = (noise ^ ((noise >> 13) & 0x7FFFF)) * _signed(0xC2B2AE35)
    return (noise ^ (noise >> 16)) & 0xFFFF


def round_randomly(values: torch.Tensor, seed: int) -> torch.Tensor:
    """fp32 -> bf16 by stochastic rounding."""
    rounded = ((values.view(torch.int32) + hash_noise(values, seed)) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, values.to(torch.bfloat16))


def _signed(word: int) -> int:
    """The int32 of 32 bits."""
    return ((word & _WORD) ^ 0x80000000) - 0x80000000
