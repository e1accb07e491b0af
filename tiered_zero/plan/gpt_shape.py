"""Describe the shape of the built-in GPT, and read it from a command's option. Does not import torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace

from tiered_zero.errors import ConfigError

HEAD_SIZE = 64
"""Channels of each attention head if `heads` is not given."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of the built-in GPT."""

    layers: int = 8
    hidden: int = 384
    heads: int = 0  # 0: one head for each 64 channels
    vocab: int = 256
    context: int = 256
    tied: bool = True  # embedding and output head share one weight

    def __post_init__(self) -> None:
        """Compute `heads` if it is 0. Raises ConfigError for a shape that no GPT can have."""
        if not self.heads:
            object.__setattr__(self, "heads", max(1, self.hidden // HEAD_SIZE))
        for name in ("layers", "hidden", "heads", "vocab", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"A GPT needs {name} >= 1, not {getattr(self, name)}.")
        if self.hidden % self.heads:
            raise ConfigError(
                f"A GPT's hidden size must divide into its heads: hidden={self.hidden} is no multiple of "
                f"heads={self.heads}. Give heads= a divisor of {self.hidden}."
            )

    def __str__(self) -> str:
        """Return the text that `parse_gpt` reads."""
        return "gpt:" + ",".join(f"{f.name}={int(getattr(self, f.name))}" for f in fields(self))


def num_parameters(config: GPTConfig) -> int:
    """Count the parameters; tied weights count once."""
    hidden = config.hidden
    block = 12 * hidden**2 + 13 * hidden
    embeddings = (config.vocab * (1 if config.tied else 2) + config.context) * hidden
    return config.layers * block + embeddings + 2 * hidden


_FAMILIES = (
    (0.0, GPTConfig(vocab=256, context=256)),  # bytes, as the demo reads them
    (5e7, GPTConfig(vocab=50257, context=1024)),  # GPT-2
    (3e9, GPTConfig(vocab=128256, context=8192, tied=False)),  # Llama 3
)
"""Pairs (least number of parameters, shape). `gpt_of_size` takes vocabulary, context and output head from the last pair
whose number does not exceed the wanted number of parameters."""


def gpt_of_size(num_wanted: float) -> GPTConfig:
    """Return a GPT shape with about `num_wanted` parameters. Raises ConfigError for fewer than 1e6."""
    if not 1e6 <= num_wanted < math.inf:
        raise ConfigError(f"A model planned by its size has at least 1e6 parameters, not {num_wanted:g}.")
    family = [config for least, config in _FAMILIES if num_wanted >= least][-1]
    best = None
    for hidden in itertools.count(HEAD_SIZE, HEAD_SIZE):  # a wider model has fewer layers
        one = replace(family, layers=1, hidden=hidden, heads=0)
        per_block = num_parameters(replace(one, layers=2)) - num_parameters(one)
        layers = round((num_wanted - num_parameters(one)) / per_block) + 1
        if best is not None and layers < hidden / 128:  # about hidden = 128 * layers
            return best
        best = replace(one, layers=max(1, layers))
    raise AssertionError("count() has no end")


_MULTIPLES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def parse_count(text: str) -> float:
    """Read a number of parameters, such as '7B', '350M' or '7e9'. Raises ConfigError."""
    stripped = text.strip().lower().replace("_", "")
    multiple = _MULTIPLES.get(stripped[-1:], 1.0)
    try:
        return float(stripped[:-1] if multiple > 1 else stripped) * multiple
    except ValueError:
        raise ConfigError(f"{text!r} is no number of parameters; write 7B, 350M or 7e9.") from None


def parse_gpt(text: str) -> GPTConfig:
    """Read a shape such as 'gpt:layers=24,hidden=2048'. Unnamed settings keep their defaults. Raises ConfigError."""
    family, _, settings = text.partition(":")
    if family.strip() != "gpt":
        raise ConfigError(f"The built-in model is written gpt:layers=24,hidden=2048; found {text!r}.")
    names = [field.name for field in fields(GPTConfig)]
    values: dict[str, int] = {}
    for setting in filter(None, (part.strip() for part in settings.split(","))):
        name, _, number = (part.strip() for part in setting.partition("="))
        if name not in names:
            raise ConfigError(f"A GPT has no setting {name!r}; it has {', '.join(names)}.")
        if name in values:
            raise ConfigError(f"{name} is given twice in {text!r}.")
        try:
            values[name] = int(number)
        except ValueError:
            raise ConfigError(f"{name} must be a whole number, not {number!r} (in {text!r}).") from None
    if values.get("tied", 1) not in (0, 1):
        raise ConfigError(f"tied must be 0 or 1, not {values['tied']}.")
    return GPTConfig(**{**values, "tied": bool(values.get("tied", 1))})  # type: ignore[arg-type]
