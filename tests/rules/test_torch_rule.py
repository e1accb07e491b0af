"""TorchRule against plain torch, bit for bit: cuts anywhere, gradients absent, lazily made and replaced state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tiered_zero.errors import ModelError
from tiered_zero.optim import OffloadedOptimizer
from tiered_zero.rules import torch_rule
from tiered_zero.rules.native_rules import Lion
from tiered_zero.rules.rule import Slice
from tiered_zero.rules.torch_rule import TorchRule

STEPS = 6
SHAPES = [(7, 13), (1,), (), (31,), (5, 3, 11)]

ELEMENTWISE: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (torch.optim.Adam, {"lr": 1e-2}),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (
        torch.optim.Adam,
        {"lr": 1e-2, "betas": (0.0, 0.9), "eps": 1e-3, "decoupled_weight_decay": True, "weight_decay": 0.1},
    ),
    (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.5, "lr_decay": 0.01}),
    (torch.optim.Adagrad, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.RMSprop, {"lr": 1e-2}),
    (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    (torch.optim.Adamax, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.RAdam, {"lr": 1e-2, "betas": (0.9, 0.8)}),
    (torch.optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.ASGD, {"lr": 1e-2, "t0": 2, "weight_decay": 0.1}),
    (torch.optim.Rprop, {"lr": 1e-2}),
    (torch.optim.Rprop, {"lr": 1e-2, "etas": (0.4, 1.3), "maximize": True}),
    (Lion, {"lr": 1e-2, "weight_decay": 0.1}),
    (Lion, {"lr": 1e-2, "betas": (0.5, 0.9), "maximize": True}),
]


class RowScaled(Optimizer):
    """A user's class whose update depends on the shape, and that replaces both parameter and state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows = p.grad.square().mean(dim=-1, keepdim=True)
                    state = self.state[p]
                    state["rows"] = state["rows"] * 0.9 + rows if "rows" in state else rows
                    state["count"] = state.get("count", 0) + 1
                    p.data = p.data - group["lr"] * p.grad / (state["rows"].sqrt() + 1e-3) / state["count"]


class StateInConstructor(torch.optim.Optimizer):
    """State exists before the first step, as Adagrad's does."""

    def __init__(self, params: Any, lr: float = 0.1, start: float = 2.0) -> None:
        super().__init__(params, {"lr": lr, "start": start})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, group["start"]).detach()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["sum"].addcmul_(p.grad, p.grad)
                    p.addcdiv_(p.grad, self.state[p]["sum"].sqrt(), value=-group["lr"])


class LateState(StateInConstructor):
    """A second array appears in the second step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "seen" in state and "slow" not in state:
                        state["slow"] = p.clone()
                    state["seen"] = True
                    p.sub_(p.grad, alpha=group["lr"])
                    if "slow" in state:
                        state["slow"].lerp_(p, 0.5)
                        p.copy_(state["slow"])


class SubclassedAdamW(torch.optim.AdamW):
    pass


def random_gradients(generator: torch.Generator) -> list[torch.Tensor | None]:
    """One step's gradients; about one in four is absent, and never all of them."""
    kept = [bool(torch.rand((), generator=generator) > 0.25) for _ in SHAPES]
    kept[0] = kept[0] or not any(kept)
    return [torch.randn(shape, generator=generator) if keep else None for shape, keep in zip(SHAPES, kept, strict=True)]


def rule_of(kind: type[Optimizer], options: dict[str, Any]) -> TorchRule:
    return TorchRule(kind([torch.zeros(1, 1, requires_grad=True)], **options))


def new_run(rule: TorchRule, master: torch.Tensor, hyper: dict[str, Any]) -> Slice:
    fields = rule.state_fields(tuple(master.shape), hyper)
    run = Slice(
        master=master,
        grad=torch.zeros(0),
        state={f.name: torch.zeros(f.shape, dtype=f.dtype) for f in fields},
        scalars={},
        hyper=hyper,
    )
    rule.init_state(run.state, hyper)
    return run


