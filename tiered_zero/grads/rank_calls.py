"""Exchange a step's calls between ranks: check that they match, and combine each rank's part of the gradient check."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import final
from zlib import crc32

from tiered_zero.errors import RankError
from tiered_zero.grads.norms import NONE_BAD
from tiered_zero.hardware.ranks.collectives import Collectives

_CALL = struct.Struct("<cqqq")
_SQUARES = struct.Struct("<dqI")
_BACKWARD, _STEP = b"b", b"s"


@final
class RankCalls:
    """Exchanges flags between ranks when a backward that reduces begins and in step(); returns which are set on any
    rank.

    Raises RankError on every rank if one makes another call. Driver thread, or autograd's while the driver waits.
    `num_sums`: reductions of this step whose sums this rank holds; the others must hold the same number.
    """

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._num_backwards = self._num_steps = 0

    def begin_backward(self, flags: Sequence[bool], num_sums: int) -> list[bool]:
        self._num_backwards += 1
        what = f"backward {self._num_backwards} after step {self._num_steps}"
        return self._agree((_BACKWARD, self._num_steps, self._num_backwards, num_sums), flags, what)

    def begin_step(self, global_steps: int, micro_steps: int, flags: Sequence[bool], num_sums: int) -> list[bool]:
        return self._agree((_STEP, global_steps, micro_steps, num_sums), flags, f"step {global_steps}")

    def add_squares(self, squares: float, bad: int, group_values: bytes) -> tuple[float, int]:
        """Return the sum of all ranks' `squares`, in rank order, and their first `bad` parameter, or NONE_BAD. Raises
        RankError if ranks differ in `group_values`, the JSON of the values of param groups."""
        message = _SQUARES.pack(squares, bad, crc32(group_values))
        found = [_SQUARES.unpack(each) for each in self._ranks.exchange(message, "the gradient norm")]
        if len({values for _, _, values in found}) > 1:
            raise _other_values(self._ranks.exchange(group_values, "values of param groups"))
        named = [index for _, index, _ in found if index != NONE_BAD]
        return sum(each for each, _, _ in found), min(named, default=NONE_BAD)

    def end_step(self) -> None:
        self._num_backwards = 0
        self._num_steps += 1

    def _agree(self, call: tuple[bytes, int, int, int], flags: Sequence[bool], what: str) -> list[bool]:
        bits = sum(flag << place for place, flag in enumerate(flags))
        packed = bits.to_bytes((len(flags) + 7) // 8, "little")
        found = self._ranks.exchange(_CALL.pack(*call) + packed, what, kind="step or backward")
        calls = [_CALL.unpack_from(message) for message in found]
        if len(set(calls)) > 1 or len({len(message) for message in found}) > 1:
            counts = len({each[:3] for each in calls}) == 1  # else steps and backwards tell them apart
            texts = ", ".join(f"rank {rank} {_text(each, counts)}" for rank, each in enumerate(calls))
            raise RankError(
                f"engine.backward() and engine.step() were expected in the same order on every rank; {texts}. Give "
                "every rank the same number of batches (a distributed sampler does), and let none leave a step out."
            )
        either = 0
        for message in found:
            either |= int.from_bytes(message[_CALL.size :], "little")
        return [bool(either >> place & 1) for place in range(len(flags))]


def _text(call: tuple[bytes, int, int, int], counts: bool) -> str:
    kind, number, part, num_sums = call
    if kind == b"{":  # a JSON message of hardware/agreement.py
        return "makes another call, such as save_checkpoint()"
    where = f"is at step {number}, micro-batch {part}" if kind == _STEP else f"runs backward {part} after step {number}"
    return f"{where}, with {num_sums} sums of gradients" if counts else where


def _other_values(messages: Sequence[bytes]) -> RankError:
    """Return the error that names the values that differ. `messages`: for each rank, the JSON of its param groups'
    values."""
    ranks = [json.loads(message) for message in messages]
    for index, groups in enumerate(zip(*ranks, strict=True)):
        for name in groups[0]:
            if len({group.get(name) for group in groups}) > 1:
                texts = ", ".join(f"{group.get(name)} on rank {rank}" for rank, group in enumerate(groups))
                return RankError(
                    f"Every rank was expected to have the same values in optimizer.param_groups, as each updates its "
                    f"part of the weights; {name} of group {index} is {texts}. Set it alike: a scheduler that follows "
                    "a loss, as ReduceLROnPlateau does, needs that of all ranks, which engine.exchange() gives."
                )
    return RankError("Every rank was expected to have the same values in optimizer.param_groups; found others.")
