"""What ends a run of many ranks, and what is refused before it begins: by name, on every rank, with nothing left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.ranks.pool import RankPool
from tests.ranks.training import Case, begin_run, build_model, make_optimizer, micro_batches, rank_and_config
from tiered_zero.errors import EngineFailedError, RankError


def raise_in_forward(path: str) -> list[str]:
    """Rank 1's forward raises in the second step, while rank 0 goes on to its step()."""
    rank, _, engine = begin_run(path)
    heard = []
    try:
        for step in range(3):
            (tokens, targets) = micro_batches(Case(), step, rank, 2)[0]
            if step == 1 and rank == 1:
                tokens = tokens + 1000  # outside of the vocabulary
            engine.backward(engine(tokens, targets))
            engine.step()
    except Exception as error:
        heard.append(f"{type(error).__name__}: {error}")
        with pytest.raises(EngineFailedError, match="all ranks"):
            engine.step()
    finally:
        engine.close()
    return heard


def test_an_exception_on_one_rank_ends_the_run_on_all(ranks: RankPool, swap_path: Path) -> None:
    [first], [second] = ranks.run(raise_in_forward, 2, str(swap_path))
    assert second.startswith("IndexError")
    assert first.startswith("RankError: Rank 1 failed, which ends the run on all 2 ranks: IndexError")
    assert not any(swap_path.iterdir())


def raise_in_backward(path: str) -> list[str]:
    """Rank 1's backward raises in the second step, at the first layer: the other's buckets are under way by then."""
    rank, model, engine = begin_run(path, stage=2, reduce_bucket_size=4096)
    heard = []

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("no gradient of this rank")

    try:
        for step in range(3):
            if step == 1 and rank == 1:
                model.get_parameter("blocks.0.norm.weight").register_hook(fail)
            engine.backward(engine(*micro_batches(Case(), step, rank, 2)[0]))
            engine.step()
    except Exception as error:
        heard.append(f"{type(error).__name__}: {error}")
        with pytest.raises(EngineFailedError, match="all ranks"):
            engine.step()
    finally:
        engine.close()
    return heard


def test_an_exception_in_one_backward_ends_the_reductions_of_all(ranks: RankPool, swap_path: Path) -> None:
    [first], [second] = ranks.run(raise_in_backward, 2, str(swap_path))
    assert second == "ValueError: no gradient of this rank"
    assert first.startswith("RankError: Rank 1 failed, which ends the run on all 2 ranks: ValueError: no gradient")
    assert not any(swap_path.iterdir())


def make_fewer_steps(path: str, stage: int) -> list[str]:
    """Rank 1 has the data of two steps, rank 0 of three."""
    rank, _, engine = begin_run(path, stage=stage)
    heard = []
    try:
        for step in range(3 - rank):
            engine.backward(engine(*micro_batches(Case(), step, rank, 2)[0]))
            engine.step()
    except RankError as error:
        heard.append(str(error))
    finally:
        engine.close()
    return heard


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_with_fewer_steps_is_told_to_drop_the_last_ones_or_to_pad(
    ranks: RankPool, swap_path: Path, stage: int
) -> None:
    [first], second = ranks.run(make_fewer_steps, 2, str(swap_path), stage)
    assert second == []
    assert "closed its engine, or ended" in first
    assert "every rank makes the same number of steps; drop the last, or pad" in first


