"""What the notebook downloads, made here: a GPT-2 with random weights, its tokenizer, and some text."""

import pydoc_data.topics
import re
import textwrap
from types import SimpleNamespace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

NUM_SAMPLES, SAMPLE_NUM_CHARS = 208, 24


def build_model() -> GPT2LMHeadModel:
    """Tiny, and the same at every call: half precision is slow on CPUs."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=257, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256)
    )


class ByteTokenizer:
    """One token a byte; called as the notebook calls GPT2Tokenizer."""

    eos_token = pad_token = "<|endoftext|>"

    def __call__(
        self, texts: list[str], return_tensors: str, truncation: bool, padding: bool, max_length: int
    ) -> SimpleNamespace:
        assert (return_tensors, truncation, padding) == ("pt", True, True)
        rows = [torch.tensor(list(text.encode())[:max_length]) for text in texts]
        pad = torch.nn.utils.rnn.pad_sequence
        return SimpleNamespace(
            input_ids=pad(rows, batch_first=True, padding_value=256),
            attention_mask=pad([torch.ones_like(row) for row in rows], batch_first=True),
        )


def load_texts() -> list[str]:
    """Some of Python's own reference."""
    prose = re.sub(r"\s+", " ", " ".join(pydoc_data.topics.topics.values())[:20_000])
    return textwrap.wrap(prose, SAMPLE_NUM_CHARS)[:NUM_SAMPLES]
