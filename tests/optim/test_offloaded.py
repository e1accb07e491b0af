"""An OffloadedOptimizer gives the bits of the plain optimizer in any loop."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from tiered_zero.errors import ConfigError, ModelError
from tiered_zero.optim import OffloadedOptimizer, offloaded

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "muon": (torch.optim.Muon, {"lr": 1e-2}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
}


class Net(nn.Module):
    """Linear layers, one tied, one frozen, and a parameter that is used in some steps only."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40, bias=bias)
        self.inner = nn.ModuleList(nn.Linear(40, 40, bias=bias) for _ in range(3))
        self.inner[2].weight = self.inner[0].weight
        self.frozen = nn.Linear(40, 40, bias=bias).requires_grad_(False)
        self.rare = nn.Linear(40, 40, bias=False)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        x = self.first(x).tanh()
        for layer in self.inner:
            x = layer(x).tanh()
        return self.frozen(self.rare(x) if rare else x).square().mean()


def models(bias: bool = True) -> tuple[Net, Net]:
    torch.manual_seed(3)
    net = Net(bias)
    return net, copy.deepcopy(net)


def backward(net: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    loss = net(torch.randn(5, 6, generator=generator), step % 2 == 0)
    loss.backward()
    return loss.detach()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, left), right in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(left.view(torch.int32), right.view(torch.int32)), name