def hyper_of(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}


def cut(length: int, generator: torch.Generator) -> list[slice]:
    """One to four adjacent slices that cover [0, length)."""
    borders = torch.randint(1, max(length, 2), (3,), generator=generator).tolist()
    edges = sorted({0, length, *(border for border in borders if border < length)})
    return [slice(start, stop) for start, stop in pairwise(edges)]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.reshape(-1).view(torch.int32), right.reshape(-1).view(torch.int32))


def train_both(kind: type[Optimizer], options: dict[str, Any], rule: TorchRule, shapes: list[tuple[int, ...]]) -> None:
    """Plain torch on whole tensors and the rule on runs, six steps: parameters and state agree in every bit."""
    generator = torch.Generator().manual_seed(7)
    plain = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    optimizer = kind(plain, **options)
    masters = [leaf.detach().clone() for leaf in plain]
    runs: list[list[tuple[slice, Slice]]] = []
    for master in masters:
        flat = master.view(-1)
        slices = cut(flat.numel(), generator) if rule.elementwise else [slice(None)]
        parts = [flat[part] if rule.elementwise else master for part in slices]
        runs.append([(s, new_run(rule, part, hyper_of(optimizer))) for s, part in zip(slices, parts, strict=True)])
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.9
        grads = (
            random_gradients(generator) if shapes is SHAPES else [torch.randn(s, generator=generator) for s in shapes]
        )
        if step == 0 and not options.get("fused"):  # fused SGD itself cannot start a buffer beside others
            grads[0] = None  # its first gradient comes later than the others'
        for leaf, grad in zip(plain, grads, strict=True):
            leaf.grad = None if grad is None else grad.clone()
        optimizer.step()
        due = []
        for grad, parts in zip(grads, runs, strict=True):
            for part, run in parts if grad is not None else []:
                run.hyper = hyper_of(optimizer)
                run.grad = grad.view(-1)[part].clone() if rule.elementwise else grad.clone()
                due.append(run)
        rule.update(due)
        for leaf, master in zip(plain, masters, strict=True):
            assert same_bits(leaf.detach(), master), f"step {step}"
    for leaf, parts in zip(plain, runs, strict=True):
        for part, run in parts:
            for name, array in run.state.items():
                expected = optimizer.state[leaf][name]
                assert same_bits(expected.reshape(-1)[part] if rule.elementwise else expected, array), name


@pytest.mark.parametrize("foreach", [None, True], ids=["forloop", "foreach"])
@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE, ids=lambda value: getattr(value, "__name__", ""))
def test_elementwise_classes_give_the_bits_of_plain_torch(
    kind: type[Optimizer], options: dict[str, Any], foreach: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is not Lion and not isinstance(options["lr"], torch.Tensor):
        options = {**options, "foreach": foreach}
    monkeypatch.setattr(torch_rule, "_CHUNK_NUMEL", 16)
    monkeypatch.setattr(torch_rule, "_GRAIN_NUMEL", 1)
    rule = rule_of(kind, options)
    assert rule.elementwise
    train_both(kind, options, rule, SHAPES)


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.ASGD, Lion], ids=lambda k: k.__name__
)
def test_vector_tails_and_threads_do_not_change_bits(kind: type[Optimizer]) -> None:
    """Sizes over torch's parallel grain and over the chunk, and cuts that are no multiple of a vector."""
    generator = torch.Generator().manual_seed(3)
    numel = 3 * (1 << 17) + 5
    leaf = torch.randn(numel, generator=generator).requires_grad_()
    optimizer = kind([leaf], lr=0.01, weight_decay=0.1)
    rule = rule_of(kind, {"lr": 0.01, "weight_decay": 0.1})
    master = leaf.detach().clone()
    runs = [new_run(rule, part, hyper_of(optimizer)) for part in (master[:1003], master[1003:])]
    for _ in range(2):
        grad = torch.randn(numel, generator=generator)
        leaf.grad = grad.clone()
        optimizer.step()
        runs[0].grad, runs[1].grad = grad[:1003], grad[1003:]
        rule.update(runs)
        assert same_bits(leaf.detach(), master)


