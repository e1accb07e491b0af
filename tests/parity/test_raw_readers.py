"""Ways past Python to a parameter's address: its bytes in the forward that uses it; elsewhere what the page says."""

import copy
import ctypes
import io
import re
import warnings

import numpy
import pytest
import safetensors.torch
import torch
from torch import nn

import tiered_zero
from tests.house import ROOT
from tests.support.pairwise import by_turns
from tests.support.trainers import FAR, adamw, tiered
from tiered_zero.errors import ParameterOffloadedError

PAGE = ROOT / "docs/troubleshooting.md"
OUTCOMES = dict(
    re.findall(
        r"^\| `([^`]*)`[^|]*\| (raises|raises, in torch|gives a copy) \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
)
"""The page's table: a call, and what it does to a parameter that is offloaded. Each is executed as it stands there."""


SCRIPTED = "scripted(p)"
WRAPPED = "torch.func.functionalize(torch.clone)(p)"
"""torch's wrapper has the parameter's memory, and not the parameter."""
BY_TORCH = tuple(call for call, outcome in OUTCOMES.items() if outcome == "raises, in torch")
"""They take the address and call no operator: the error is torch's, and no forward fetches for them."""
MESSAGES = {
    SCRIPTED: (RuntimeError, "needs the bytes of parameter 'reader.weight'"),
    WRAPPED: (ParameterOffloadedError, "needs the bytes of a parameter that is offloaded"),
    **dict.fromkeys(BY_TORCH, (RuntimeError, "Cannot access data pointer of Tensor")),
}
"""Where the error is another than of most."""
WITHOUT_FRAMES = ("torch.func.grad(lambda w: w.square().sum() / 2)(p)", "torch.func.vjp(torch.clone, p)")


class Double(torch.autograd.Function):
    @staticmethod
    def forward(_context, weight):
        return weight * 2

    @staticmethod
    def backward(_context, grad):
        return grad * 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted = torch.jit.CompilationUnit("def twice(weight):\n    return weight * 2\n").twice


def read(call, p):
    """Do what a row of the table says. Returns the values that it finds, [3, 4]."""
    file = io.BytesIO()
    names = {"torch": torch, "numpy": numpy, "copy": copy, "safetensors": safetensors, "file": file}
    found = eval(call, {**names, "Function": Double, "scripted": _scripted, "p": p})
    if call.startswith("torch.save"):
        file.seek(0)
        found = torch.load(file, weights_only=True)
    while isinstance(found, tuple):  # of vjp the function's output, of jvp its tangent, which is the same
        found = found[0]
    if isinstance(found, bytes):
        found = safetensors.torch.load(found)["w"]
    elif isinstance(found, int):
        found = list((ctypes.c_float * p.numel()).from_address(found))
    elif isinstance(found, torch.UntypedStorage):
        start = p.storage_offset()
        found = torch.frombuffer(bytearray(found.tolist()), dtype=p.dtype)[start : start + p.numel()].clone()
    elif type(found).__name__ == "PyCapsule":
        found = torch.from_dlpack(found)
    elif isinstance(found, torch.Tensor) and found.is_nested:
        found = found.unbind()[0]
    found = torch.as_tensor(found).detach().reshape(p.shape).clone()
    return found / 2 if call in ("p * 2", "Function.apply(p)", SCRIPTED) else found


class Reader(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 13.0).view(3, 4))
        self.call, self.seen = call, None

    def forward(self, x):
        with torch.no_grad():
            self.seen = None if self.call in WITHOUT_FRAMES else read(self.call, self.weight)
        return (x @ self.weight).sum()


class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.first, self.reader = nn.Linear(5, 3), Reader(call)

    def forward(self, x):
        return self.reader(self.first(x))


def test_the_table_is_read():
    assert {*OUTCOMES.values()} == {"raises", "raises, in torch", "gives a copy"}
    rows = PAGE.read_text("utf-8").split("| call | elsewhere |")[1].strip().splitlines()[1:]
    assert len(rows) == len(OUTCOMES) == 29