def assert_same_state(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for index, values in left["state"].items():
        other = right["state"][index]
        assert values.keys() == other.keys()
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == other[name].dtype and torch.equal(value, other[name]), (index, name)
            else:
                assert value == other[name], (index, name)


@pytest.fixture(params=["cpu", "nvme"])
def offload(request: pytest.FixtureRequest, swap_path: Path) -> Iterator[dict[str, Any]]:
    yield {"device": request.param, **({"nvme_path": str(swap_path)} if request.param == "nvme" else {})}
    assert not list(swap_path.iterdir())


@pytest.mark.parametrize("name", RULES)
def test_the_numbers_are_those_of_the_plain_optimizer(name: str, offload: dict[str, Any]) -> None:
    kind, options = RULES[name]
    plain, ours = models(bias=name != "muon")
    reference = kind(plain.parameters(), **options)
    with OffloadedOptimizer(ours.parameters(), kind, offload, **options) as optimizer:
        for step in range(5):
            for net, own in ((plain, reference), (ours, optimizer)):
                for micro in range(2):
                    backward(net, 2 * step + micro)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                own.step()
                own.zero_grad()
            assert_same(plain, ours)
        assert_same_state(reference.state_dict(), optimizer.state_dict())


def groups_of(net: Net) -> list[dict[str, Any]]:
    decayed = [param for param in net.parameters() if param.dim() > 1]
    return [
        {"params": decayed, "weight_decay": 0.2},
        {"params": [param for param in net.parameters() if param.dim() == 1], "lr": 3e-3},
    ]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda own: lr_scheduler.OneCycleLR(own, max_lr=[1e-2, 2e-2], total_steps=12),
    "plateau": lambda own: lr_scheduler.ReduceLROnPlateau(own, patience=0, factor=0.5),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_and_groups_act(schedule: str, swap_path: Path) -> None:
    plain, ours = models()
    reference = torch.optim.AdamW(groups_of(plain), lr=1e-2)
    where = {"device": "nvme", "nvme_path": str(swap_path)}
    with OffloadedOptimizer(groups_of(ours), torch.optim.AdamW, where, lr=1e-2) as optimizer:
        pairs = [(net, own, SCHEDULES[schedule](own)) for net, own in ((plain, reference), (ours, optimizer))]
        for step in range(6):
            for net, own, scheduler in pairs:
                loss = backward(net, step)
                own.step()
                scheduler.step(loss) if schedule == "plateau" else scheduler.step()
                own.zero_grad()
        assert_same(plain, ours)
        assert_same_state(reference.state_dict(), optimizer.state_dict())


def test_a_grad_scaler_scales_skips_and_clips(offload: dict[str, Any]) -> None:
    plain, ours = models()
    reference = torch.optim.Adam(plain.parameters(), lr=1e-2)
    with OffloadedOptimizer(ours.parameters(), torch.optim.Adam, offload, lr=1e-2) as optimizer:
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
        for step in range(5):
            for net, own, scaler in zip((plain, ours), (reference, optimizer), scalers, strict=True):
                scaler.scale(net(torch.ones(2, 6) * (torch.inf if step == 2 else 1), step % 2 == 0)).backward()
                scaler.unscale_(own)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                scaler.step(own)
                scaler.update()
                own.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same(plain, ours)
        assert optimizer.num_steps == 4


def test_state_moves_between_it_and_a_plain_optimizer(offload: dict[str, Any]) -> None:
    plain, ours = models()
    reference = torch.optim.AdamW(groups_of(plain), lr=1e-2, amsgrad=True)
    with OffloadedOptimizer(groups_of(ours), torch.optim.AdamW, offload, lr=1e-2, amsgrad=True) as first:
        assert first.state_dict() == torch.optim.AdamW(groups_of(plain), lr=1e-2, amsgrad=True).state_dict()
        first.load_state_dict(first.state_dict())  # as accelerate does before the first step
        for step in range(3):
            for net, own in ((plain, reference), (ours, first)):
                backward(net, step)
                own.step()
                own.zero_grad()
        saved = first.state_dict()
    back = torch.optim.AdamW(groups_of(ours), lr=1.0, amsgrad=True)
    back.load_state_dict(saved)
    with OffloadedOptimizer(groups_of(plain), torch.optim.AdamW, offload, lr=1.0, amsgrad=True) as second:
        second.load_state_dict(reference.state_dict())
        for step in range(3, 6):
            for net, own in ((plain, second), (ours, back)):
                backward(net, step)
                own.step()
                own.zero_grad()
        assert_same(plain, ours)
        assert_same_state(second.state_dict(), back.state_dict())


def test_what_a_loop_changes_between_steps_is_seen(offload: dict[str, Any]) -> None:
    """A group added and one thawed, values that are loaded, averaged or assigned, another memory, strides."""
    plain, ours = models()
    before = copy.deepcopy(plain.state_dict())
    with OffloadedOptimizer(ours.inner.parameters(), torch.optim.AdamW, offload, lr=1e-2) as optimizer:
        pairs = ((plain, torch.optim.AdamW(plain.inner.parameters(), lr=1e-2)), (ours, optimizer))
        for step in range(8):
            for net, own in pairs:
                if step == 2:
                    own.add_param_group({"params": [*net.first.parameters(), *net.frozen.parameters()], "lr": 3e-3})
                if step == 3:
                    net.frozen.requires_grad_(True)
                if step == 4:
                    net.load_state_dict(before)
                if step == 5:
                    with torch.no_grad():
                        for param in net.parameters():
                            param.data = param.data.clone().mul_(0.5)
                if step == 6:
                    weight = net.inner[1].weight
                    weight.data = weight.data.t().contiguous().t()
                if step == 7:
                    weight = net.inner[1].weight
                    weight.data = torch.zeros(40, 80)[:, ::2].copy_(weight.data)
                backward(net, step)
                own.step()
                own.zero_grad(set_to_none=step > 3)
            assert_same(plain, ours)
        assert_same_state(pairs[0][1].state_dict(), optimizer.state_dict())


def test_an_empty_state_starts_all_parameters_anew(offload: dict[str, Any]) -> None:
    plain, ours = models()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with OffloadedOptimizer(ours.parameters(), torch.optim.AdamW, offload, lr=1e-2) as optimizer:
        for step in range(6):
            for net, own in ((plain, reference), (ours, optimizer)):
                if step == 3:
                    own.state = defaultdict(dict)
                backward(net, step)
                own.step()
                own.zero_grad()
        assert_same(plain, ours)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that owns its memory and was made meanwhile."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and result is not args[0]:
            self.numel = max(self.numel, result.numel())
        return result


def test_a_dense_parameter_in_another_order_is_never_copied_as_a_whole(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut into three sub-groups, at elements inside of its rows, which pass through buffers."""
    monkeypatch.setattr(offloaded, "AUTO_SUB_GROUP_NUMEL", 2048)
    torch.manual_seed(0)
    strided = nn.Parameter(torch.randn(70, 13, 6).bfloat16().mT)
    plain = nn.Parameter(strided.detach().float())
    reference = torch.optim.AdamW([plain], lr=1e-2)
    with OffloadedOptimizer(
        [strided], torch.optim.AdamW, {"device": "nvme", "nvme_path": str(swap_path)}, lr=1e-2
    ) as optimizer:
        for _ in range(3):
            strided.grad = torch.randn(70, 13, 6).bfloat16().mT
            plain.grad = strided.grad.float()
            reference.step()
            with Largest() as made:
                optimizer.step()
            assert torch.equal(strided, plain.bfloat16()) and not strided.is_contiguous()
        assert made.numel < strided.numel()


def test_a_rule_without_state_steps_parameters_in_place_or_not(offload: dict[str, Any], tmp_path: Path) -> None:
    """State is saved and loaded also where there is none, and comes with a group that is added."""
    torch.manual_seed(0)
    made = [torch.randn(8, 8), torch.randn(8, 8).t(), torch.randn(8, 16)[:, ::2], torch.randn(8, 16).bfloat16()[:, ::2]]
    ours = [nn.Parameter(values) for values in made]
    plain = [nn.Parameter(values.detach().float().clone()) for values in made]
    late, plain_late = nn.Parameter(torch.ones(8, 16)[:, ::2]), nn.Parameter(torch.ones(8, 8))
    reference = torch.optim.SGD(plain, lr=0.1)
    with OffloadedOptimizer(ours, torch.optim.SGD, offload, lr=0.1) as optimizer:
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [late], "momentum": 0.9})
                reference.add_param_group({"params": [plain_late], "momentum": 0.9})
            for one, other in zip([*ours, late], [*plain, plain_late], strict=True):
                other.grad = torch.randn(8, 8).bfloat16().float()
                one.grad = other.grad.to(one.dtype)
            optimizer.step()
            reference.step()
            optimizer.save_state(tmp_path / str(step))
            optimizer.load_state(tmp_path / str(step))
        for one, other in zip([*ours, late], [*plain, plain_late], strict=True):
            assert torch.equal(one, other.to(one.dtype))


@pytest.mark.parametrize("shape", [(3, 3), (8, 16)])
def test_state_is_not_laid_out_anew_for_another_shape(offload: dict[str, Any], shape: tuple[int, int]) -> None:
    """Before there is state, as of a parameter that is filled late, any shape goes."""
    early, late = nn.Parameter(torch.ones(16, 8)), nn.Parameter(torch.ones(16, 8))
    with OffloadedOptimizer([early, late], torch.optim.AdamW, offload, lr=1e-2) as optimizer:
        early.grad = torch.ones(16, 8)
        optimizer.step()
        late.data, late.grad = torch.ones(shape), torch.ones(shape)
        optimizer.step()
        before = copy.deepcopy(optimizer.read_state(early)["exp_avg"])
        early.grad = None
        early.data, early.grad = torch.ones(shape), torch.ones(shape)
        with pytest.raises(ModelError, match=r"parameter 0 of group 0: expected the shape \(16, 8\), which its state"):
            optimizer.step()
        early.grad = None
        early.data = torch.ones(16, 8)
        optimizer.step()
        assert torch.equal(before, optimizer.read_state(early)["exp_avg"])


@pytest.mark.parametrize(
    ("kind", "offload", "error", "says"),
    [
        (torch.optim.AdamW, None, ConfigError, "offload: expected a mapping such as"),
        (torch.optim.AdamW, "nvme", ConfigError, "offload: expected a mapping such as"),
        (torch.optim.AdamW, {"device": "nvme"}, ConfigError, r"offload_optimizer\.nvme_path: expected a directory"),
        ("AdamW", {"device": "cpu"}, TypeError, "optimizer_class: expected a class of torch.optim"),
        (None, {"device": "cpu"}, TypeError, "optimizer_class: expected a class of torch.optim"),
        (nn.Linear, {"device": "cpu"}, TypeError, "optimizer_class: expected a class of torch.optim"),
    ],
)
def test_arguments_of_other_types_are_named(kind: Any, offload: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        OffloadedOptimizer([nn.Parameter(torch.ones(3))], kind, offload, lr=1e-2)