class Fails(torch.autograd.Function):
    """Its backward has no room."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise MemoryError("no room for a gradient")


class Fragile(nn.Sequential):
    """`fails`: "forward" or "backward", half way."""

    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self):
            x = layer(x)
            if number == 3 and self.fails == "backward":
                x = Fails.apply(x)
            elif number == 3 and self.fails == "forward":
                raise MemoryError("no room for an activation")
        return x.square().mean()


def skip_a_batch(path: str, stage: int, fails: str, asks: str) -> list[str]:
    """Rank 1 catches what its own second pass raises, and goes on with the next batch. `asks`: when it next calls the
    engine: "then", or "at once" in its handler. Returns what each rank has heard."""
    rank, config = rank_and_config(path, stage=stage, offload_optimizer={"device": "none"}, reduce_bucket_size=4096)
    torch.manual_seed(5)
    model = Fragile(*(nn.Linear(64, 64) for _ in range(6)))
    engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "sgd"), config=config)
    heard = []
    start_s = time.monotonic()
    try:
        for step in range(4):
            model.fails = fails if rank == 1 and step == 1 else ""
            try:
                loss = (model if fails == "forward" else engine)(torch.ones(5, 64))
                loss.backward()
            except MemoryError as error:
                heard.append(f"{type(error).__name__}: {error}")
                if asks == "at once":
                    engine.zero_grad()
                continue
            engine.step()
    except Exception as error:
        heard.append(f"{type(error).__name__}: {error}")
        with pytest.raises(EngineFailedError, match="all ranks"):
            engine.step()
    finally:
        engine.close()
    assert time.monotonic() - start_s < config["tiered_zero"]["comm_timeout_s"], "nothing waited for the timeout"
    return heard


@pytest.mark.parametrize(
    ("stage", "fails", "asks"),
    [(2, "backward", "then"), (2, "backward", "at once"), (3, "backward", "then"), (3, "forward", "then")],
)
def test_a_caught_exception_past_the_engine_ends_the_run_on_all(
    ranks: RankPool, swap_path: Path, stage: int, fails: str, asks: str
) -> None:
    [first], [caught, refused] = ranks.run(skip_a_batch, 2, str(swap_path), stage, fails, asks)
    assert caught.startswith("MemoryError")
    why = caught if fails == "forward" else "an exception that its program has caught"
    assert why in refused
    assert f"Rank 1 failed, which ends the run on all 2 ranks: its {fails} past the engine was ended by {why}" in first


def never_call_again(path: str) -> str:
    """Rank 1 catches what its own second forward raises, and waits for rank 0 to hear of it. What rank 0 hears."""
    rank, config = rank_and_config(path, stage=3, offload_optimizer={"device": "none"}, reduce_bucket_size=4096)
    torch.manual_seed(5)
    model = Fragile(*(nn.Linear(64, 64) for _ in range(6)))
    engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "sgd"), config=config)
    heard = Path(f"{path}.heard")
    start_s = time.monotonic()
    text = ""
    try:
        for step in range(4):
            model.fails = "forward" if rank == 1 and step == 1 else ""
            model(torch.ones(5, 64)).backward()
            engine.step()
    except MemoryError:
        while not heard.exists() and time.monotonic() - start_s < config["tiered_zero"]["comm_timeout_s"]:
            time.sleep(0.05)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        heard.touch()
    finally:
        with suppress(EngineFailedError):
            engine.close()
    return text


def test_others_hear_of_a_caught_exception_though_its_rank_calls_nothing_more(ranks: RankPool, swap_path: Path) -> None:
    """Of a forward, whose end a hook sees; of a backward that its program ends nothing tells before the next call."""
    text, _ = ranks.run(never_call_again, 2, str(swap_path))
    assert text.startswith(
        "RankError: Rank 1 failed, which ends the run on all 2 ranks: its forward past the engine was ended by "
        "MemoryError: no room for an activation"
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_with_whole_gradients_may_skip_a_batch(ranks: RankPool, swap_path: Path, stage: int) -> None:
    """No other rank waits for its backward. Both then make three steps."""
    outcomes = ranks.outcomes(skip_a_batch, 2, str(swap_path), stage, "backward", "then")
    assert outcomes[1].value == ["MemoryError: no room for a gradient"]
    assert "Rank 1 has closed its engine, or ended" in outcomes[0].value[0]


def leave_a_step_out(path: str, how: str, stage: int = 1) -> str:
    """Rank 0 makes three steps, rank 1 two: it closes its engine, or makes a step() that rank 0 does not."""
    rank, _, engine = begin_run(path, stage=stage)
    try:
        for step in range(3):
            if step == 2 and rank == 1 and how == "close":
                break
            if step == 2 and rank == 1:
                engine.set_gradient_accumulation_boundary(False)
                engine.step()
                engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(*micro_batches(Case(), step, rank, 2)[0]))
            engine.step()
    except RankError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_ranks_at_different_steps_are_found(ranks: RankPool, swap_path: Path) -> None:
    for text in ranks.run(leave_a_step_out, 2, str(swap_path), "skip"):
        assert "rank 0 is at step 2, micro-batch 3, rank 1 is at step 2, micro-batch 4" in text


def test_a_rank_that_closes_early_is_named(ranks: RankPool, swap_path: Path) -> None:
    first, second = ranks.run(leave_a_step_out, 2, str(swap_path), "close")
    assert "Rank 1 has closed its engine, or ended, while others go on with control of backward 1 after step 2" in first
    assert second == ""


def test_a_rank_that_closes_while_another_gathers_is_named(ranks: RankPool, swap_path: Path) -> None:
    first, second = ranks.run(leave_a_step_out, 2, str(swap_path), "close", 3)
    assert "Rank 1 has closed its engine, or ended, while others go on with all_gather of unit " in first
    assert second == ""


def train_at_own_rate(path: str, stage: int) -> str:
    """Rank 1 changes a learning rate alone after its second step, as a scheduler does that follows its own loss."""
    rank, _, engine = begin_run(path, stage=stage)
    try:
        for step in range(4):
            engine.backward(engine(*micro_batches(Case(), step, rank, 2)[0]))
            engine.step()
            if step == 1 and rank == 1:
                engine.optimizer.param_groups[0]["lr"] = 0.5
    except RankError as error:
        return f"{engine.global_steps}: {error}"
    finally:
        with suppress(EngineFailedError):
            engine.close()
    return ""


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_learning_rate_of_one_rank_alone_is_named(ranks: RankPool, swap_path: Path, stage: int) -> None:
    for text in ranks.run(train_at_own_rate, 2, str(swap_path), stage):
        assert text.startswith("2: ") and "lr of group 0 is 0.003 on rank 0, 0.5 on rank 1. Set it alike" in text


SAME = "RankError: All ranks must have the same "


def changed(change: Callable[[Any], object]) -> Callable[[nn.Module], nn.Module]:
    def act(model: nn.Module) -> nn.Module:
        change(model)
        return model

    return act


MODELS = {
    "name": lambda model: nn.Sequential(model, nn.Linear(2, 2)),
    "shape": changed(lambda model: setattr(model.norm, "weight", nn.Parameter(torch.ones(31)))),
    "flag": changed(lambda model: model.head.weight.requires_grad_(False)),
    "dtype": changed(lambda model: setattr(model.norm, "bias", nn.Parameter(model.norm.bias.bfloat16()))),
    "tied": changed(lambda model: setattr(model.norm, "bias", model.norm.weight)),
    "buffer": changed(lambda model: model.register_buffer("steps", torch.zeros(3))),
}
"""What rank 1 makes of its model."""


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(1 << 60))


def initialize(path: str, change: str) -> str:
    """What `initialize` raises on this rank."""
    rank, config = rank_and_config(path)
    model: nn.Module = build_model(rank)
    optimizer = make_optimizer(model, "adafactor" if change == "rule" else "adamw")
    data: Any = None
    if change in MODELS and rank == 1:
        model = MODELS[change](model)
        optimizer = make_optimizer(model, "adamw")
    elif change == "groups" and rank == 1:
        optimizer = make_optimizer(model, "groups")
    elif change == "config" and rank == 1:
        config["gradient_clipping"] = 2.0
    elif change == "format" and rank == 1:
        config["tiered_zero"]["state_format"] = "lossy_bf16_moments"
    elif change == "room":
        config["tiered_zero"]["host_memory_limit"] = 1000 if rank == 1 else 2000
    elif change == "paths":
        (Path(path) / str(rank)).mkdir()
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = f"{path}/{rank}"
    elif change == "error" and rank == 1:
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = path + "/missing/\0"
    elif change == "rule":
        config["zero_optimization"]["stage"] = 3
    elif change == "delay":
        config["zero_optimization"]["stage"] = 0
        config["tiered_zero"] |= {"update": "delayed", "delay_start_step": 5 * rank}
    elif change == "delayed":
        config["tiered_zero"]["update"] = "delayed"
    elif change == "resume":
        config["tiered_zero"]["checkpoint"] = {change: path + "/missing"}
    elif change == "communication":
        config["communication_data_type"] = "int8"
    elif change == "data":
        data = Endless()
    elif change == "batch":
        config["train_batch_size"] = 2
    try:
        tiered_zero.initialize(model=model, optimizer=optimizer, config=config, training_data=data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("delayed", "ModelError: tiered_zero.update: expected auto or barrier at stage 1 with 2 ranks"),
        ("resume", "StoreError: "),
        ("communication", "ConfigError: communication_data_type: "),
        ("rule", "ModelError: Adafactor steps whole parameters, and at stage 3 each of 2 ranks has a part"),
        ("batch", "ConfigError: train_batch_size: expected train_micro_batch_size_per_gpu x "),
        ("name", SAME + "parameters; found scale {"),
        ("shape", SAME + "parameters; found shape of norm.weight [32] on rank 0, [31] on rank 1."),
        ("flag", SAME + "parameters; found requires_grad of tokens.weight true on rank 0, false on rank 1."),
        ("dtype", SAME + 'parameters; found dtype of norm.bias "torch.float32" on rank 0, "torch.bfloat16" on rank 1'),
        ("tied", SAME + "parameters; found norm.bias {"),
        ("buffer", SAME + "buffers; found steps nothing on rank 0, {"),
        ("groups", SAME + "param groups; found"),
        ("config", SAME + "gradient_clipping; found 0.0 on rank 0, 2.0 on rank 1."),
        ("format", SAME + 'tiered_zero.state_format; found "fp32" on rank 0, "lossy_bf16_moments" on rank 1.'),
        ("delay", SAME + "tiered_zero.delay_start_step; found 0 on rank 0, 5 on rank 1."),
        ("room", "PlanError: The plan needs "),
        ("data", "ModelError: training_data: expected a dataset with an index, which is split over 2 ranks"),
    ],
)
def test_what_many_ranks_do_not_do_is_refused_on_each(ranks: RankPool, swap_path: Path, change: str, text: str) -> None:
    for found in ranks.run(initialize, 2, str(swap_path), change):
        assert found.startswith(text), found
    assert not any(swap_path.iterdir())


def test_each_rank_may_have_a_disk_of_its_own(ranks: RankPool, swap_path: Path) -> None:
    assert ranks.run(initialize, 2, str(swap_path), "paths") == ["nothing", "nothing"]
    assert [list(path.iterdir()) for path in swap_path.iterdir()] == [[], []]


def refuse_grad(path: str) -> str:
    rank, model, engine = begin_run(path)
    engine.backward(engine(*micro_batches(Case(), 0, rank, 2)[0]))
    with pytest.raises(tiered_zero.errors.ModelError) as refused:
        _ = model.head.weight.grad
    engine.close()
    return str(refused.value)


def test_gradients_of_one_rank_are_not_shown(ranks: RankPool, swap_path: Path) -> None:
    for found in ranks.run(refuse_grad, 2, str(swap_path)):
        assert "averages the gradients of all ranks" in found
