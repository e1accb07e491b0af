"""torch.utils.checkpoint on every tier: the recomputation in backward pages its weights in again."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered_zero
from tests.support.inspection import pager
from tests.support.models import HIDDEN, VOCAB, Block, batch
from tests.support.pairwise import by_turns
from tests.support.trainers import FAR, Plain, assert_parity, assert_same_bits, follow, tiered, train


class Recomputed(nn.Module):
    """`use_reentrant`: None keeps activations. `depth` 2: checkpoints of pairs of blocks, each block in its own."""

    def __init__(self, use_reentrant: bool | None, dropout: float, depth: int = 1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(4))
        self._reentrant = use_reentrant
        self._depth = depth

    def _run(self, function, *args: Tensor) -> Tensor:
        if self._reentrant is None:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self._reentrant)

    def _pair(self, start: int, x: Tensor) -> Tensor:
        for block in self.blocks[start : start + 2]:
            x = self._run(block, x) if self._depth == 2 else block(x)
        return x

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for start in (0, 2):
            x = self._run(lambda x, start=start: self._pair(start, x), x)
        logits = self._run(lambda x: F.linear(x, self.tokens.weight).square() + self.tokens(tokens).mean(), x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


PAIR = {"stage3_max_live_parameters": 25_000, "stage3_prefetch_bucket_size": 0}
"""Room for two blocks."""


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's word on nested reentrant regions
@pytest.mark.parametrize(
    ("use_reentrant", "dropout", "depth", "zero"),
    [
        (False, 0.0, 1, {}),
        (False, 0.2, 2, PAIR),
        (True, 0.0, 2, {}),
        (True, 0.2, 1, PAIR),
        (True, 0.2, 2, {}),
    ],
)
def test_recomputed_steps_have_the_bits_of_plain_recomputed_steps(use_reentrant, dropout, depth, zero, swap_path):
    """Dropout draws the same numbers again in the recomputation. Every two of the four axes meet."""
    assert_parity(
        lambda: Recomputed(use_reentrant, dropout, depth),
        lambda own: train(own, batch, 3),
        swap_path,
        clipping=0.5,
        zero=zero,
    )


@pytest.mark.parametrize(("placement", "use_reentrant"), by_turns(FAR, [False, True]))
def test_with_and_without_recomputation(use_reentrant, placement, swap_path):
    """Against the model that keeps activations. Only the tied weight's two gradients may be added in another order by
    a reentrant checkpoint, so that one's bits are compared for use_reentrant=False."""
    torch.manual_seed(0)
    expected = follow(lambda own: train(own, batch, 1), Plain(Recomputed(None, 0.0)))
    torch.manual_seed(0)
    found = follow(lambda own: train(own, batch, 1), tiered(Recomputed(use_reentrant, 0.0), swap_path, placement))
    if use_reentrant:
        for record in (expected, found):
            record.weights.pop("tokens.weight")
            record.seen = record.seen[:1]
    assert_same_bits(expected, found)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_accumulation_over_recomputed_micro_batches(use_reentrant, swap_path):
    assert_parity(
        lambda: Recomputed(use_reentrant, 0.1),
        lambda own: train(own, batch, 2, 3),
        swap_path,
        accumulation=3,
        clipping=0.5,
    )


class OneRegion(Recomputed):
    """All blocks in one checkpoint."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self._run(lambda x: self._pair(2, self._pair(0, x)), self.tokens(tokens))
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())


def test_a_region_larger_than_the_planned_window(swap_path, caplog):
    """Weights that a checkpoint has computed with again leave, and are fetched for the backward of their nodes."""
    assert_parity(
        lambda: OneRegion(False, 0.0), lambda own: train(own, batch, 3), swap_path, [("nvme", "nvme")], zero=PAIR
    )
    assert not any("more on the device than planned" in record.message for record in caplog.records)


class Owning(nn.Module):
    """A block that has a parameter of its own beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh() * self.scale)


class OwningBlocks(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(8, HIDDEN), nn.ModuleList(Owning() for _ in range(4))
        self._use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self._use_reentrant is None else checkpoint(block, x, use_reentrant=self._use_reentrant)
        return x.square().mean()


@pytest.mark.parametrize(
    ("num_live", "use_reentrant"), [*by_turns([0, 1000, 4000], [None, False, True]), (0, False), (0, True)]
)
def test_a_block_with_a_parameter_of_its_own_fits_the_planned_window(num_live, use_reentrant, swap_path):
    zero = {"stage3_max_live_parameters": num_live}
    with tiered(OwningBlocks(use_reentrant), swap_path, zero=zero, runtime={"unit_size_cap": 1500}) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8)))
            engine.step()


def test_a_checkpoint_uses_the_weights_that_it_finds(swap_path):
    """As in plain PyTorch, which computes again with those of now."""

    def script(own):
        seen = []
        early = own(torch.ones(2, 8))
        for _ in range(2):
            own.backward(own(torch.randn(2, 8, generator=torch.Generator().manual_seed(0))))
            own.step()
            seen.append(early.detach())
        own.backward(early)
        own.step()
        return seen

    expected = follow(script, Plain(OwningBlocks(False)))
    assert_same_bits(expected, follow(script, tiered(OwningBlocks(False), swap_path, ("cpu", "cpu"))))


class Adapted(OneRegion):
    """Frozen weights, with a small linear layer beside each block that is trained."""

    def __init__(self, use_reentrant: bool | None, depth: int) -> None:
        super().__init__(use_reentrant, 0.0, depth)
        self.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in self.blocks)

    def _pair(self, start: int, x: Tensor) -> Tensor:
        for number in range(start, start + 2):
            x = self._run(self.blocks[number], x) if self._depth == 2 else self.blocks[number](x)
            x = x + self.adapters[number](x)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("use_reentrant", "depth"), [(None, 1), (False, 1), (True, 1), (True, 2)])
def test_frozen_weights_stay_while_their_recomputed_region_needs_them(use_reentrant, depth, swap_path):
    """A region holds them as parameters, not as views. After it they leave."""

    def script(own):
        own.module.tokens.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
        seen = train(own, batch, 3)
        if isinstance(own, tiered_zero.Engine):
            deadline_s = time.monotonic() + 60  # what is fetched ahead of the next step is viewed until it is there
            while (left := [paged for paged in pager(own).units if paged.storage.is_viewed]) and (
                time.monotonic() < deadline_s
            ):
                time.sleep(0.01)
            assert not left
        return seen

    assert_parity(
        lambda: Adapted(use_reentrant, depth),
        script,
        swap_path,
        clipping=0.5,
        runtime={"unit_size_cap": 1},
    )