WHOLE: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.Muon, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 1e-2, "fused": True}),
    (torch.optim.AdamW, {"lr": 1e-2, "fused": True, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 1e-2, "fused": True, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}),
    (SubclassedAdamW, {"lr": 1e-2}),
    (RowScaled, {"lr": 1e-2}),
    (StateInConstructor, {"lr": 1e-2}),
    (LateState, {"lr": 1e-2}),
]


@pytest.mark.parametrize(("kind", "options"), WHOLE, ids=lambda value: getattr(value, "__name__", ""))
def test_other_classes_give_the_bits_of_plain_torch_on_whole_parameters(
    kind: type[Optimizer], options: dict[str, Any]
) -> None:
    rule = rule_of(kind, options)
    assert not rule.elementwise
    train_both(kind, options, rule, [(7, 13), (4, 4), (13, 1)])


def test_a_users_instance_becomes_a_rule_and_is_left_alone() -> None:
    leaf = torch.ones(4, 5, requires_grad=True)
    optimizer = RowScaled([leaf], lr=0.3)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the instance's step
    hooked: list[Optimizer] = []
    optimizer.register_step_pre_hook(lambda stepped, *_: hooked.append(stepped))
    rule = TorchRule(optimizer)
    run = new_run(rule, leaf.detach().clone(), hyper_of(optimizer))
    run.grad = torch.ones(4, 5)
    rule.update([run])
    assert run.scalars == {"count": 1}
    assert not same_bits(run.master, leaf.detach())
    assert torch.equal(leaf.detach(), torch.ones(4, 5))
    assert not optimizer.state and not hooked


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    "kind", [torch.optim.Adagrad, torch.optim.AdamW, torch.optim.SGD, StateInConstructor, RowScaled, LateState]
)
def test_a_resumed_optimizer_goes_on_where_it_was(kind: type[Optimizer], steps: int) -> None:
    options = {"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.1}
    leaf = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    optimizer = kind([leaf], **options)
    grads = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(2))
    for grad in grads[:steps]:
        leaf.grad = grad.clone()
        optimizer.step()
    rule = TorchRule(optimizer)
    master = leaf.detach().clone()
    run = new_run(rule, master.view(-1) if rule.elementwise else master, hyper_of(optimizer))
    values = dict(optimizer.state[leaf])
    rule.check_state(values, tuple(leaf.shape), run.hyper)
    for name in run.state.keys() & values.keys():
        values[name] = values[name].view(run.state[name].shape)
    run.scalars = rule.import_state(values, run.state, run.hyper)
    exported = rule.export_state(run.state, run.scalars)
    assert exported.keys() == values.keys()
    assert all(torch.equal(torch.as_tensor(exported[name]), torch.as_tensor(values[name])) for name in values)
    for grad in grads[steps:]:
        leaf.grad = grad.clone()
        optimizer.step()
        run.grad = grad.clone().view(run.master.shape)
        rule.update([run])
    assert same_bits(leaf.detach(), master)


