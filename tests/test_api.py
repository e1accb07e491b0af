"""`initialize`: each of its arguments, and what it gives back."""

import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import tiered_zero
from tests.support.configs import config_of, zero_section
from tests.support.models import rows as batch
from tests.support.models import two_layers as build_model
from tests.support.pairwise import by_turns
from tiered_zero.errors import ConfigError, ModelError
from tiered_zero.rules.lr import WarmupLR

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def initialize() -> Iterator[Callable[..., Any]]:
    """tiered_zero.initialize, whose engines are closed after the test."""
    engines = []

    def call(**arguments: Any) -> Any:
        parts = tiered_zero.initialize(**arguments)
        engines.append(parts[0])
        return parts

    yield call
    for engine in engines:
        engine.close()


def settings(swap: Path | None = None, **more: Any) -> dict[str, Any]:
    """Without clipping; with a swap directory everything rests on NVMe."""
    return config_of(zero_section("nvme", "nvme", swap, sub_group_size=2048) if swap else None, **more)


def train(engine: Any, steps: range) -> None:
    for step in steps:
        engine.backward(engine(batch(step)).square().mean())
        engine.step()


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same_bits(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(ours[name], plain[name])] == []


# -- the config --------------------------------------------------------------------------------------------------------


def test_config_as_a_dict_a_path_a_string_or_by_args(initialize: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    given = settings(**ADAMW)
    file.write_text(json.dumps(given))
    kept = json.dumps(given)
    for arguments in (
        {"config": given},
        {"config": file},
        {"config": str(file)},
        {"args": Namespace(deepspeed_config=str(file), local_rank=0)},
        {"args": Namespace(local_rank=0), "config": given},
        {"args": Namespace(deepspeed_config=None), "config": given},
    ):
        engine = initialize(model=build_model(), **arguments)[0]
        assert engine.train_micro_batch_size_per_gpu() == 4
        assert engine.get_lr() == [0.1]
    assert json.dumps(given) == kept  # what is handed in is not changed


def test_config_twice_is_refused(initialize: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of config and args"):
        initialize(args=Namespace(deepspeed_config=str(tmp_path)), model=build_model(), config=settings(**ADAMW))


def test_positions_are_those_of_deepspeed(initialize: Callable[..., Any]) -> None:
    """initialize(args, model, optimizer, model_parameters, training_data, lr_scheduler, port, mpu, ..., config)"""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = tiered_zero.initialize(None, model, optimizer, None, None, None, 29500, None, None, None, settings())
    with parts[0] as engine:
        assert engine.module is model
        assert len(parts) == 4
        assert parts[1] is engine.optimizer
        assert parts[2] is None
        assert parts[3] is None


# -- the optimizer -----------------------------------------------------------------------------------------------------


def test_an_optimizer_goes_before_the_configs(initialize: Callable[..., Any]) -> None:
    model = build_model()
    own = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    _, handle, _, _ = initialize(model=model, optimizer=own, config=settings(**ADAMW))
    assert handle.param_groups is own.param_groups
    assert handle.param_groups[0]["momentum"] == 0.5


def test_what_goes_before_the_config_is_said_once(
    initialize: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {}}}
    initialize(
        model=build_model(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.25),
        lr_scheduler=lambda optimizer: StepLR(optimizer, 1),
        config=settings(**ADAMW, **scheduler),
    )
    said = [record.message for record in caplog.records if "is not used" in record.message]
    assert said == [
        "config: optimizer AdamW is not used, for initialize() was given one",
        "config: scheduler WarmupLR is not used, for initialize() was given an lr_scheduler",
    ]
    caplog.clear()
    initialize(model=build_model(), config=settings(**ADAMW, **scheduler))
    assert "is not used" not in caplog.text


def test_a_model_without_elements_is_refused(initialize: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match="Every parameter of the model that requires a gradient is empty"):
        initialize(model=nn.BatchNorm1d(0), config=settings(**ADAMW))


def test_a_callable_gets_the_trainable_parameters(initialize: Callable[..., Any], swap_path: Path) -> None:
    model, plain = build_model(), build_model()
    for each in (model, plain):
        each[0].bias.requires_grad_(False)
    seen: list[list[nn.Parameter]] = []

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        seen.append(params)
        return torch.optim.RMSprop(params, lr=0.01)

    engine, handle, _, _ = initialize(model=model, optimizer=make, config=settings(swap_path))
    assert [id(p) for p in seen[0]] == [id(p) for p in model.parameters() if p.requires_grad]
    assert handle.defaults["lr"] == 0.01
    train(engine, range(3))
    train_plain(plain, torch.optim.RMSprop((p for p in plain.parameters() if p.requires_grad), lr=0.01), range(3))
    assert_same_bits(engine.module.state_dict(), plain.state_dict())


@pytest.mark.parametrize("form", ["groups", "list", "generator", "named", "one group only"])
def test_model_parameters(form: str, initialize: Callable[..., Any], swap_path: Path) -> None:
    """In every form that torch's constructors take; what no group holds is left as it is."""

    def given(model: nn.Sequential) -> Any:
        return {
            "groups": [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}],
            "list": list(model.parameters()),
            "generator": model.parameters(),
            "named": model.named_parameters(),
            "one group only": [{"params": [model[2].weight]}],
        }[form]

    model, plain = build_model(), build_model()
    config = settings(swap_path, optimizer={"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01}})
    engine, handle, _, _ = initialize(model=model, model_parameters=given(model), config=config)
    reference = torch.optim.AdamW(given(plain), lr=0.1, weight_decay=0.01)
    assert [{**g, "params": 0} for g in handle.param_groups] == [{**g, "params": 0} for g in reference.param_groups]
    train(engine, range(4))
    train_plain(plain, reference, range(4))
    assert_same_bits(engine.module.state_dict(), plain.state_dict())


# -- an optimizer that comes with state --------------------------------------------------------------------------------

RESUMED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.01, t0=2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


@pytest.mark.parametrize(
    ("name", "start"), by_turns(list(RESUMED), [("none", 3), ("cpu", 0), ("nvme", 3), ("cpu", 3)], 2)
)
def test_state_that_an_optimizer_brings_is_carried_over(
    name: str, start: tuple[str, int], initialize: Callable[..., Any], swap_path: Path
) -> None:
    """Trained before, then handed over, it goes on bit for bit as if nothing had happened; its memory is given back."""
    device, num_before = start
    model, plain = build_model(), build_model()
    own, reference = RESUMED[name](model.parameters()), RESUMED[name](plain.parameters())
    train_plain(model, own, range(num_before))
    train_plain(plain, reference, range(7))
    num_brought = len(own.state)
    config = settings(swap_path)
    config["zero_optimization"]["offload_optimizer"]["device"] = device
    engine, handle, _, _ = initialize(model=model, optimizer=own, config=config)
    assert own.state is handle.state
    assert len(handle.state) == num_brought
    train(engine, range(num_before, 7))
    assert_same_bits(engine.module.state_dict(), plain.state_dict())


@pytest.mark.parametrize("num_together", [0, 1])
def test_histories_may_differ(num_together: int, initialize: Callable[..., Any], swap_path: Path) -> None:
    """One layer trained alone before: inside a sub-group step counts differ, or some parameters have no state yet."""
    model, plain = build_model(), build_model()
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    own = torch.optim.Adam(model.parameters(), lr=0.01)
    for each, optimizer in ((model, own), (plain, reference)):
        train_plain(each, optimizer, range(num_together))
        each[0].requires_grad_(False)
        train_plain(each, optimizer, range(2))
        each[0].requires_grad_(True)
    train_plain(plain, reference, range(2, 5))
    config = settings(swap_path)
    del config["zero_optimization"]["sub_group_size"]  # one for all
    engine = initialize(model=model, optimizer=own, config=config)[0]
    train(engine, range(2, 5))
    assert_same_bits(engine.module.state_dict(), plain.state_dict())


def test_loaded_state_is_carried_over(initialize: Callable[..., Any], swap_path: Path) -> None:
    """The usual way to resume: load_state_dict into a fresh optimizer, then initialize."""
    model, plain = build_model(), build_model()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train_plain(plain, reference, range(3))
    model.load_state_dict(plain.state_dict())
    own = torch.optim.AdamW(model.parameters(), lr=0.5)
    own.load_state_dict(reference.state_dict())
    engine = initialize(model=model, optimizer=own, config=settings(swap_path))[0]
    train(engine, range(3, 6))
    train_plain(plain, reference, range(3, 6))
    assert_same_bits(engine.module.state_dict(), plain.state_dict())


def test_state_that_its_class_does_not_make_is_refused(initialize: Callable[..., Any], swap_path: Path) -> None:
    model = build_model()
    own = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_plain(model, own, range(1))
    own.state[model[0].weight]["extra"] = torch.zeros(16, 8)
    with pytest.raises(ModelError, match="extra"):
        initialize(model=model, optimizer=own, config=settings(swap_path))


def test_adagrad_from_the_config_makes_no_state_of_its_own(
    initialize: Callable[..., Any], swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's constructor would make it for the whole model at once, in host memory."""
    made: list[int] = []
    full_like = torch.full_like

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        made.append(tensor.numel())
        return full_like(tensor, *arguments, **options)

    plain = build_model()
    train_plain(plain, torch.optim.Adagrad(plain.parameters(), lr=0.1, initial_accumulator_value=0.25), range(4))
    monkeypatch.setattr(torch, "full_like", counted)
    adagrad = {"type": "Adagrad", "params": {"lr": 0.1, "initial_accumulator_value": 0.25}}
    engine, handle, _, _ = initialize(model=build_model(), config=settings(swap_path, optimizer=adagrad))
    assert len(handle.state) == 0
    assert max(made, default=0) <= 1
    train(engine, range(4))
    assert_same_bits(engine.module.state_dict(), plain.state_dict())


# -- the scheduler -----------------------------------------------------------------------------------------------------


def test_a_scheduler_from_the_config_is_stepped_by_the_engine(initialize: Callable[..., Any]) -> None:
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    engine, handle, _, scheduler = initialize(model=build_model(), config=settings(scheduler=section, **ADAMW))
    assert isinstance(scheduler, WarmupLR)
    rates = []
    for step in range(6):
        train(engine, range(step, step + 1))
        rates.append(engine.get_lr()[0])
    assert rates == pytest.approx([0.0, 0.025, 0.05, 0.075, 0.1, 0.1])
    assert handle.param_groups[0]["lr"] == rates[-1]


@pytest.mark.parametrize("form", ["callable", "instance"])
def test_a_scheduler_goes_before_the_configs(form: str, initialize: Callable[..., Any]) -> None:
    model = build_model()
    own = torch.optim.SGD(model.parameters(), lr=0.8)
    given = StepLR(own, 2, 0.5) if form == "instance" else lambda optimizer: StepLR(optimizer, 2, 0.5)
    section = {"scheduler": {"type": "WarmupLR"}}
    engine, handle, _, scheduler = initialize(
        model=model, optimizer=own, lr_scheduler=given, config=settings(**section)
    )
    assert isinstance(scheduler, StepLR)
    assert scheduler is engine.lr_scheduler
    assert (scheduler is given) == (form == "instance")
    train(engine, range(4))
    assert handle.param_groups[0]["lr"] == own.param_groups[0]["lr"] == 0.2


def test_a_scheduler_moves_at_boundaries_and_not_in_skipped_steps(initialize: Callable[..., Any]) -> None:
    config = settings(gradient_accumulation_steps=2, bf16={"enabled": True})
    engine, _, _, _ = initialize(
        model=build_model(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        lr_scheduler=lambda optimizer: StepLR(optimizer, 1, 0.5),
        config=config,
    )
    rates = []
    for step in range(8):
        bad = step == 3  # inside the second step
        loss = engine(batch(step).bfloat16()).float().mean() * (float("inf") if bad else 1.0)
        engine.backward(loss)
        engine.step()
        rates.append(engine.get_lr()[0])
    assert rates == [1.0, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]
    assert engine.skipped_steps == 1


# -- the data ----------------------------------------------------------------------------------------------------------


def test_training_data_becomes_a_loader_of_micro_batches(initialize: Callable[..., Any]) -> None:
    data = TensorDataset(torch.arange(80.0).view(10, 8))
    for drop_last, sizes in ((False, [4, 4, 2]), (True, [4, 4])):
        loader = initialize(
            model=build_model(), training_data=data, config=settings(dataloader_drop_last=drop_last, **ADAMW)
        )[2]
        assert isinstance(loader, DataLoader)
        assert [len(rows) for (rows,) in loader] == sizes
        assert torch.equal(next(iter(loader))[0], data[:4][0])


def test_collate_fn(initialize: Callable[..., Any]) -> None:
    loader = initialize(
        model=build_model(),
        training_data=["a", "bb", "ccc"],
        collate_fn=lambda rows: list(map(len, rows)),
        config=settings(**ADAMW),
    )[2]
    assert list(loader) == [[1, 2, 3]]


def test_without_training_data_there_is_no_loader(initialize: Callable[..., Any]) -> None:
    assert initialize(model=build_model(), config=settings(**ADAMW))[2] is None


def test_dist_init_required(initialize: Callable[..., Any]) -> None:
    """Scripts ask for their rank after initialize, as the notebook's do."""
    initialize(model=build_model(), config=settings(**ADAMW), dist_init_required=None)
    assert torch.distributed.is_initialized()
    assert torch.distributed.get_rank() == 0


# -- what is said ------------------------------------------------------------------------------------------------------


def test_the_log_is_short(initialize: Callable[..., Any], swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At most 12 lines at start, at any level, and none a step (users: log floods)."""
    caplog.set_level(logging.DEBUG)
    config = settings(swap_path, bf16={"enabled": True}, memory_breakdown=True, prescale_gradients=False, **ADAMW)
    engine = initialize(model=build_model(), config=config)[0]
    assert 1 <= len(caplog.records) <= 12
    assert {record.name.split(".")[0] for record in caplog.records} == {"tiered_zero"}
    caplog.clear()
    for step in range(20):
        engine.backward(engine(batch(step).bfloat16()).float().square().mean())
        engine.step()
    assert caplog.records == []


def test_steps_per_print(
    initialize: Callable[..., Any], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logged where a log shows it, else printed, as DeepSpeed prints it."""
    caplog.set_level(logging.INFO)
    config = settings(steps_per_print=3, gradient_accumulation_steps=2, **ADAMW)
    engine = initialize(model=build_model(), config=config)[0]
    caplog.clear()
    train(engine, range(14))
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("step 3: loss 0.")
    assert second.startswith("step 6: loss 0.")
    assert first.endswith("loss scale 1, learning rate 0.1")
    assert capsys.readouterr().out == ""
    caplog.set_level(logging.WARNING)
    train(engine, range(14, 20))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 9: loss 0.") and line.endswith("learning rate 0.1")
