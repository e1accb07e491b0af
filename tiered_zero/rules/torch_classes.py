"""What is known of torch's optimizer classes: which may be cut anywhere, and which cannot be stepped piece by piece."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from tiered_zero.errors import ModelError

ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
}
"""Known to give the same bits wherever a cut falls, unless fused. Exact classes: a subclass may do anything. Lion
enters itself."""

REFUSED: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "it evaluates the model several times within a step and couples all parameters",
    torch.optim.SparseAdam: "it needs sparse gradients, and gradients are dense here",
}


def refuse_class(kind: type[Optimizer]) -> None:
    """Raise ModelError for a class that cannot be stepped piece by piece."""
    for refused, reason in REFUSED.items():
        if issubclass(kind, refused):
            raise ModelError(
                f"{kind.__name__} cannot train across tiers: {reason}. Choose an optimizer that steps each parameter "
                "by itself, such as AdamW."
            )