def test_a_run_that_has_not_stepped_exports_nothing() -> None:
    rule = rule_of(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    assert rule.export_state({"momentum_buffer": torch.ones(3)}, {}) == {}


def test_a_stateless_step_and_then_momentum_starts_the_buffer_as_torch_does() -> None:
    leaf = torch.ones(5, requires_grad=True)
    optimizer = torch.optim.SGD([leaf], lr=0.1, momentum=0.9)
    rule = rule_of(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    run = new_run(rule, torch.ones(5), hyper_of(optimizer))
    for momentum in (0.0, 0.5, 0.5):
        optimizer.param_groups[0].update(momentum=momentum, dampening=0.5)
        leaf.grad = torch.arange(5.0)
        optimizer.step()
        run.hyper, run.grad = hyper_of(optimizer), torch.arange(5.0)
        rule.update([run])
        assert same_bits(leaf.detach(), run.master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_widened_then_scaled_and_the_16_bit_parameter_is_written(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_rule, "_CHUNK_NUMEL", 8)
    monkeypatch.setattr(torch_rule, "_GRAIN_NUMEL", 1)
    grad = torch.randn(37, generator=torch.Generator().manual_seed(5)).to(dtype)
    scale = float(torch.tensor(0.3))
    leaf = torch.linspace(-1, 1, 37).requires_grad_()
    leaf.grad = grad.float() * torch.tensor(scale)
    optimizer = torch.optim.AdamW([leaf], lr=0.1)
    optimizer.step()
    rule = rule_of(torch.optim.AdamW, {"lr": 0.1})
    run = new_run(rule, torch.linspace(-1, 1, 37), hyper_of(optimizer))
    run.grad, run.grad_scale, run.out = grad, scale, torch.zeros(37, dtype=torch.bfloat16)
    rule.update([run])
    assert same_bits(leaf.detach(), run.master)
    assert torch.equal(run.out, leaf.detach().bfloat16())


def test_scalars_advance_once_a_run_and_are_never_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rule, "_CHUNK_NUMEL", 4)
    monkeypatch.setattr(torch_rule, "_GRAIN_NUMEL", 1)
    rule = rule_of(torch.optim.AdamW, {"lr": 0.1})
    hyper = hyper_of(torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.1))
    runs = [new_run(rule, torch.zeros(11), hyper) for _ in range(2)]
    for run in runs:
        run.grad = torch.ones(11)
    rule.update(runs)
    runs[1].scalars = dict(runs[0].scalars)  # as a caller that cuts a run in two does
    before = runs[1].scalars["step"].clone()
    runs[0].grad = torch.ones(11)
    rule.update(runs[:1])
    assert runs[0].scalars["step"].item() == 2.0
    assert runs[1].scalars["step"] == before == 1.0


def test_state_fields_say_shape_and_dtype_without_values() -> None:
    adam = rule_of(torch.optim.Adam, {"lr": 0.1})
    hyper = hyper_of(torch.optim.Adam([torch.zeros(1, requires_grad=True)], amsgrad=True))
    fields = adam.state_fields((10,), hyper)
    assert [f.name for f in fields] == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert {(f.shape, f.dtype) for f in fields} == {((10,), torch.float32)}
    factor = rule_of(torch.optim.Adafactor, {})
    hyper = hyper_of(torch.optim.Adafactor([torch.zeros(1, requires_grad=True)]))
    assert {f.name: f.shape for f in factor.state_fields((6, 8), hyper)} == {"row_var": (6, 1), "col_var": (1, 8)}
    assert [f.shape for f in factor.state_fields((6,), hyper)] == [(6,)]


def test_dry_runs_draw_no_random_numbers() -> None:
    class Noisy(RowScaled):
        def step(self, closure: Any = None) -> None:
            torch.rand(3)
            super().step()

    state = torch.get_rng_state()
    rule = rule_of(Noisy, {})
    rule.state_fields((3, 4), {"lr": 0.1})
    assert torch.equal(state, torch.get_rng_state())


class GroupSum(RowScaled):
    """Adds to a number of the param group for each parameter, and uses it from the sixth step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                group["distance"] = group.get("distance", 0.0) + p.grad.abs().sum().item()
                p.sub_(p.grad, alpha=group["lr"] * (group["distance"] if group["k"] > 5 else 1.0))


class SelfCounter(RowScaled):
    """Counts steps in itself, and has use for the count much later."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 if self.count < 1000 else 0.01)


class GlobalNorm(RowScaled):
    """Sums over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        leaves = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in leaves]).norm()
        for p in leaves:
            p.sub_(p.grad / norm)


class NestedState(RowScaled):
    """State in lists and dicts of tensors, some of which come late, as SOAP and DASH keep it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state, rows = self.state[p], p.grad.flatten(1)
            if not state:
                state.update(sides=[torch.zeros_like(rows @ rows.T), None], blocks=[{"sum": torch.zeros(rows.shape)}])
                state["shape"] = (len(rows), rows.shape[1])
                state["counts"] = {"step": torch.tensor(0)}
            state["counts"]["step"] += 1
            state["sides"][0].lerp_(rows @ rows.T, 0.1)
            state["blocks"][0]["sum"] += rows
            state["sides"][1] = torch.linalg.eigh(state["sides"][0])[1]  # in another order of memory
            p -= 0.01 * (state["sides"][1] @ state["blocks"][0]["sum"]).view(p.shape)


class KeyedState(RowScaled):
    """State in a dict, by keys that the class chooses."""

    keys: Sequence[Any] = ()

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].update({"a": dict.fromkeys(self.keys, 1.0), "a.first": 2.0})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["first"], r"one value named a\.first"),
        ([1, "1"], r"one value named a\.1"),
        ([(1, 2)], r"str or int.*\(1, 2\)"),
    ],
    ids=str,
)
def test_nested_state_whose_names_are_not_unique_is_refused(keys: Sequence[Any], words: str) -> None:
    kind = type("Keyed", (KeyedState,), {"keys": keys})
    with pytest.raises(ModelError, match=words):
        rule_of(kind, {"lr": 0.1}).state_fields((30, 4), {"lr": 0.1})


