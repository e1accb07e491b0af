"""What is known of torch's optimizer classes: which may be cut anywhere, and which cannot be stepped piece by piece."""

from __future__ import annotations

import inspect

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

TEMPORARIES: dict[type[Optimizer], int] = {
    **dict.fromkeys((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RAdam), 1),
    **dict.fromkeys((torch.optim.ASGD, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RMSprop), 2),
    torch.optim.Adadelta: 3,
}
"""`UpdateRule.temporaries` where torch steps many parameters by one launch (foreach), as it does on an accelerator."""

REFUSED: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "it evaluates the model several times within a step and couples all parameters",
    torch.optim.SparseAdam: "it needs sparse gradients, and gradients are dense here",
}


def refuse_class(kind: type[Optimizer]) -> None:
    """Raise ModelError for a class that cannot be stepped piece by piece."""
    if isinstance(inspect.getattr_static(kind, "param_groups", None), property):
        raise ModelError(
            f"{kind.__name__} cannot train across tiers: it wraps another optimizer, which has its param groups and "
            "state. Pass the inner optimizer."
        )
    if any("ScheduleFree" in base.__name__ for base in kind.__mro__):
        raise ModelError(
            f"{kind.__name__} cannot train across tiers: its eval() and train() exchange weights for averages in its "
            "state, which is not at hand between steps. Choose an optimizer with a schedule, such as AdamW."
        )
    for refused, reason in REFUSED.items():
        if issubclass(kind, refused):
            raise ModelError(
                f"{kind.__name__} cannot train across tiers: {reason}. Choose an optimizer that steps each parameter "
                "by itself, such as AdamW."
            )
