"""How master weights and state may rest in 16 bits: exactly, as `bf16_remainder`, or lossy, as bf16 moments.

`bf16_remainder` keeps a fp32 master as its bf16 parameter and 16 more bits, 4 bytes for both instead of 6:

    master = (bits of the parameter << 16) + remainder, a signed 16-bit number

The parameter is the master rounded to nearest, and the master loses nothing. One that lies exactly between two bf16
numbers is rounded away from zero where torch rounds to even: with ties to even, an even parameter would stand for
65,537 masters, one more than 16 bits tell apart. Infinities stay; every NaN becomes the same one.
"""

from __future__ import annotations

import torch

_NAN = 0x7FC00000
_WORD = 0xFFFFFFFF


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 -> (bf16 parameter, int16 remainder), each of the same shape."""
    bits = torch.where(master.isnan(), _NAN, master.view(torch.int32))
    low = bits.to(torch.int16)  # the low half
    high = ((bits - low.to(torch.int32)) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), low


def join_master(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master, bit for bit."""
    high = parameter.view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def round_randomly(values: torch.Tensor, seed: int) -> torch.Tensor:
    """fp32 -> bf16 by stochastic rounding, with the noise of the native kernel: a hash of the value and the seed,
    not of a position, so that no cut changes it. The seed differs from step to step and from array to array."""
    bits = values.view(torch.int32).to(torch.int64) & _WORD
    noise = bits ^ (seed & _WORD)
    noise = ((noise ^ (noise >> 16)) * 0x85EBCA6B) & _WORD
    noise = ((noise ^ (noise >> 13)) * 0xC2B2AE35) & _WORD
    noise = (noise ^ (noise >> 16)) & 0xFFFF
    rounded = ((bits + noise) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, values.to(torch.bfloat16))
