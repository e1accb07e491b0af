"""An offloaded parameter: what needs no bytes works, what needs them raises an error that names it."""

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tiered_zero
from tests.support.inspection.insides import OffloadedParameter
from tests.support.models import HIDDEN, ParityGPT, batch
from tests.support.trainers import tiered, train

NAME = "blocks.0.out.weight"

READS = {
    "arithmetic": lambda p: p + 1,
    "reflected": lambda p: 1 - p,
    "matmul": lambda p: torch.ones(HIDDEN) @ p,
    "function": lambda p: F.linear(torch.ones(HIDDEN), p),
    "keyword": lambda p: F.linear(torch.ones(HIDDEN), weight=p),
    "in a list": lambda p: torch.cat([torch.ones(1, HIDDEN), p]),
    "in a nested list": lambda p: torch.block_diag(*[p, p]),
    "comparison": lambda p: p == 0,
    "torch.equal": lambda p: torch.equal(p, torch.ones(HIDDEN, HIDDEN)),
    "norm": lambda p: torch.nn.utils.get_total_norm([p]),
    "item": lambda p: p.sum().item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "numpy.asarray": lambda p: numpy.asarray(p),
    "iteration": lambda p: [row for row in p],
    "indexing": lambda p: p[0],
    "slicing": lambda p: p[1:3, ::2],
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.t(),
    "T": lambda p: p.T,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to(torch.float64),
    "cpu": lambda p: p.cpu().sum(),
    "format of a value": lambda p: f"{p.mean():.3f}",
    "bool": lambda p: bool(p.any()),
}

WRITES = {
    "add_": lambda p: p.add_(1),
    "fill_": lambda p: p.fill_(0),
    "copy_": lambda p: p.copy_(torch.ones(HIDDEN, HIDDEN)),
    "data.zero_": lambda p: p.data.zero_(),
    "+=": lambda p: p.__iadd__(1),
    "setitem": lambda p: p.__setitem__(0, 1.0),
    "set data": lambda p: setattr(p, "data", torch.ones(HIDDEN, HIDDEN)),
    "init": lambda p: nn.init.normal_(p),
    "out=": lambda p: torch.add(torch.ones(HIDDEN, HIDDEN), 1, out=p),
}


@pytest.fixture(params=["cpu", "nvme"])
def engine(request, swap_path):
    with tiered(ParityGPT(), swap_path, (request.param, request.param)) as engine:
        yield engine


@pytest.mark.parametrize("when", ["before", "after a step"])
def test_bytes_are_refused_by_name(when, engine):
    if when != "before":
        train(engine, batch, 1)
    before = engine.module.state_dict()
    param = engine.module.get_parameter(NAME)
    for name, read in READS.items():
        with pytest.raises(tiered_zero.errors.ParameterOffloadedError, match=NAME.replace(".", r"\.")):
            read(param)
            pytest.fail(f"{name} gave a value")
    for name, write in WRITES.items():
        with torch.no_grad(), pytest.raises(tiered_zero.errors.ParameterOffloadedError, match="gathered"):
            write(param)
            pytest.fail(f"{name} wrote somewhere")
    after = engine.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_the_error_is_a_runtime_error_and_says_what_to_do(engine):
    with pytest.raises(
        RuntimeError, match=r"tokens\.weight.*rest on tier (host|nvme).*tiered_zero\.gathered.*state_dict"
    ):
        engine.module.tokens.weight.mean()


def test_everything_else_may_be_asked(engine):
    param = engine.module.get_parameter(NAME)
    assert (param.shape, param.dtype, param.device.type) == (torch.Size([HIDDEN, HIDDEN]), torch.float32, "cpu")
    assert (param.numel(), param.dim(), param.ndim, param.nelement(), len(param)) == (
        HIDDEN**2,
        2,
        2,
        HIDDEN**2,
        HIDDEN,
    )
    assert (param.size(0), param.stride(), param.element_size(), param.nbytes) == (
        HIDDEN,
        (HIDDEN, 1),
        4,
        4 * HIDDEN**2,
    )
    assert (param.requires_grad, param.grad, param.is_leaf, param.grad_fn) == (True, None, True, None)
    assert not param.is_meta and not param.is_sparse and param.is_contiguous() and param.is_floating_point()
    for text in (repr(param), str(param), f"{param}", repr(nn.ParameterList([param]))):
        assert "32" in text or "[32, 32]" in text
    assert "offloaded" in repr(param) and str(HIDDEN) in repr(engine.module.blocks[0])
    assert isinstance(param, nn.Parameter) and param in set(engine.module.parameters())
    assert hash(param) == hash(param) and param is engine.module.blocks[0].out.weight
    assert sum(p.numel() for p in engine.module.parameters() if p.requires_grad) > 20_000
    param.grad = None
    param.note = "a user's own"
    assert param.note == "a user's own"


def test_after_close_the_error_says_so(swap_path):
    engine = tiered(ParityGPT(), swap_path)
    param = engine.module.tokens.weight
    engine.close()
    with pytest.raises(tiered_zero.errors.ParameterOffloadedError, match="closed"):
        param.sum()
    with pytest.raises(tiered_zero.errors.ParameterOffloadedError, match="closed"):
        engine.module.state_dict()
    with pytest.raises(tiered_zero.errors.ModelError, match="closed"):
        engine(*batch(0))


def test_numpy_may_view_what_is_gathered(engine):
    """It makes the storage unresizable; another one replaces it, under the same parameters."""
    norm = engine.module.norm
    for _ in range(2):
        train(engine, batch, 1)
        with tiered_zero.gathered(norm):
            seen = norm.weight.detach().numpy().copy()
            kept = norm.bias.detach().numpy()
        assert numpy.array_equal(seen, engine.module.state_dict()["norm.weight"].numpy())
        assert kept.shape == (HIDDEN,)
        with pytest.raises(tiered_zero.errors.ParameterOffloadedError):
            norm.weight.sum()


def test_gathered_parameters_are_plain(engine):
    """`gathered` fetches whole units; after it they are refused as before."""
    param = engine.module.get_parameter(NAME)
    other = engine.module.get_parameter("blocks.1.out.weight")
    with tiered_zero.gathered(param):
        assert not isinstance(param, OffloadedParameter) and torch.isfinite(param + 1).all()
        for name, read in READS.items():
            if name != "numpy.asarray":  # refused by torch for what requires a gradient
                read(param)
        with pytest.raises(tiered_zero.errors.ParameterOffloadedError):
            other.sum()
    with pytest.raises(tiered_zero.errors.ParameterOffloadedError):
        param.sum()
