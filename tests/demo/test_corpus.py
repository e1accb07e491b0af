"""Batches depend on text, seed and index alone; targets are the next bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiered_zero.demo.corpus import Corpus, read_corpus
from tiered_zero.errors import ConfigError


def test_targets_are_the_next_bytes() -> None:
    text = bytes(range(256))
    tokens, targets = Corpus(text, "test").batch(3, size=5, length=17)
    assert tokens.shape == targets.shape == (5, 17)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens + 1, targets)


def test_a_batch_depends_on_seed_and_index_alone() -> None:
    corpus = Corpus(bytes(range(256)) * 40, "test")
    torch.manual_seed(1)
    first = corpus.batch(7, 4, 32, seed=5)
    torch.rand(3)
    corpus.batch(8, 4, 32, seed=5)
    again = corpus.batch(7, 4, 32, seed=5)
    assert torch.equal(first[0], again[0])
    others = [corpus.batch(6, 4, 32, seed=5), corpus.batch(7, 4, 32, seed=6), corpus.batch(8, 4, 32, seed=5)]
    assert not any(torch.equal(first[0], other[0]) for other in others)


def test_every_window_can_come_up_and_none_passes_the_end() -> None:
    corpus = Corpus(b"abcd", "test")
    seen = {tuple(row.tolist()) for index in range(50) for row in corpus.batch(index, 2, 2)[1]}
    assert seen == {tuple(b"bc"), tuple(b"cd")}


def test_the_text_that_python_ships_is_english() -> None:
    corpus = read_corpus()
    tokens, _ = corpus.batch(0, 64, 512)
    assert len(corpus) > 300_000
    assert b" the " in bytes(tokens.flatten().tolist())


def test_a_file_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\x00\xff" * 100)
    tokens, _ = read_corpus(path).batch(0, 1, 4)
    assert set(tokens.flatten().tolist()) == {0, 255}


@pytest.mark.parametrize("length", [0, 1, 16])
def test_a_text_shorter_than_the_context_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * length)
    with pytest.raises(ConfigError, match=f"at least 17 bytes of text; .*short has {length}"):
        read_corpus(path).batch(0, 1, 16)


def test_a_text_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent cannot be read: No such file"):
        read_corpus(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_corpus(tmp_path)
