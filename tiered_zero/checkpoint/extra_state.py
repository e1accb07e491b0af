"""What modules keep besides parameters and buffers: torch's `get_extra_state` and `set_extra_state`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from tiered_zero.errors import ModelError, StoreError

logger = logging.getLogger("tiered_zero")


def extra_states(model: nn.Module) -> dict[str, Any]:
    """List the extra state of every module that has some: by its path."""
    return {
        path: module.get_extra_state()
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def check_extra_states(saved: Any) -> None:
    """Raises StoreError for what `extra_states` never gives: `saved` was read from a file."""
    if type(saved) is not dict or any(type(path) is not str for path in saved):
        raise StoreError(f"The checkpoint's modules were expected to be states by path; found {saved!a:.200}.")


def restore_extra_states(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give modules what was saved of them; a module that has no such state, or of which none was saved, is warned of.
    Raises ModelError."""
    own = {path: module for path, module in model.named_modules() if _keeps_more(module)}
    for path, module in own.items():
        if path not in saved:
            logger.warning("resumed: the checkpoint has no extra state of module %r, which keeps its own", path)
            continue
        try:
            module.set_extra_state(saved[path])
        except Exception as error:
            raise ModelError(
                f"Module {path!r} does not take the extra state that was saved: {type(error).__name__}: {error}."
            ) from error
    for path in saved.keys() - own.keys():
        logger.warning("resumed: the extra state of module %.200r is left out: there is none in this model", path)


def _keeps_more(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state
