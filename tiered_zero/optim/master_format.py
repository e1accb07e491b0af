"""How the fp32 masters of a segment rest in its slot, and how they follow their parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch

from tiered_zero.optim.formats import join_master, split_master

Parts = Sequence[torch.Tensor]
"""What a run of masters is kept in, one array a `MasterFormat.dtypes`, each [n]."""


class MasterFormat(ABC):
    """`dtypes`: of the arrays. The first is a rule's `Run.master`; the second, if any, is the rule's unsigned field.

    `needs_params`: whether the update needs the old parameters besides what is in the slot.
    """

    dtypes: tuple[torch.dtype, ...]
    needs_params: bool

    @abstractmethod
    def split(self, master: torch.Tensor) -> Parts:
        """First values: fp32 [n]."""

    @abstractmethod
    def join(self, parts: Parts, params: torch.Tensor | None) -> torch.Tensor:
        """The masters, fp32 [n]."""

    @abstractmethod
    def follow(self, parts: Parts, new: torch.Tensor, old: torch.Tensor | None) -> Parts | None:
        """Parameters were set to `new` [n] by hand: masters of those that changed take that value. None: nothing did.

        `old`: the parameters before, where they are needed.
        """

    @abstractmethod
    def settle(self, master: torch.Tensor, out: torch.Tensor) -> None:
        """`out`: the parameters of masters that are not stepped are what their masters say."""


@final
class FullMasters(MasterFormat):
    """fp32 masters."""

    dtypes = (torch.float32,)
    needs_params = False

    def split(self, master: torch.Tensor) -> Parts:
        return (master,)

    def join(self, parts: Parts, params: torch.Tensor | None) -> torch.Tensor:
        return parts[0]

    def follow(self, parts: Parts, new: torch.Tensor, old: torch.Tensor | None) -> Parts | None:
        (master,) = parts
        changed = master.to(new.dtype) != new  # a NaN differs from everything, and is taken over
        return (torch.where(changed, new.to(torch.float32), master),) if changed.any() else None

    def settle(self, master: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(master)


@final
class RemainderMasters(MasterFormat):
    """[Note: bf16 and remainder] int16 remainders, and the fp32 second moments with the marks in their signs."""

    dtypes = (torch.int16, torch.float32)
    needs_params = True

    def split(self, master: torch.Tensor) -> Parts:
        """The second moments are zero."""
        _, remainder, mark = split_master(master)
        return remainder, torch.where(mark, -0.0, 0.0)

    def join(self, parts: Parts, params: torch.Tensor | None) -> torch.Tensor:
        assert params is not None, "remainders come with their parameters"
        return join_master(params, parts[0], parts[1].signbit())

    def follow(self, parts: Parts, new: torch.Tensor, old: torch.Tensor | None) -> Parts | None:
        remainder, square = parts
        assert old is not None, "changes by hand come with what was before"
        changed = old.view(torch.int16) != new.view(torch.int16)
        if not changed.any():
            return None
        return torch.where(changed, 0, remainder), torch.where(changed, square.abs(), square)

    def settle(self, master: torch.Tensor, out: torch.Tensor) -> None:
        """They are there: they were read."""
