"""The `bf16_remainder` format: a fp32 master weight kept as its bf16 parameter and 16 more bits.

    master = (parameter's bits << 16) + remainder, a signed 16-bit number

so the parameter is the master rounded to nearest, and nothing is lost: 4 bytes for both instead of 6. A master that lies
exactly between two bf16 numbers is rounded away from zero, where torch rounds to even: with ties to even, an even
parameter would stand for 65,537 masters, one more than 16 bits can tell apart. Infinities are kept; every NaN becomes one.
"""

from __future__ import annotations

import torch

_NAN = 0x7FC00000


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 -> (bf16 parameter, int16 remainder), each of the same shape."""
    bits = torch.where(master.isnan(), _NAN, master.view(torch.int32))
    low = bits.to(torch.int16)  # keeps the low half
    high = ((bits - low.to(torch.int32)) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), low


def join_master(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master, bit for bit."""
    high = parameter.view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)
