"""Code that takes a parameter's address past Python: its bytes in the forward that uses it, NaN or an error outside."""

import warnings

import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.utils.dlpack import from_dlpack

import tiered_zero
from tests.support.trainers import FAR, adamw, tiered
from tiered_zero.errors import TieredZeroError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted = torch.jit.CompilationUnit("def twice(weight):\n    return weight * 2\n")

READERS = {
    "torch.tensor": lambda p: torch.tensor(p),
    "torch.Tensor": lambda p: torch.Tensor(p),
    "new_tensor": lambda p: p.new_tensor(p),
    "set_": lambda p: torch.empty(0).set_(p),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "_make_subclass": lambda p: torch.Tensor._make_subclass(torch.Tensor, p),
    "nested_tensor": lambda p: torch.nested.nested_tensor([p]).unbind()[0],
    "dlpack": lambda p: from_dlpack(p.detach()),
    "script": lambda p: _scripted.twice(p) / 2,
    "safetensors": lambda p: torch.frombuffer(bytearray(save({"w": p})[-4 * p.numel() :]), dtype=p.dtype).view(p.shape),
}


class Reader(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 13.0).view(3, 4))
        self.read, self.seen = read, None

    def forward(self, x):
        with torch.no_grad():
            self.seen = self.read(self.weight).detach().clone()
        return (x @ self.weight).sum()


class Model(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.first, self.reader = nn.Linear(5, 3), Reader(read)

    def forward(self, x):
        return self.reader(self.first(x))


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:The PyTorch API of nested", "ignore:.*jit.script.*")
@pytest.mark.parametrize("placement", FAR)
@pytest.mark.parametrize("name", READERS)
def test_a_reader_past_python_sees_the_bytes_or_nan_or_an_error(name, placement, swap_path):
    read = READERS[name]
    with tiered(Model(read), swap_path, placement, lambda model: adamw(model)) as engine:
        for _ in range(2):
            expected = engine.module.state_dict()["reader.weight"]
            engine.backward(engine(torch.ones(2, 5)))
            assert torch.equal(engine.module.reader.seen, expected), "in the forward that uses it"
            engine.step()
        try:
            with torch.no_grad():
                found = read(engine.module.reader.weight)
        except (TieredZeroError, RuntimeError):
            return
        assert bool(found.isnan().all()), "between calls never something that looks like a weight"


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
