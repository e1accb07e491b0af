"""The schedules against their closed forms, written here as tables of numbers or as formulas of their own."""

import math
from typing import Any, ClassVar

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from tiered_zero.config.schema import SchedulerSection
from tiered_zero.errors import ConfigError
from tiered_zero.rules.lr import build_scheduler


def adam(*lrs: float) -> Adam:
    return Adam([{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in lrs or (0.1,)])


def build(kind: str, optimizer: Optimizer, **params: Any) -> Any:
    return build_scheduler(SchedulerSection(type=kind, params=params), optimizer)


def rates(kind: str, count: int, **params: Any) -> list[float]:
    """The rate of each of the first optimizer steps: before any `step()`, after one, ..."""
    optimizer = adam()
    scheduler = build(kind, optimizer, **params)
    seen = []
    for _ in range(count):
        seen.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return seen


def test_warmup_linear() -> None:
    expected = [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0]
    params = {"warmup_min_lr": 1, "warmup_max_lr": 3, "warmup_num_steps": 4, "warmup_type": "linear"}
    assert rates("WarmupLR", 8, **params) == pytest.approx(expected)


def test_warmup_log() -> None:
    expected = [0.0] + [0.5 * math.log(i + 1, 10) for i in range(10)] + [0.5, 0.5]
    assert rates("WarmupLR", 13, warmup_max_lr=0.5, warmup_num_steps=10) == pytest.approx(expected)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_shorter_warmup_takes_two_steps(num_steps: int) -> None:
    """As in DeepSpeed; Trainer and Accelerate write 0 for "auto" by default."""
    params = {"warmup_max_lr": 1.0, "warmup_num_steps": num_steps}
    assert rates("WarmupLR", 4, **params) == pytest.approx([0.0, 0.0, 1.0, 1.0])
    assert rates("WarmupLR", 4, **params, warmup_type="linear") == pytest.approx([0.0, 0.0, 0.5, 1.0])


def test_warmup_to_the_optimizers_rate() -> None:
    optimizer = adam(0.2, 0.4)
    scheduler = build("WarmupLR", optimizer, warmup_num_steps=2)
    for _ in range(4):
        scheduler.step()
    assert scheduler.get_last_lr() == [0.2, 0.4]  # each group's own, as in DeepSpeed
    scheduler = build("WarmupLR", adam(0.2, 0.4), warmup_max_lr=[1.0, 2.0], warmup_min_lr=[0.5, 1.5])
    assert scheduler.get_last_lr() == [0.5, 1.5]


def test_warmup_decay() -> None:
    expected = [0, 0, 1, 2, 3, 4, 3, 2, 1, 0, 0, 0]
    params = {"warmup_max_lr": 4, "warmup_num_steps": 4, "total_num_steps": 8, "warmup_type": "linear"}
    assert rates("WarmupDecayLR", 12, **params) == pytest.approx(expected)
    assert rates("WarmupDecayLR", 7, **{**params, "warmup_min_lr": 2})[-1] == pytest.approx(2 + 2 * 3 / 4)


def test_warmup_decay_of_the_notebook() -> None:
    """3e-5 at its peak; log warmup of 30 steps, then 270 steps down."""
    params = {"total_num_steps": 300, "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 30}
    expected = [0.0]
    expected += [3e-5 * math.log(i + 1) / math.log(30) for i in range(30)]
    expected += [3e-5 * (300 - i) / 270 for i in range(30, 301)]
    assert rates("WarmupDecayLR", 302, **params) == pytest.approx(expected, rel=1e-12)


def test_warmup_decay_without_decay_window() -> None:
    params = {"warmup_max_lr": 4, "warmup_num_steps": 4, "total_num_steps": 2, "warmup_type": "linear"}
    assert rates("WarmupDecayLR", 7, **params) == pytest.approx([0, 0, 1, 2, 3, 0, 0])


def test_warmup_cosine() -> None:
    params = {"total_num_steps": 8, "warmup_num_steps": 4, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1}
    falling = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    expected = [0, 0.2, 0.4, 0.6, 0.8, *falling, 0.1, 0.1]
    got = rates("WarmupCosineLR", 11, **params, warmup_type="linear")
    assert got == pytest.approx([0.1 * ratio for ratio in expected])
    logs = rates("WarmupCosineLR", 5, **params)
    assert logs[1:] == pytest.approx([0.1 * (0.2 + 0.8 * math.log(i + 1, 4)) for i in range(4)])


def test_range_test() -> None:
    params = {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    assert rates("LRRangeTest", 9, **params) == pytest.approx([0.5 * (1 + 2 * i / 4) for i in range(9)])
    stairs = rates("LRRangeTest", 9, **params, lr_range_test_staircase=True)
    assert stairs == pytest.approx([0.5 * (1 + 2 * (i // 4)) for i in range(9)])


class TestOneCycle:
    SHAPE: ClassVar = {
        "cycle_min_lr": 1.0,
        "cycle_max_lr": 5.0,
        "cycle_first_step_size": 4,
        "cycle_second_step_size": 2,
    }

    def test_rate(self) -> None:
        expected = [1, 2, 3, 4, 5, 3, 1, 1, 1]
        assert rates("OneCycle", 9, **self.SHAPE) == pytest.approx(expected)

    def test_decay(self) -> None:
        got = rates("OneCycle", 11, **self.SHAPE, decay_step_size=2, decay_lr_rate=0.5)
        assert got[7:] == pytest.approx([1 / (1 + 0.5 * k / 2) for k in (1, 2, 3, 4)])

    def test_stairs(self) -> None:
        shape = {**self.SHAPE, "cycle_second_step_size": 4, "cycle_first_stair_count": 2}
        assert rates("OneCycle", 9, **shape) == pytest.approx([1, 1, 3, 3, 5, 3, 3, 1, 1])
        assert rates("OneCycle", 9, **shape, cycle_second_stair_count=0) == pytest.approx([1, 1, 3, 3, 5, 4, 3, 2, 1])

    def test_momentum(self) -> None:
        optimizer = adam()
        momentum = {"cycle_min_mom": 0.6, "cycle_max_mom": 1.0, "decay_mom_rate": 0.1, "decay_step_size": 1}
        scheduler = build("OneCycle", optimizer, **self.SHAPE, **momentum)
        seen = []
        for _ in range(9):
            seen.append(optimizer.param_groups[0]["betas"][0])
            assert optimizer.param_groups[0]["betas"][1] == 0.99
            scheduler.step()
        assert seen == pytest.approx([0.6, 0.9, 0.8, 0.7, 0.6, 0.8, 1.0, 1.1, 1.2])

    def test_no_momentum(self, caplog: pytest.LogCaptureFixture) -> None:
        optimizer = adam()
        build("OneCycle", optimizer, **self.SHAPE, cycle_momentum=False).step()
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        assert not caplog.records
        sgd = SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
        build("OneCycle", sgd, **self.SHAPE).step()
        assert sgd.param_groups[0]["momentum"] == 0.9
        assert "no betas" in caplog.text


OWN: dict[str, dict[str, Any]] = {
    "LRRangeTest": {},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "cycle_momentum": False},
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupDecayLR": {"warmup_num_steps": 4, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 4, "total_num_steps": 9},
}


@pytest.mark.parametrize("kind", OWN)
class TestSurface:
    def test_resume_is_exact(self, kind: str) -> None:
        optimizer = adam(0.3, 0.5)
        whole = build(kind, optimizer, **OWN[kind])
        for _ in range(5):
            whole.step()
        fresh = adam(0.3, 0.5)
        resumed = build(kind, fresh, **OWN[kind])
        resumed.load_state_dict(whole.state_dict())
        for _ in range(7):
            assert [group["lr"] for group in fresh.param_groups] == [group["lr"] for group in optimizer.param_groups]
            whole.step()
            resumed.step()

    def test_deepspeeds_state(self, kind: str) -> None:
        scheduler = build(kind, adam(), **OWN[kind])
        assert scheduler.state_dict() == {"last_batch_iteration": -1}
        scheduler.step()
        assert scheduler.state_dict() == {"last_batch_iteration": 0}
        scheduler.step(6)
        assert scheduler.last_batch_iteration == 6
        assert scheduler.get_last_lr() == scheduler.get_lr()

    def test_starting_late_leaves_the_groups(self, kind: str) -> None:
        optimizer = adam(0.25)
        scheduler = build(kind, optimizer, **OWN[kind], last_batch_iteration=3)
        assert scheduler.get_last_lr() == [0.25]
        scheduler.step()
        assert scheduler.last_batch_iteration == 4

    def test_tensor_rates_stay_tensors(self, kind: str) -> None:
        rate = torch.tensor(0.5)
        optimizer = Adam([torch.zeros(1, requires_grad=True)], lr=rate, capturable=False, foreach=False)
        build(kind, optimizer, **OWN[kind]).step()
        assert optimizer.param_groups[0]["lr"] is rate


class TestGroups:
    def test_one_cycle_of_each_group(self) -> None:
        optimizer = adam(0.1, 0.2)
        params: dict[str, Any] = {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": [0.3, 0.6], "cycle_momentum": False}
        scheduler = build("OneCycle", optimizer, **params, cycle_first_step_size=2)
        seen = []
        for _ in range(6):
            seen.append(scheduler.get_last_lr())
            scheduler.step()
        expected = [[0.1, 0.2], [0.2, 0.4], [0.3, 0.6], [0.2, 0.4], [0.1, 0.2], [0.1, 0.2]]
        assert [lr for lrs in seen for lr in lrs] == pytest.approx([lr for lrs in expected for lr in lrs])
        with pytest.raises(ConfigError, match="cycle_min_lr: expected one value or 2, one a param group; found 3"):
            build("OneCycle", optimizer, cycle_min_lr=[0.1, 0.2, 0.3], cycle_max_lr=1.0)

    def test_momentum_of_each_group(self) -> None:
        """Each as if it were the only group."""
        both, rates = adam(0.1, 0.2), {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
        options = {**rates, "cycle_first_step_size": 2, "decay_mom_rate": 0.1, "decay_step_size": 1}
        scheduler = build("OneCycle", both, cycle_min_mom=[0.5, 0.6], cycle_max_mom=[0.7, 0.9], **options)
        alone = [adam(0.1), adam(0.2)]
        of_one = [
            build("OneCycle", one, cycle_min_mom=low, cycle_max_mom=high, **options)
            for one, low, high in zip(alone, (0.5, 0.6), (0.7, 0.9), strict=True)
        ]
        for _ in range(7):
            expected = [one.param_groups[0]["betas"] for one in alone]
            assert [group["betas"] for group in both.param_groups] == expected and expected[0] != expected[1]
            for each in (scheduler, *of_one):
                each.step()
        with pytest.raises(ConfigError, match="cycle_max_mom: expected one value or 2, one a param group; found 1"):
            build("OneCycle", both, **rates, cycle_max_mom=[0.9])

    def test_a_cycle_without_a_way_down(self) -> None:
        """DeepSpeed's formula with a step ratio of 1: x / 1 on the way up, and then the smallest rate."""
        params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_second_step_size": 0}
        assert rates("OneCycle", 7, **params, cycle_momentum=False) == pytest.approx([0, 0.25, 0.5, 0.75, 0, 0, 0])


def test_decay_to_the_optimizers_rate() -> None:
    """A rate of None, which "auto" in a config becomes."""
    scheduler = build("WarmupDecayLR", adam(0.1, 0.01), warmup_max_lr=None, warmup_num_steps=3, total_num_steps=9)
    for _ in range(4):
        scheduler.step()
    assert scheduler.get_last_lr() == [0.1, 0.01]


def test_a_schedule_that_ends_at_once_is_built() -> None:
    """Its first steps are tried; the one past its end is the run's to make."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=torch.tensor(0.5), momentum=0.9)
    build("StepLR", optimizer, step_size=1)
    assert optimizer.param_groups[0]["lr"] == 0.5  # a tensor, which schedules fill
    assert build("OneCycleLR", optimizer, max_lr=1.0, total_steps=2).last_epoch == 0


def test_torch_schedulers() -> None:
    optimizer = adam()
    scheduler = build("StepLR", optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    ("kind", "nearest"), [("WarmupLr", "WarmupLR"), ("StepRL", "StepLR"), ("ReduceLROnPlateau", "Did you mean")]
)
def test_unknown_types(kind: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler.type: expected one of .*{nearest}"):
        build(kind, adam())


@pytest.mark.parametrize(
    ("kind", "params", "text"),
    [
        ("WarmupLR", {"warmup_num_steps": -1}, "greater than or equal to 0"),
        ("WarmupLR", {"warmup_type": "cubic"}, "'log' or 'linear'"),
        ("WarmupLR", {"warmup_max_lr": [1.0, 2.0]}, "warmup_max_lr: expected one value or 1"),
        ("WarmupDecayLR", {}, "total_num_steps"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "cycle_first_step_size"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycles": 0}, "cycles"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size"),
        ("StepLR", {}, "step_size"),
        ("LambdaLR", {}, "lr_lambda"),
        ("PolynomialLR", {"last_epoch": [1]}, "expected arguments that PolynomialLR takes; .*initial_lr"),
    ],
)
def test_bad_arguments(kind: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(kind, adam(), **params)
