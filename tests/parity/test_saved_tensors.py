"""What autograd saves for backward, changed or not: the engine refuses what plain PyTorch refuses, and frees it too."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import tiered_zero
from tests.support.pairwise import by_turns
from tests.support.trainers import OptimizerMaker, Plain, adamw, assert_parity, tiered
from tiered_zero.errors import ModelError

PLACES = ("device", "host", "moved")
"""Of parameters; with "moved" what autograd saves besides rests on NVMe."""

Forward = Callable[["Net", Tensor], Tensor]
FORWARDS: list[Forward] = []


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.own = nn.Parameter(torch.randn(4))
        self._run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def forward(function: Forward) -> Forward:
    FORWARDS.append(function)
    return function


class Square(torch.autograd.Function):
    """Saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return grad * (2 * x + 0 * y)


class Double(torch.autograd.Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


# -- refused -----------------------------------------------------------------------------------------------------------


@forward
def change_an_output(net: Net, x: Tensor) -> Tensor:
    return net.b(x).exp().add_(1)


@forward
def change_an_input(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    y = hidden * net.b(x)
    hidden.mul_(2)
    return y + hidden


@forward
def change_through_a_view(net: Net, x: Tensor) -> Tensor:
    y = net.a(x).tanh()
    y.detach()[0].zero_()
    return y


@forward
def change_what_a_function_saved(net: Net, x: Tensor) -> Tensor:
    y: Tensor = Square.apply(net.a(x))
    return y.add_(1) + y


@forward
def change_a_leaf(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    x.mul_(2)
    return y


@forward
def change_a_weight_after_its_use(net: Net, x: Tensor) -> Tensor:
    y = net.b(net.a(x))
    with torch.no_grad():
        net.b.weight.mul_(2)
    return y


@forward
def change_a_parameter_of_the_root(net: Net, x: Tensor) -> Tensor:
    y = net.a(x) * net.own
    with torch.no_grad():
        net.own[1:].fill_(7.0)
    return y


@forward
def change_between_checkpointed_parts(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x).exp()
    y = checkpoint(net.b, hidden, use_reentrant=False)
    hidden.add_(1)
    return y


@forward
def change_in_what_is_computed_again(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda t: net.b(t).exp().add_(1), net.a(x), use_reentrant=True)


@forward
def save_an_inference_tensor(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        mask = x > 0
    return net.a(x) * mask


# -- allowed -----------------------------------------------------------------------------------------------------------


@forward
def change_what_nothing_saved(net: Net, x: Tensor) -> Tensor:
    y = nn.functional.relu(net.a(x), inplace=True)
    return y.add_(1)


@forward
def change_dirty_input(net: Net, x: Tensor) -> Tensor:
    y: Tensor = Double.apply(net.a(x))
    return y * net.own


@forward
def change_a_part_in_place(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    y[0].mul_(2)
    y[1:] = net.b(x[1:]).sigmoid()
    return y.exp()


@forward
def save_on_the_cpu(net: Net, x: Tensor) -> Tensor:
    with save_on_cpu():
        return net.b(net.a(x).exp())


@forward
def multiply_sparse(net: Net, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(4).to_sparse(), net.a(x).t()).t() + torch.sparse.mm(x.to_sparse(), net.b.weight)


@forward
def differentiate_forward(net: Net, x: Tensor) -> Tensor:
    values, tangents = torch.func.jvp(lambda t: net.b(t).exp(), (x,), (torch.ones_like(x),))
    return values + tangents


@forward
def differentiate_a_product_forward(net: Net, x: Tensor) -> Tensor:
    """Of the parameter there is no tangent: autograd saves a tensor of zeros without memory."""
    tangents: Tensor = torch.func.jvp(lambda t: t * net.own, (net.a(x),), (x,))[1]
    return tangents


@forward
def map_over_a_batch(net: Net, x: Tensor) -> Tensor:
    y: Tensor = torch.vmap(lambda row: (net.b.weight @ row).exp() * net.own)(x)
    return y


@forward
def penalise_a_gradient(net: Net, x: Tensor) -> Tensor:
    inputs = x.clone().requires_grad_()
    y = net.b(net.a(inputs).tanh())
    (slope,) = torch.autograd.grad(y.sum(), inputs, create_graph=True)
    return y + slope.square()


@forward
def change_in_a_penalised_graph(net: Net, x: Tensor) -> Tensor:
    inputs = x.clone().requires_grad_()
    y = net.b(net.a(inputs)).exp()
    (slope,) = torch.autograd.grad(y.sum(), inputs, create_graph=True)
    y.add_(1)
    return slope


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def placed(net: Net, swap_path: Path, place: str, make_optimizer: OptimizerMaker = adamw) -> tiered_zero.Engine:
    moved = {"activations": {"device": "nvme", "nvme_path": str(swap_path), "limit": "1MiB", "min_nbytes": 1}}
    placement = ("none", "none") if place == "device" else ("cpu", "cpu")
    return tiered(net, swap_path, placement, make_optimizer, runtime=moved if place == "moved" else {})


Use = Callable[[Any, Tensor], Tensor]


def outcome(trainer: Any, loss_of: Use = lambda trainer, x: trainer(x).square().sum(), own: bool = False) -> Any:
    """What two steps make: the weights, or the words of the error. `own`: by `loss.backward()`."""
    try:
        for number in range(2):
            loss = loss_of(trainer, torch.randn(3, 4, generator=torch.Generator().manual_seed(number)))
            loss.backward() if own else trainer.backward(loss)
            trainer.step()
    except ModelError as error:  # of weights that are not at their home any more
        assert "were changed in forward or between steps" in str(error)
        return CHANGED
    except RuntimeError as error:
        return str(error).split(":")[0]
    return {name: value.clone() for name, value in trainer.module.state_dict().items()}


CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation"


def assert_same(expected: Any, found: Any) -> None:
    assert type(expected) is type(found), f"{expected} expected, {found} found"
    if isinstance(expected, str):
        assert expected == found
    else:
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's own decompositions
@pytest.mark.parametrize(("function", "place"), by_turns(FORWARDS, PLACES, 2))
def test_it_is_refused_as_in_plain_pytorch_or_the_same(function: Forward, place: str, swap_path: Path) -> None:
    expected = outcome(Plain(Net(function), sgd))
    assert_same(expected, outcome(placed(Net(function), swap_path, place, sgd)))


def direct(trainer: Any, x: Tensor) -> Tensor:
    loss: Tensor = trainer.module(x).square().sum()
    return loss


def compute_in_gathered(trainer: Any, x: Tensor) -> Tensor:
    with tiered_zero.gathered(trainer.module.own):
        loss: Tensor = (x * trainer.module.own).exp().add_(1).sum()
    return loss


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("own", "use"), [(False, direct), (True, direct), (True, compute_in_gathered)])
@pytest.mark.parametrize("function", [change_an_output, change_in_what_is_computed_again], ids=lambda f: f.__name__)
def test_it_is_refused_too(function: Forward, use: Use, own: bool, place: str, swap_path: Path) -> None:
    """Past the engine, and in `gathered`."""
    assert outcome(Plain(Net(function), sgd), use, own) == CHANGED
    assert outcome(placed(Net(function), swap_path, place, sgd), use, own) == CHANGED


def test_the_words_are_torchs(swap_path: Path) -> None:
    """But for the node that computed the tensor, which only torch knows."""
    words = []
    for trainer in (Plain(Net(change_an_output), sgd), tiered(Net(change_an_output), swap_path, make_optimizer=sgd)):
        with pytest.raises(RuntimeError) as caught:
            trainer.backward(trainer(torch.ones(3, 4)).sum())
        words.append(re.sub(r", which [^,]*,|set_detect_anomaly.*", "", str(caught.value)))
    assert words[0] == words[1]


def test_a_second_backward_is_refused(swap_path: Path) -> None:
    engine = tiered(Net(change_dirty_input), swap_path)
    loss = engine(torch.ones(3, 4)).exp().sum()
    engine.backward(loss)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        engine.backward(loss)


@pytest.mark.parametrize("place", PLACES)
def test_a_graph_that_nothing_holds_is_freed(place: str, swap_path: Path) -> None:
    """Its nodes hold their own outputs, also where no backward frees them."""
    engine = placed(Net(lambda net, x: Square.apply(net.b(net.a(x).exp()).tanh())), swap_path, place)
    for module in (engine, engine.module):
        x = torch.ones(3, 4, requires_grad=True)
        alive = weakref.ref(x)
        y = module(x)
        del x, y
        assert alive() is None


# -- hooks of the program around a call --------------------------------------------------------------------------------


def in_save_on_cpu(trainer: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        loss: Tensor = trainer(x).square().sum()
    return loss


def in_save_on_cpu_directly(trainer: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        return direct(trainer, x)


def in_a_checkpoint(trainer: Any, x: Tensor) -> Tensor:
    loss: Tensor = checkpoint(trainer, x, use_reentrant=False).square().sum()
    return loss


def blocks_in_checkpoints(trainer: Any, x: Tensor) -> Tensor:
    for block in (trainer.module.a, nn.Tanh(), trainer.module.b):
        x = checkpoint(block, x, use_reentrant=False)
    return x.square().sum()


@pytest.mark.parametrize(
    ("use", "place"),
    by_turns([in_save_on_cpu, in_save_on_cpu_directly, in_a_checkpoint, blocks_in_checkpoints], PLACES[:2]),
)
@pytest.mark.parametrize("function", [change_an_output, change_a_part_in_place, differentiate_forward])
def test_hooks_around_a_call_have_their_effect(function: Forward, use: Use, place: str, swap_path: Path) -> None:
    expected = outcome(Plain(Net(function), sgd), use, own=True)
    assert_same(expected, outcome(placed(Net(function), swap_path, place, sgd), use, own=True))


@pytest.mark.parametrize("place", PLACES[:2])
def test_what_is_saved_may_be_changed_where_the_program_allows_it(place: str, swap_path: Path) -> None:
    with allow_mutation_on_saved_tensors():
        expected = outcome(Plain(Net(change_an_output), sgd))
        assert_same(expected, outcome(placed(Net(change_an_output), swap_path, place, sgd)))


def test_hooks_around_a_call_get_all_but_weights(swap_path: Path) -> None:
    counts = []
    for trainer in (Plain(Net(change_a_part_in_place)), tiered(Net(change_a_part_in_place), swap_path)):
        saved: list[Tensor] = []
        with saved_tensors_hooks(lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda tensor: tensor):
            trainer(torch.ones(3, 4, requires_grad=True))
        counts.append(len(saved))
    counts[0] -= 2  # the weights of `a` and `b`
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("place", PLACES[:2])
@pytest.mark.parametrize("use", [in_a_checkpoint, blocks_in_checkpoints], ids=lambda u: u.__name__)
def test_a_checkpoint_around_a_call_computes_again(use: Use, place: str, swap_path: Path) -> None:
    counts = []
    for trainer in (
        Plain(Net(change_a_part_in_place)),
        placed(Net(change_a_part_in_place), swap_path, place),
    ):
        calls: list[int] = []
        trainer.module.b.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        use(trainer, torch.ones(3, 4)).backward()
        counts.append(len(calls))
    assert counts == [2, 2]


def keep(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("hooks", [save_on_cpu, lambda: saved_tensors_hooks(keep, keep)], ids=["save_on_cpu", "keep"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_units_are_evicted_where_hooks_in_a_forward_keep_what_they_get(
    hooks: Callable[[], Any], tier: str, swap_path: Path
) -> None:
    def script(trainer: Any) -> list[Any]:
        """Two graphs at a time: the backward of one ends with its units evicted."""
        for number in range(2):
            losses = [trainer(torch.full((3, 4), number + part / 4)) for part in range(2)]
            for loss in losses:
                trainer.backward(loss)
            trainer.step()
        return []

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            with hooks():
                for block in self.blocks:
                    x = block(x)
            return x.square().sum()

    assert_parity(Loss, script, swap_path, [(tier, tier)], runtime={"optimizer_in_backward": False})
