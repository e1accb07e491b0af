"""torch.compile over a model that is paged: the bits of the compiled plain model, and few graphs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.inspection import units
from tests.support.trainers import Plain, assert_same_bits, follow, tiered

IDS = torch.arange(16).view(2, 8)
NUM_BLOCKS = 3


class Tiny(nn.Module):
    """`head`: "own", "tied" to the embedding, or "function": the embedding's weight is passed to F.linear."""

    def __init__(self, head: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(NUM_BLOCKS)
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        if head != "own":
            self.head.weight = self.tokens.weight
        self.calls_head = head != "function"

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x)
        scores = self.head(x) if self.calls_head else F.linear(x, self.tokens.weight)
        return F.cross_entropy(scores.flatten(0, 1), ids.flatten())


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("head", ["own", "tied", "function"])
def test_a_compiled_model_has_the_bits_of_the_compiled_plain_one(head, swap_path):
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    def script(trainer):
        compiled, seen = torch.compile(trainer.module, backend=count), []
        for _ in range(4):
            loss = compiled(IDS)
            trainer.backward(loss)
            trainer.step()
            seen.append(loss.detach())
        return seen

    try:
        expected = follow(script, Plain(Tiny(head), clipping=0.5))
        assert len(graphs) == 1
        graphs.clear()
        torch._dynamo.reset()
        engine = tiered(Tiny(head), swap_path, clipping=0.5)
        num_units = len(units(engine))
        assert_same_bits(expected, follow(script, engine))
        assert 0 < len(graphs) <= num_units, "one graph per unit, and no recompilation"
    finally:
        torch._dynamo.reset()