@pytest.mark.filterwarnings(
    "ignore:To copy construct", "ignore:torch.asarray", "ignore:The PyTorch API of nested", "ignore:.*jit.script.*"
)
@pytest.mark.parametrize(("call", "placement"), by_turns(list(OUTCOMES), FAR))
def test_a_call_does_what_the_page_says(call, placement, swap_path):
    with tiered(Model(call), swap_path, placement, lambda model: adamw(model)) as engine:
        for _ in range(2):
            expected = engine.module.state_dict()["reader.weight"]
            engine.backward(engine(torch.ones(2, 5)))
            if call not in WITHOUT_FRAMES:
                assert torch.equal(engine.module.reader.seen, expected), "in the forward that uses it"
            engine.step()
        param, expected = engine.module.reader.weight, engine.module.state_dict()["reader.weight"]
        with tiered_zero.gathered(param), torch.no_grad():
            assert call in WITHOUT_FRAMES or torch.equal(read(call, param), expected)
        with torch.no_grad():
            error, message = MESSAGES.get(
                call, (ParameterOffloadedError, "needs the bytes of parameter 'reader.weight'")
            )
            if OUTCOMES[call] == "gives a copy":
                assert torch.equal(read(call, param), expected)
            else:
                with pytest.raises(error, match=re.escape(message)):
                    read(call, param)
    with torch.no_grad(), pytest.raises(error):  # its engine is closed
        read(call, param)


@pytest.mark.parametrize("read_address", [torch.Tensor.data_ptr, torch._C._to_dlpack_versioned])
def test_the_address_is_refused_past_every_class(read_address, swap_path):
    engine = tiered(nn.Linear(4, 4), swap_path, ("cpu", "cpu"), adamw)
    expected = pytest.raises(RuntimeError, match="Cannot access data pointer of Tensor")
    with engine, torch._C.DisableTorchFunctionSubclass(), expected:
        read_address(engine.module.weight)


class Borrower(nn.Module):
    """Reads the weight of another module, which is not at hand in this one's forward."""

    def __init__(self, call):
        super().__init__()
        self.owner, self.own = nn.Linear(4, 3, bias=False), nn.Linear(3, 5)
        self.call, self.seen = call, None

    def forward(self, x):
        with torch.no_grad():
            self.seen = read(self.call, self.owner.weight)
        return self.own(self.owner(x)).sum()


RAISING = [call for call, outcome in OUTCOMES.items() if outcome == "raises" and call not in (*WITHOUT_FRAMES, WRAPPED)]


@pytest.mark.filterwarnings(
    "ignore:To copy construct", "ignore:torch.asarray", "ignore:The PyTorch API of nested", "ignore:.*jit.script.*"
)
@pytest.mark.parametrize("call", RAISING)
def test_the_forward_of_another_module_gets_the_values(call, swap_path):
    engine = tiered(Borrower(call), swap_path, ("cpu", "cpu"), adamw, runtime={"unit_size_cap": 1})
    with engine:
        for _ in range(2):
            expected = engine.module.state_dict()["owner.weight"]
            engine.backward(engine(torch.ones(2, 4)))
            assert torch.equal(engine.module.seen, expected)
            engine.step()


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("placement", FAR)
def test_parameters_come_and_go_in_inference_mode(placement, swap_path):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    with tiered(build(), swap_path, placement, adamw, runtime={"unit_size_cap": 1}) as engine, torch.inference_mode():
        assert torch.equal(engine(torch.ones(2, 4)), build()(torch.ones(2, 4)))
        with pytest.raises(ParameterOffloadedError):
            torch.tensor(engine.module[0].weight)
        with tiered_zero.gathered(engine.module):
            assert torch.equal(engine.module[0].weight, build()[0].weight)


def test_gradient_accumulators_stay_where_parameters_are_fetched_and_evicted(swap_path):
    """A hook on the node, as DDP's, is one of the parameter for as long as the node is held."""
    with tiered(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), swap_path, ("cpu", "cpu"), adamw) as engine:
        weight = engine.module[0].weight
        with tiered_zero.gathered(weight):
            node = weight.view_as(weight).grad_fn.next_functions[0][0]
        calls = []
        node.register_hook(lambda *_: calls.append(1))
        for step in range(3):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
            assert len(calls) == step + 1


class Viewer(nn.Module):
    """Has a view of its weight from each forward."""

    def __init__(self):
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.ones(3, 4)), None

    def forward(self, x):
        self.kept = self.weight.detach()
        return (x @ self.weight).sum()


@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("placement", [*FAR, ("none", "none")])
def test_a_view_that_is_kept_past_a_step_shows_no_old_values(placement, clipping, swap_path):
    """In plain PyTorch it shows the new ones. Here it does while its unit is in use, or where that rests on the device;
    else NaN."""
    with tiered(Viewer(), swap_path, placement, adamw, clipping=clipping) as engine:
        with tiered_zero.gathered(engine.module):
            gathered = engine.module.weight.detach()
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 3)))
            engine.step()
            engine.flush()
            for view in (gathered, engine.module.kept):
                if placement == ("none", "none"):
                    assert torch.equal(view, engine.module.weight)
                else:
                    assert bool(view.isnan().all())
        with tiered_zero.gathered(engine.module):
            assert torch.equal(gathered, engine.module.weight)
