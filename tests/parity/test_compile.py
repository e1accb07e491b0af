"""torch.compile over a model that is paged: the bits of the compiled plain model, and few graphs.

Inductor takes minutes: `pytest -m thorough tests/parity/test_compile.py`.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters

from tests.support import models
from tests.support.inspection import units
from tests.support.trainers import FAR, Plain, assert_same_bits, follow, tiered

IDS = torch.arange(16).view(2, 8)
NUM_BLOCKS = 3
NUM_ALIKE = 10
"""More than torch._dynamo.config.recompile_limit, 8: with a graph of its own for each, some were not compiled."""


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
        assert len(graphs) <= num_units, "one graph per unit, and no recompilation"
        # 2.11 compiles nothing of a module whose loop has a graph break, as that over hooked blocks
        assert graphs or torch.__version__ < "2.12"
    finally:
        torch._dynamo.reset()


class Block(nn.Module):
    """One unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(Tiny):
    def __init__(self) -> None:
        super().__init__("tied")
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_ALIKE))


@pytest.fixture
def graphs(tmp_path, monkeypatch) -> Iterator[list[torch.fx.GraphModule]]:
    """What the backend of `compile_blocks` is given to compile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    counters.clear()
    yield []
    torch._dynamo.reset()


def train_with_compiled_blocks(trainer, backend, way, graphs):
    """`way`: a block's forward alone, or its whole call, with the hooks of the engine in it."""

    def compile_and_count(graph, inputs):
        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs)

    for block in trainer.module.blocks:
        if way == "call":
            block.compile(backend=compile_and_count)
        else:
            block.forward = torch.compile(block.forward, backend=compile_and_count)
    seen = []
    for _ in range(3):
        loss = trainer(IDS)
        trainer.backward(loss)
        trainer.step()
        with torch.no_grad():
            seen += [loss.detach(), trainer(IDS)]
    return seen


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize(
    ("way", "placement", "clipping"),  # every two values meet
    [("forward", FAR[0], 0.0), ("forward", FAR[1], 0.5), ("call", FAR[0], 0.5), ("call", FAR[1], 0.0)],
    ids=str,
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_compiled_blocks_have_the_bits_of_compiled_plain_blocks(backend, way, placement, clipping, swap_path, graphs):
    def script(trainer):
        return train_with_compiled_blocks(trainer, backend, way, graphs)

    expected = follow(script, Plain(Blocks(), clipping=clipping))
    num_plain_graphs = len(graphs)
    assert num_plain_graphs and not counters["graph_break"]
    graphs.clear()
    torch._dynamo.reset()
    engine = tiered(Blocks(), swap_path, placement, clipping=clipping, runtime={"unit_size_cap": 2000})
    num_units = len(units(engine))
    assert num_units == NUM_ALIKE + 2
    assert_same_bits(expected, follow(script, engine))
    num_breaks = sum(counters["graph_break"].values())
    assert num_breaks <= num_units, "at most one break per unit"
    assert 0 < len(graphs) <= num_plain_graphs + num_breaks, "no recompilation"


def large_blocks(way: str, backend: str) -> nn.Module:
    """A model with two blocks of a third of it each, compiled in one of torch's two ways."""
    model = Tiny("tied")
    model.blocks = nn.ModuleList(models.Block(16) for _ in range(2))
    for index, block in enumerate(model.blocks):
        if way == "method":
            block.compile(backend=backend)
        else:
            model.blocks[index] = torch.compile(block, backend=backend)
    return model


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize(("way", "placement"), [("method", FAR[0]), ("function", FAR[1])], ids=str)
def test_a_block_compiled_before_the_start_is_one_unit_with_the_bits_of_plain_pytorch(way, placement, swap_path):
    def script(trainer):
        seen = []
        for _ in range(2):
            loss = trainer(IDS)
            trainer.backward(loss)
            seen += [loss.detach(), *(param.grad.clone() for param in trainer.module.parameters())]
            trainer.step()
        return seen

    try:
        expected = follow(script, Plain(large_blocks(way, "aot_eager"), clipping=0.5))
        torch._dynamo.reset()
        counters.clear()
        engine = tiered(large_blocks(way, "aot_eager"), swap_path, placement, clipping=0.5)
        assert [unit.module for unit in units(engine)] == ["tokens", "blocks.0", "blocks.1", "norm"]
        assert_same_bits(expected, follow(script, engine))
        assert not counters["graph_break"]
    finally:
        torch._dynamo.reset()