class SetState(RowScaled):
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["history"] = {1}


class AdamWScheduleFree(RowScaled):
    """A class that changes weights in eval() and train()."""


class Wrapper(RowScaled):
    """Its param groups are those of another optimizer."""

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]


class Packed(torch.Tensor):
    """A tensor subclass, as quantized state is."""


class SubclassState(RowScaled):
    """State in a subclass for all but small parameters."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "moment" not in state:
                state["moment"] = torch.zeros_like(p) if p.numel() < 64 else torch.zeros_like(p).as_subclass(Packed)
            state["moment"].add_(p.grad)
            p.data = p.data - state["moment"].as_subclass(torch.Tensor)


class SmallWeights(RowScaled):
    """A class that keeps state of those elements alone that are small."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("sum", torch.zeros_like(param[param.abs() < 0.1]))
        super().step(closure)


class TableOnDevice(RowScaled):
    """Moves a table of its own to where the parameter is, and keeps it in a dict."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.tables: dict[str, Any] = {"steps": torch.tensor([1.0, 2.0]), "more": [torch.ones(1)]}

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.tables["steps"] = self.tables["steps"].to(p.device)
            self.tables["more"][0] = self.tables["more"][0].to(p.device)
            p.data = p.data - p.grad * self.tables["steps"][1]


class NeedsClosure(RowScaled):
    def step(self, closure: Any) -> None:
        closure()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (GroupSum, r"by itself; \['distance'\] of its param group"),
        (SelfCounter, r"counts \['count'\] in itself"),
        (GlobalNorm, "by itself"),
        (SetState, "history: set"),
        (SmallWeights, r"whose size follows.*\['sum'\] has no elements"),
        (SubclassState, "moment: Packed, a tensor subclass.*state_format lossy_8bit_moments"),
        (NeedsClosure, "no closure"),
    ],
)
def test_an_optimizer_that_cannot_be_split_is_refused(kind: type[Optimizer], words: str) -> None:
    rule = rule_of(kind, {"lr": 0.1})
    with pytest.raises(ModelError, match=words):
        rule.state_fields((30, 4), {"lr": 0.1})


@pytest.mark.parametrize(("kind", "words"), [(AdamWScheduleFree, "eval.. and train.. exchange"), (Wrapper, "wraps")])
def test_a_class_that_cannot_be_stepped_in_parts_is_refused_at_once(kind: type[Optimizer], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        TorchRule(kind.__new__(kind))


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_nested_state_has_plain_bits_and_moves_to_and_from_a_plain_optimizer(offload: str, swap_path: Path) -> None:
    plain, own = (torch.nn.Linear(6, 4, bias=False) for _ in range(2))
    own.load_state_dict(plain.state_dict())
    reference = NestedState(plain.parameters())
    where = {"device": offload, "nvme_path": str(swap_path)}
    with OffloadedOptimizer(own.parameters(), NestedState, where) as optimizer:
        for step in range(6):
            for model, one in ((plain, reference), (own, optimizer)):
                model.weight.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
                one.step()
            assert torch.equal(plain.weight, own.weight)
            left, right = (one.state_dict()["state"][0] for one in (reference, optimizer))
            assert all(map(torch.equal, left["sides"], right["sides"])) and left["shape"] == right["shape"]
            assert torch.equal(left["blocks"][0]["sum"], right["blocks"][0]["sum"])
            assert left["counts"]["step"].dtype == right["counts"]["step"].dtype == torch.int64
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))


def test_a_group_that_changes_otherwise_than_foreseen_stops_the_step() -> None:
    """A class that no small trial finds out: what it does to its group depends on the gradient."""

    class LargeGradients(RowScaled):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad.abs().max() > 100:
                        group["lr"] /= 2
                    p.sub_(p.grad, alpha=group["lr"])

    rule = rule_of(LargeGradients, {"lr": 0.1})
    run = new_run(rule, torch.zeros(3, 4), {"lr": 0.1})
    run.grad = torch.full((3, 4), 200.0)
    with pytest.raises(ModelError, match=r"\['lr'\] of its param group became other"):
        rule.update([run])


def test_a_dry_run_leaves_the_users_own_attributes_alone() -> None:
    """The dry run is on the meta device, and some classes move what they keep in themselves to the parameter's."""
    optimizer = TableOnDevice([torch.zeros(1, requires_grad=True)])
    rule = TorchRule(optimizer)
    run = new_run(rule, torch.zeros(3, 4), hyper_of(optimizer))
    run.grad = torch.ones(3, 4)
    rule.update([run])
    assert torch.equal(run.master, torch.full((3, 4), -2.0))
    assert torch.equal(optimizer.tables["steps"], torch.tensor([1.0, 2.0]))
    assert torch.equal(optimizer.tables["more"][0], torch.ones(1))


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_classes_that_cannot_work_are_refused_with_the_reason(kind: type[Optimizer]) -> None:
    with pytest.raises(ModelError, match="cannot train across tiers: it"):
        TorchRule(kind([torch.zeros(1, requires_grad=True)], lr=0.1))


