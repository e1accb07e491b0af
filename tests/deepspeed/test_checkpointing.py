"""DeepSpeed's `checkpointing`: its names, and the bits of a model without checkpoints."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import tiered_zero as deepspeed
from tests.support.trainers import Plain, assert_same_bits, follow, tiered
from tiered_zero.deepspeed import checkpointing
from tiered_zero.deepspeed.checkpointing import checkpoint, non_reentrant_checkpoint
from tiered_zero.errors import ConfigError, MissingNameError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    yield
    checkpointing._Settings.is_configured = checkpointing._Settings.checkpoint_in_cpu = False


def test_names_and_arguments_are_deepspeeds() -> None:
    assert deepspeed.checkpointing is checkpointing
    assert checkpoint is checkpointing.checkpoint
    assert (
        list(inspect.signature(deepspeed.checkpointing.configure).parameters)
        == (
            "mpu_ deepspeed_config partition_activations contiguous_checkpointing num_checkpoints checkpoint_in_cpu "
            "synchronize profile"
        ).split()
    )
    for name in checkpointing.__all__:
        assert callable(getattr(deepspeed.checkpointing, name))


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class Split(nn.Module):
    """Blocks that draw random numbers. `run`: calls each."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor, layer: nn.Module) -> list[Tensor]:
            x = dropout(x, 0.3)
            return [dropout(layer(x).tanh(), 0.3), x]

        for layer in self.blocks:
            y, kept = self._run(block, x, layer)
            x = y + kept
        return x.square().mean()


def train(trainer: Any) -> list[Any]:
    torch.manual_seed(5)
    seen = []
    for number in range(2):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).requires_grad_()
        loss = trainer(x)
        trainer.backward(loss)
        trainer.step()
        seen += [loss.detach(), x.grad, torch.rand(1)]
    return seen


@pytest.mark.parametrize("run", [checkpoint, non_reentrant_checkpoint])
def test_recomputation_draws_what_forward_drew(run: Callable[..., Any], swap_path: Path) -> None:
    """In plain PyTorch, configured to offload and to watch, and in an engine that moves what checkpoints save."""
    expected = follow(train, Plain(Split(call)))
    assert_same_bits(expected, follow(train, Plain(Split(run))))
    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True, synchronize=True, profile=True)
    assert_same_bits(expected, follow(train, Plain(Split(run))))
    moved = {"device": "nvme", "nvme_path": str(swap_path), "limit": "1MiB", "min_nbytes": 64}
    engine = tiered(Split(run), swap_path, ("cpu", "cpu"), runtime={"activations": moved})
    assert_same_bits(expected, follow(train, engine))


def test_keyword_tensors_get_gradients_and_one_output_is_no_tuple() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    out = checkpoint(lambda x, *, y, factor: (x * y * factor,), x, y=y, factor=3)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert x.grad is not None and y.grad is not None
    assert (x.grad.tolist(), y.grad.tolist()) == ([6.0] * 3, [3.0] * 3)


def test_configure_reads_a_config_and_arguments_go_before_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    section = {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4, "profile": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"train_batch_size": 4, "activation_checkpointing": section}))
    assert not deepspeed.checkpointing.is_configured()
    for config in (json.loads(path.read_text()), str(path)):
        deepspeed.checkpointing.configure(None, config, profile=True, synchronize=True)
        assert checkpointing._Settings.checkpoint_in_cpu
    assert deepspeed.checkpointing.is_configured()
    assert any("partition_activations has no effect" in line for line in caplog.messages)
    deepspeed.checkpointing.configure(None, deepspeed.load_config(path))
    with pytest.raises(ConfigError, match="expected a path, an object"):
        deepspeed.checkpointing.configure(None, 7)
    deepspeed.checkpointing.set_num_layers(3)
    deepspeed.checkpointing.partition_activations_in_checkpoint(False)
    deepspeed.checkpointing.reset()


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"partition_activation": True},
            "partition_activation: unknown key. Did you mean activation_checkpointing.partition_activations",
        ),
        (
            {"cpu_checkpointing": "perhaps"},
            "cpu_checkpointing: expected a valid boolean, unable to interpret input; found 'perhaps'",
        ),
        (True, ": expected an object; found True"),
    ],
)
def test_configure_refuses_what_it_would_pass_over(section: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deepspeed.checkpointing.configure(None, {"activation_checkpointing": section})
    assert expected in str(caught.value)
    deepspeed.checkpointing.configure(None, {"activation_checkpointing": {"_note": 1, "cpu_checkpointing": "auto"}})


@pytest.mark.parametrize("name", ["get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"])
def test_names_for_models_that_are_split_over_ranks_are_refused(name: str) -> None:
    with pytest.raises(MissingNameError, match=rf"deepspeed\.checkpointing\.{name} .* does not split a model"):
        getattr(checkpointing, name)(3)
