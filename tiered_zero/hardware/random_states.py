"""Save and restore the random number generators that training uses: Python's, numpy's, torch's, each device's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch

_NUM_WORDS = 624
"""The number of 32-bit words in the state of a Mersenne twister."""


def random_states() -> dict[str, Any]:
    """Copy the states of all generators: Python's, numpy's, torch's, and those of accelerators in use."""
    module = _accelerators()
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "devices": {name: module.get_rng_state(name) for name in _device_names()},
    }


def check_random_states(states: Any) -> None:
    """Raise ValueError if `restore_random_states` does not accept `states`. The generators keep their states."""
    try:
        with kept_random_states():
            restore_random_states(states)
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error!s:.200}") from None


def restore_random_states(states: Mapping[str, Any]) -> list[str]:
    """Set every generator to its state in `states`. Return a line of text for each generator that was not restored."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    lines, own, saved = [], _numpys_generator(), states["numpy"]["bit_generator"]
    if own == saved == "MT19937":
        if not 0 <= states["numpy"]["state"]["pos"] <= _NUM_WORDS:  # numpy would read out of bounds
            raise ValueError(f"numpy's position was expected from 0 to {_NUM_WORDS}")
        numpy.random.set_state(states["numpy"])
    else:
        lines.append(
            f"numpy's generator is {own} here and was {saved}; it stays as it is, so that what is drawn from numpy "
            "differs"
        )
    here, module = set(_device_names()), _accelerators()
    for name, state in states["devices"].items():
        if name in here:
            module.set_rng_state(state, name)
    if missing := sorted(states["devices"].keys() - here):
        lines.append(f"there is no {', '.join(missing)} here, so that what a model draws on its device differs")
    if new := sorted(here - states["devices"].keys()):
        lines.append(f"there was no {', '.join(new)} then, so that what a model draws on its device differs")
    return lines


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore the states of all generators after the `with` block."""
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states)


def _numpys_generator() -> str:
    return str(numpy.random.get_state(legacy=False)["bit_generator"])


def _accelerators() -> Any:
    """Return torch's module for the accelerators, such as torch.cuda; None if no accelerator is in use, or if it has no
    random generators."""
    found = torch.accelerator.current_accelerator()
    module = None if found is None else torch.get_device_module(found.type)
    is_used = getattr(module, "is_initialized", lambda: module is not None)()
    return module if is_used and hasattr(module, "get_rng_state") else None


def _device_names() -> list[str]:
    """Return the names of the accelerators that have random generators, such as "cuda:0"."""
    if _accelerators() is None:
        return []
    found = torch.accelerator.current_accelerator()
    return [f"{found}:{index}" for index in range(torch.accelerator.device_count())]
