"""Modules in any order, any number of times, or not at all: prefetching guesses, and a wrong guess changes no bit."""

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiered_zero
from tests.support.inspection import Traffic, param_slots
from tests.support.models import HIDDEN, LENGTH, VOCAB, Block, batch
from tests.support.trainers import Plain, assert_parity, assert_same_bits, follow, tiered, train

TIGHT = [{"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}, {}]
"""Room for the units in use and no prefetching; the defaults."""


class Stack(nn.Module):
    """Blocks that are run in the order given; anything of them may be left out or come twice."""

    def __init__(self, num_blocks: int = 5, block: type[nn.Module] = Block, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(block(**options) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: Tensor, targets: Tensor, order: list[int] | None = None) -> Tensor:
        x = self.tokens(tokens)
        for index in range(len(self.blocks)) if order is None else order:
            x = self.blocks[index](x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("zero", TIGHT)
def test_a_new_order_each_step(zero, swap_path):
    def script(trainer):
        draw = random.Random(5)
        orders = [draw.choices(range(5), k=draw.randint(1, 7)) for _ in range(8)]
        return train(trainer, lambda number: (*batch(number), orders[number]))

    assert_parity(Stack, script, swap_path, zero=zero)


class Gate(nn.Module):
    """One unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


@pytest.mark.timeout(300, method="thread")  # which ends a process that hangs for good
def test_what_the_next_step_needs_does_not_stand_in_the_way_of_backward(swap_path):
    """With one sub-group for all no update that begins in backward can end there; units that wait for theirs are
    expected next, while backward still needs one that nobody expected."""
    orders = [[1, 0], [2, 1], [1, 2], [2, 0], [0, 1, 2]]
    zero = {"sub_group_size": 1 << 20}

    def script(trainer):
        return train(trainer, lambda number: (*batch(number), orders[number]), steps=5)

    assert_parity(lambda: Stack(3, Gate), script, swap_path, zero=zero)


class Branching(Stack):
    """Which half of the blocks runs is decided by the values computed so far."""

    def forward(self, tokens: Tensor, targets: Tensor, order: list[int] | None = None) -> Tensor:
        even = self.tokens(tokens).sum() > 0
        return super().forward(tokens, targets, [0, 2, 4] if even else [1, 3])


def test_branches_taken_by_data(swap_path):
    assert_parity(Branching, lambda own: train(own, batch), swap_path)


@pytest.mark.parametrize("zero", TIGHT)
@pytest.mark.parametrize("num_forwards", [2, 5])
def test_several_forwards_before_one_backward(num_forwards, zero, swap_path):
    def script(trainer):
        seen = []
        for step in range(4):
            losses = [trainer(*batch(step * 5 + i), [i % 5, 4]) for i in range(num_forwards)]
            trainer.backward(torch.stack(losses).sum())
            trainer.step()
            seen += [*losses, trainer.get_global_grad_norm()]
        return seen

    assert_parity(Stack, script, swap_path, zero=zero)


@pytest.mark.parametrize(("clipping", "update"), [(0.5, "overlapped"), (0.0, "barrier")])
def test_weights_set_while_the_state_of_the_step_is_being_read(clipping, update, swap_path):
    """State is read ahead in backward; what is changed by hand between backward and step() counts all the same."""

    def script(trainer):
        seen = []
        for step in range(5):
            loss = trainer(*batch(step))
            trainer.backward(loss)
            weights = list(trainer.module.parameters())
            with tiered_zero.gathered(weights, modify=True) if step % 2 else nullcontext(), torch.no_grad():
                for weight in weights if step % 2 else ():
                    weight.mul_(0.75)
            trainer.step()
            seen.append(loss.detach())
        return seen

    assert_parity(Stack, script, swap_path, clipping=clipping, runtime={"update": update})


@pytest.mark.parametrize(
    ("zero", "clipping", "update"), [(TIGHT[0], 0.5, None), (TIGHT[1], 0.5, None), ({}, 0.0, "barrier")]
)
def test_eval_and_no_grad_anywhere(zero, clipping, update, swap_path):
    """Between steps, between a forward and its backward, and before the step. (Updates that begin in backward, which
    is where nothing is clipped or checked and not the barrier policy, leave nothing to look at there; they say so.)"""

    def evaluate(trainer, number):
        trainer.eval()
        with torch.no_grad():
            value = trainer(*batch(100 + number), [4, 2, 0])
        trainer.train()
        return value

    def script(trainer):
        seen = []
        for step in range(4):
            seen.append(evaluate(trainer, step))
            loss = trainer(*batch(step))
            seen.append(evaluate(trainer, step + 1))
            trainer.backward(loss)
            seen.append(evaluate(trainer, step + 2))
            trainer.step()
        with torch.inference_mode():
            seen.append(trainer(*batch(7)).clone())
        return seen

    options = {"zero": zero, "clipping": clipping, "runtime": {"update": update}}
    assert_parity(lambda: Stack(dropout=0.1), script, swap_path, **options)


def test_the_module_itself_may_be_called(swap_path):
    """Past the engine: for evaluation and for a forward whose loss goes to the engine, or backward by the user."""

    def script(trainer):
        seen = []
        for step in range(4):
            with torch.no_grad():
                seen.append(trainer.module(*batch(50 + step)))
            loss = trainer.module(*batch(step))
            if step % 2 or isinstance(trainer, Plain):
                trainer.backward(loss)
            else:
                loss.backward()
            trainer.step()
            seen += [loss.detach(), trainer.get_global_grad_norm()]
        return seen

    assert_parity(Stack, script, swap_path)


def test_backward_may_be_called_on_the_loss(swap_path):
    def script(trainer):
        seen = []
        for step in range(4):
            loss = trainer(*batch(step))
            (trainer.backward if isinstance(trainer, Plain) else torch.Tensor.backward)(loss)
            trainer.step()
            seen += [loss.detach(), trainer.get_global_grad_norm()]
        return seen

    assert_parity(Stack, script, swap_path)


class Experts(nn.Module):
    """Each call takes one of several experts: the router's best over the batch."""

    def __init__(self, num_experts: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
            for _ in range(num_experts)
        )
        self.chosen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x.mean(dim=(0, 1))).softmax(-1)
        index = int((weights + torch.rand(weights.shape)).argmax())
        self.chosen.append(index)
        return x + weights[index] * self.experts[index](x)


def expert_slots(engine):
    """Slot name -> (layer, expert) of the units that are experts."""
    names = {slot: unit.module.split(".") for slot, unit in param_slots(engine).items()}
    return {slot: (int(name[1]), int(name[3])) for slot, name in names.items() if "experts" in name}


@pytest.mark.parametrize("prefetch", [0, None])
def test_a_random_router_fetches_the_chosen_experts_only(prefetch, swap_path, monkeypatch):
    """Without prefetching only the chosen experts move; with it, only what was chosen in some step before."""

    def build():
        return Stack(3, Experts)

    assert_parity(build, lambda own: train(own, batch), swap_path, zero={"stage3_prefetch_bucket_size": prefetch})

    torch.manual_seed(0)
    traffic = Traffic(monkeypatch)
    with tiered(build(), swap_path, zero={"stage3_prefetch_bucket_size": prefetch}) as engine:
        slots = expert_slots(engine)
        assert len(slots) == 18
        ever_chosen = set()
        for number in range(8):
            traffic.clear()
            engine.backward(engine(*batch(number)))
            engine.step()
            chosen = {(layer, block.chosen[-1]) for layer, block in enumerate(engine.module.blocks)}
            ever_chosen |= chosen
            fetched = {slots[name] for name in traffic.fetched if name in slots}
            assert chosen <= fetched <= (chosen if prefetch == 0 else ever_chosen)


class Shared(nn.Module):
    """One block under two names, and its weight a third time in a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.first = Block()
        self.blocks = nn.ModuleList([Block(), self.first, Block()])
        self.kept = nn.ParameterList([self.first.out.weight, nn.Parameter(torch.ones(HIDDEN))])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.first(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        x = F.linear(x, self.kept[0]) * self.kept[1]
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())


def test_a_module_under_two_names(swap_path):
    assert_parity(Shared, lambda own: train(own, batch), swap_path)


class Functional(Stack):
    """No module but the root is ever called: every weight is used by a function, far more of them than fit at once."""

    def forward(self, tokens: Tensor, targets: Tensor, order: list[int] | None = None) -> Tensor:
        x = F.embedding(tokens, self.tokens.weight)
        for block in self.blocks:
            x = x + F.linear(F.gelu(F.linear(x, block.mlp[1].weight, block.mlp[1].bias)), block.mlp[3].weight)
            x = F.layer_norm(x, (HIDDEN,), block.norm.weight, block.norm.bias)
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("placement", [("none", "cpu"), ("nvme", "nvme")], ids="-".join)
@pytest.mark.parametrize("way", ["no_grad", "eval", "submodule"])
def test_a_module_called_directly_to_evaluate_has_the_delayed_update(way, placement, swap_path):
    """As frameworks validate; its weights are those of state_dict()."""
    with tiered(Stack(), swap_path, placement, runtime={"update": "delayed", "delay_start_step": 0}) as engine:
        train(engine, batch, steps=3)
        engine.train(way != "eval")
        with nullcontext() if way == "eval" else torch.no_grad():
            found = engine.module.norm(torch.ones(HIDDEN)) if way == "submodule" else engine.module(*batch(9))
        plain = Stack()
        plain.load_state_dict(engine.module.state_dict())
        expected = plain.norm(torch.ones(HIDDEN)) if way == "submodule" else plain(*batch(9))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("zero", TIGHT)
def test_functions_in_place_of_modules(zero, swap_path):
    assert_parity(lambda: Functional(8), lambda own: train(own, batch), swap_path, zero=zero)


def test_several_engines_in_one_process(swap_path):
    """Two models step by step in turn, on one swap path; the losses of one depend on nothing of the other."""
    courses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        courses.append(follow(lambda own: train(own, batch), Plain(Stack(2))))
    engines = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        engines.append(tiered(Stack(2), swap_path))
    seen: list[list[Any]] = [[], []]
    for number in range(4):
        for engine, own in zip(engines, seen, strict=True):
            own += train(engine, lambda _, number=number: batch(number), steps=1)
    for course, engine, own in zip(courses, engines, seen, strict=True):
        assert_same_bits(course, follow(lambda _, own=own: own, engine))
    assert LENGTH and not any(swap_path.iterdir())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks(swap_path):
    """torch.compile with the eager backend: the graph capture meets parameters that are fetched and evicted."""

    def build():
        model = Stack(2)
        for block in model.blocks:
            block.compile(backend="eager")
        return model

    assert_parity(build, lambda own: train(own, batch, steps=3), swap_path)
