"""The param groups, which the engine shares with the user's optimizer and its schedulers."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from tiered_zero.errors import ModelError


@final
class ParamGroupWatch:
    """Refuses what would be lost: a new list of groups, and groups with other parameters than at the start.

    Values of a group are read at each step; which parameters it has is laid out once. The optimizers may be garbage
    before the engine. Driver thread, at each call: compares pointers only.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """`optimizers`: those that share one list of groups."""
        self._groups: list[dict[str, Any]] = optimizers[0].param_groups if optimizers else []
        self._params: list[list[nn.Parameter]] = [list(group["params"]) for group in self._groups]
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]

    def check(self) -> None:
        """Raise ModelError where the list or the parameters of a group were changed."""
        owners = [owner for ref in self._optimizers if (owner := ref()) is not None]
        if any(owner.param_groups is not self._groups for owner in owners):
            raise ModelError(
                "optimizer.param_groups was replaced by another list, which the engine and its schedulers do not see. "
                "Put the former list back, and set values in its groups: optimizer.param_groups[0]['lr'] = 0.1."
            )
        if len(self._groups) != len(self._params):
            raise ModelError(
                f"optimizer.param_groups was expected to have {len(self._params)} groups, as when the run started; "
                f"found {len(self._groups)}. Set lr to 0 in a group that shall wait, or requires_grad=False for its "
                "parameters."
            )
        for index, (group, own) in enumerate(zip(self._groups, self._params, strict=True)):
            found = group.get("params", ())
            if len(found) != len(own) or not all(map(operator.is_, found, own)):
                raise ModelError(
                    f"Group {index} of optimizer.param_groups was expected to have the {len(own)} parameters that it "
                    f"had when the run started, in their order; found {len(found)}, or others. Their state is laid out "
                    "once. For a parameter that shall not be updated set requires_grad=False, or param.grad = None "
                    "before step()."
                )


@contextmanager
def restored_on_error(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Restore the param groups, whose learning rates schedulers set as they are built, where the run does not start."""
    before = [dict(group) for group in groups]
    try:
        yield
    except BaseException:
        replace_values(groups, before)
        raise


def replace_values(groups: list[dict[str, Any]], values: list[dict[str, Any]]) -> None:
    """Give each group these values and no others, in place."""
    for group, new in zip(groups, values, strict=True):
        group.clear()
        group.update(new)