def test_muon_refuses_a_vector_when_the_plan_is_made() -> None:
    rule = rule_of(torch.optim.Muon, {"lr": 0.1})
    with pytest.raises(ModelError, match=r"shape \(5,\)"):
        rule.state_fields((5,), hyper_of(torch.optim.Muon([torch.zeros(1, 1, requires_grad=True)])))


@pytest.mark.parametrize("option", ["differentiable", "capturable", "fused"])
def test_options_that_change_the_update_are_refused_before_any_write(option: str) -> None:
    rule = rule_of(torch.optim.Adam, {"lr": 0.1})
    run = Slice(master=torch.ones(3), grad=torch.ones(3), state={}, scalars={}, hyper={"lr": 0.1, option: True})
    with pytest.raises(ModelError, match=option):
        rule.update([run])
    assert torch.equal(run.master, torch.ones(3))


def test_state_that_was_not_planned_is_an_error() -> None:
    optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
    rule = rule_of(torch.optim.SGD, {"lr": 0.1})
    run = new_run(rule, torch.zeros(3), hyper_of(optimizer))
    run.grad, run.hyper = torch.ones(3), {**hyper_of(optimizer), "momentum": 0.9}
    with pytest.raises(ModelError, match="momentum_buffer"):
        rule.update([run])
