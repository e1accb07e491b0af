"""Read training text as bytes, and make batches from it that depend only on a seed and an index."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from tiered_zero.errors import ConfigError

NUM_BYTE_VALUES = 256
"""The size of the vocabulary: each byte is a token."""


class Corpus:
    """A text in host memory, stored as a uint8 tensor [num_bytes]. `source`: where the text comes from, for
    messages."""

    def __init__(self, text: bytes, source: str) -> None:
        self.source = source
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

    def __len__(self) -> int:
        return self._text.numel()

    @property
    def identity(self) -> str:
        """A string that identifies the corpus: its number of bytes and their checksum. It does not depend on the file's
        path."""
        return f"of {len(self)} bytes (xxh3 {xxhash.xxh3_64_hexdigest(self._text.numpy().data)})"

    def check(self, length: int) -> None:
        """Raise ConfigError if the text is too short for one sample of `length` bytes and the byte after it."""
        if len(self) <= length:
            raise ConfigError(
                f"A context of {length} bytes needs at least {length + 1} bytes of text; {self.source} has {len(self)}."
            )

    def batch(self, index: int, size: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return batch `index`: tokens and targets, each [size, length] int64 in host memory. The target of a byte is
        the next byte. Raises ConfigError if the text is too short for a sample."""
        self.check(length)
        num_starts = len(self) - length
        # Not torch's generator: on the CPU it uses 32 bits of its seed, too few for seed and index.
        generator = random.Random(f"{seed} {index}")
        starts = torch.tensor([generator.randrange(num_starts) for _ in range(size)])
        windows = self._text[starts[:, None] + torch.arange(length + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def read_corpus(path: str | Path | None = None) -> Corpus:
    """Read the text of the file `path`. None: take Python's language reference. Raises ConfigError."""
    if path is None:
        return Corpus(_python_reference().encode(), "the Python reference (pydoc_data.topics)")
    try:
        return Corpus(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"The text {path} cannot be read: {error.strerror}. Name a readable file.") from error


def _python_reference() -> str:
    """Return about 450 KB of English, in a fixed order."""
    if importlib.util.find_spec("pydoc_data") is None:
        raise ConfigError("This Python ships no help text (pydoc_data.topics); name a text with --data FILE.")
    from pydoc_data.topics import topics

    return "\n\n".join(text for _, text in sorted(topics.items()))
