"""Dispatch modes, function modes and transforms of the user's see his model, and nothing of the paging around it."""

import contextlib
import copy
import functools
from collections import Counter

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import tiered_zero
from tests.support.models import ParityGPT, batch
from tests.support.pairwise import by_turns
from tests.support.trainers import FAR, Plain, assert_parity, assert_same_bits, follow, tiered, train

HIDDEN = 16
X = torch.linspace(-1, 1, 4 * HIDDEN).view(4, HIDDEN)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def keep_products(_context, operator, *_args, **_kwargs) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_selectively(block: nn.Module, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def jvp(block: nn.Module, x: Tensor) -> Tensor:
    value, tangent = torch.func.jvp(block, (x,), (torch.ones_like(x),))
    return value + tangent


def dual(block: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(block(forward_ad.make_dual(x, torch.ones_like(x))))
        return value + tangent


WAYS = {
    "plain": lambda block, x: block(x),
    "selective checkpoint": recompute_selectively,
    "jvp": jvp,
    "dual numbers": dual,
    "vmap": lambda block, x: torch.func.vmap(block)(x),
    "grad": lambda block, x: x + torch.func.grad(lambda y: block(y).square().sum())(x),
}


class Transformed(nn.Module):
    """Applies its blocks in one of `WAYS`, and a weight of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) * 0.1)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = WAYS[self.way](block, x)
        return F.linear(x, self.weight).square().mean()


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of torch's own, in its forward-mode formulas
@pytest.mark.parametrize(("way", "clipping"), by_turns(sorted(WAYS.keys() - {"grad"}), [0.0, 0.5]))
def test_transforms_in_forward_have_the_bits_of_plain_ones(way, clipping, swap_path):
    """By turns with room for every unit, and for those in use alone."""
    zero = {"stage3_max_live_parameters": 1200, "stage3_prefetch_bucket_size": 0} if clipping else {}
    assert_parity(
        lambda: Transformed(way), lambda own: train(own, lambda _: (X,), 3), swap_path, clipping=clipping, zero=zero
    )


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen[getattr(function, "__name__", str(function))] += 1
        return function(*args, **(kwargs or {}))


OURS = ("detach", "aten.detach.default", "__get__", "numel")


@pytest.mark.parametrize(("placement", "kind"), by_turns([*FAR, ("none", "cpu")], [Operators, Functions]))
def test_modes_see_what_they_see_in_plain_pytorch(kind, placement, swap_path):
    """Forward, backward and step. Not compared: `detach`, which torch itself adds for saved tensor hooks, attributes
    that hooks look at, the engine's count of tokens (`numel`), and the optimizer's own."""
    seen: list[Counter[str]] = []

    def script(trainer):
        losses = []
        for number in range(3):
            with kind() as mode:
                loss = trainer(*batch(number))
                trainer.backward(loss)
            if isinstance(trainer, tiered_zero.Engine):
                with kind() as beside:
                    trainer.step()
                assert not beside.seen, beside.seen
            else:
                trainer.step()
            seen.append(Counter({k: n for k, n in mode.seen.items() if k not in OURS}))
            losses.append(loss.detach())
        return losses

    torch.manual_seed(0)
    expected = follow(script, Plain(ParityGPT(), clipping=0.5))
    torch.manual_seed(0)
    assert_same_bits(expected, follow(script, tiered(ParityGPT(), swap_path, placement, clipping=0.5)))
    for plain, found in zip(seen[:3], seen[3:], strict=True):
        assert found == plain


def test_a_flop_counter_counts_the_models(swap_path):
    def count(trainer):
        with FlopCounterMode(display=False) as counter:
            trainer.backward(trainer(*batch(0)))
        return [float(counter.get_total_flops())]

    assert_parity(ParityGPT, count, swap_path)


def test_a_default_device_of_the_users_is_not_the_engines(swap_path):
    def script(trainer):
        seen = []
        for number in range(3):
            loss = trainer(*batch(number))
            with torch.device("meta") if isinstance(trainer, tiered_zero.Engine) else contextlib.nullcontext():
                trainer.backward(loss)
                trainer.step()
            seen.append(loss.detach())
        return seen

    assert_parity(ParityGPT, script, swap_path, clipping=0.5)


REFUSED = {
    "grad in forward": lambda engine: engine(X),
    "grad over the engine": lambda engine: torch.func.grad(engine)(X),
    "grad over the module": lambda engine: torch.func.grad(engine.module)(X),
    "grad of parameters": lambda engine: torch.func.grad(
        lambda params: torch.func.functional_call(engine.module, params, (X,))
    )(dict(engine.module.named_parameters())),
    "jit.script": lambda engine: torch.jit.script(engine.module),
    "jit.script of a part": lambda engine: torch.jit.script(engine.module.blocks[0]),
    "jit.trace": lambda engine: torch.jit.trace(engine.module, X),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_says_so_and_training_goes_on(name, swap_path):
    def script(trainer):
        seen = train(trainer, lambda _: (X,), 1)
        if isinstance(trainer, tiered_zero.Engine):
            trainer.module.way = "grad" if name == "grad in forward" else "plain"
            with pytest.raises(tiered_zero.errors.ModelError, match=r"torch\.(func\.grad|jit).*(Use|copy)"):
                REFUSED[name](trainer)
            trainer.module.way = "plain"
        return seen + train(trainer, lambda _: (X,), 2)

    assert_parity(lambda: Transformed("plain"), script, swap_path, [("cpu", "cpu")], clipping=0.5)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_copy_can_be_traced(swap_path):
    with tiered(nn.Sequential(Block()), swap_path) as engine:
        expected = engine(X)
        copied = copy.deepcopy(engine.module)
        assert torch.equal(torch.jit.trace(copied, X)(X), expected)
