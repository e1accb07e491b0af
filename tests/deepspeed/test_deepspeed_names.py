"""`import tiered_zero.deepspeed as deepspeed`: its names, and a script of DeepSpeed's documentation as it stands."""

import argparse
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
import tiered_zero.deepspeed as deepspeed
from tests.support.configs import ADAMW, SMALL_DEVICE, config_of, zero_section
from tests.support.models import rows as batch
from tiered_zero.deepspeed.utils import (
    RepeatingLoader,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tiered_zero.errors import ConfigError, MissingModuleError, MissingNameError, ModelError

pytestmark = pytest.mark.usefixtures("one_thread")

PLACEMENTS = pytest.mark.parametrize("placement", ["none", "cpu", "nvme"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def settings(swap: Path, placement: str = "none", **more: Any) -> dict[str, Any]:
    return config_of(zero_section(placement, placement, swap), **{"optimizer": ADAMW, **more})


def run_step(engine: tiered_zero.Engine, step: int = 0) -> None:
    engine.backward(engine(batch(step)).float().square().mean())
    engine.step()


SCRIPT = """
import argparse
import sys
import torch
import tiered_zero as deepspeed

def add_argument():
    parser = argparse.ArgumentParser(description="a script")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    return deepspeed.add_config_arguments(parser).parse_args()

args = add_argument()
deepspeed.init_distributed(dist_backend="nccl")
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
parameters = filter(lambda p: p.requires_grad, net.parameters())
model_engine, optimizer, trainloader, __ = deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=data
)
criterion = torch.nn.CrossEntropyLoss()
for epoch in range(args.epochs):
    for inputs, labels in trainloader:
        inputs, labels = inputs.to(model_engine.device), labels.to(model_engine.device)
        loss = criterion(model_engine(inputs), labels)
        model_engine.backward(loss)
        model_engine.step()
if deepspeed.comm.get_rank() == 0 and deepspeed.comm.is_initialized():
    deepspeed.comm.barrier()
    print("steps", model_engine.global_steps, "of", deepspeed.comm.get_world_size(), "rank")
assert "torch.distributed.checkpoint" not in sys.modules, "its import takes a second, and nothing here needs it"
"""


def test_the_script_of_the_first_page(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    zero = {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "swap"},
    }
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "zero_optimization": zero}
    config["tiered_zero"] = SMALL_DEVICE
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    command = [sys.executable, "script.py", "--deepspeed", "--deepspeed_config", "ds_config.json"]
    environment = {"PYTHONPATH": os.environ["PYTHONPATH"], "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "steps 16 of 1 rank\n"


class TestInitialize:
    def test_deepspeeds_positions(self, swap_path: Path) -> None:
        parts = deepspeed.initialize(None, Net(), None, None, None, None, 29500, None, None, None, settings(swap_path))
        assert isinstance(parts[0], deepspeed.DeepSpeedEngine)
        parts[0].close()

    def test_config_params(self, swap_path: Path) -> None:
        deepspeed.initialize(model=Net(), config_params=settings(swap_path))[0].close()
        with pytest.raises(ConfigError, match="config, config_params: expected one of the two; found both"):
            deepspeed.initialize(model=Net(), config=settings(swap_path), config_params=settings(swap_path))

    def test_the_model_in_the_first_place(self, swap_path: Path) -> None:
        text = "first positional argument is args, as in DeepSpeed; write model=..., config=..."
        with pytest.raises(ModelError, match=text):
            deepspeed.initialize(Net(), settings(swap_path))

    def test_more_ranks_are_refused(self, swap_path: Path) -> None:
        class Parallel:
            def __init__(self, size: int) -> None:
                self.size = size

            def get_model_parallel_world_size(self) -> int:
                return self.size

        model = Net()
        with pytest.raises(ModelError, match=r"initialize\(mpu=...\) asks for 2 ranks"):
            deepspeed.initialize(model=model, config=settings(swap_path), mpu=Parallel(2))
        with pytest.raises(ModelError, match=r"initialize\(mesh_param=...\) asks for 4 ranks"):
            deepspeed.initialize(model=model, config=settings(swap_path), mesh_param=(2, 2))
        deepspeed.initialize(model=model, config=settings(swap_path), mpu=Parallel(1), mesh_param=(1, 1))[0].close()


class TestNames:
    def test_dir_shows_public_names(self) -> None:
        assert dir(tiered_zero) == sorted(tiered_zero.__all__)
        for name in tiered_zero.__all__:
            assert getattr(tiered_zero, name) is not None

    def test_arguments(self) -> None:
        parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
        given = parser.parse_args(["--deepspeed", "--deepspeed_config", "c.json"])
        assert (given.deepspeed, given.deepspeed_config) == (True, "c.json")
        assert parser.parse_args([]).deepspeed_config is None

    def test_the_top_of_the_package_has_the_usual_names_too(self) -> None:
        for name in ("zero", "comm", "utils", "ops", "runtime", "checkpointing", "accelerator", "DeepSpeedEngine"):
            assert getattr(tiered_zero, name) is getattr(deepspeed, name)
        assert tiered_zero.init_distributed is deepspeed.init_distributed
        with pytest.raises(AttributeError, match=r"no attribute 'PipelineModule'; .* in tiered_zero\.deepspeed"):
            tiered_zero.PipelineModule  # noqa: B018

    def test_what_libraries_look_for(self) -> None:
        """Each import and attribute that accelerate, transformers, trl, peft and lightning make of DeepSpeed."""
        from tiered_zero.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
        from tiered_zero.deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
        from tiered_zero.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from tiered_zero.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
        from tiered_zero.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
        from tiered_zero.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
        from tiered_zero.deepspeed.runtime.zero import partition_parameters

        params = [{"params": [nn.Parameter(torch.ones(2))], "betas": (0.8, 0.9)}]  # as accelerate passes them on
        adam = DeepSpeedCPUAdam(params, lr=0.5, weight_decay=0.1, adamw_mode=False)
        assert type(adam) is torch.optim.Adam and adam.param_groups[0]["betas"] == (0.8, 0.9)
        assert type(FusedAdam(params)) is type(DeepSpeedCPUAdam(params)) is torch.optim.AdamW
        assert FusedAdam(params).defaults["weight_decay"] == 0
        assert type(DeepSpeedCPUAdagrad(params)) is torch.optim.Adagrad
        assert type(DeepSpeedCPUAdagrad(params, adamw_mode=False)) is torch.optim.Adagrad
        assert type(DeepSpeedCPULion(params, lr=0.5, adamw_mode=False)) is FusedLion
        assert issubclass(FusedLion, torch.optim.Optimizer) and issubclass(DeepSpeedOptimizer, torch.optim.Optimizer)
        with pytest.raises(ConfigError, match="bias_correction in optimizer"):
            DeepSpeedCPUAdam(params, bias_correction=False)
        assert partition_parameters.zero_wrapper_for_fp_tensor_constructor(torch.ones, torch.half) is torch.ones
        assert "WarmupDecayLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
        assert deepspeed.runtime.engine.DeepSpeedEngine is deepspeed.DeepSpeedEngine is tiered_zero.Engine
        assert clone_tensors_for_torch_save(params) is params and DEEPSPEED_ENVIRONMENT_NAME
        assert deepspeed.utils.logging.logger is deepspeed.utils.logger

    @pytest.mark.parametrize(
        ("kind", "key"), [("SGD", "momentum"), ("RMSprop", "alpha"), ("Adafactor", "d"), ("Adamax", "maximize")]
    )
    def test_groups_of_another_optimizer_are_refused(self, kind: str, key: str) -> None:
        """As Accelerate passes them on in place of the optimizer; those of Adam, and a user's own, are taken."""
        from tiered_zero.deepspeed.ops.adam import DeepSpeedCPUAdam

        params = [nn.Parameter(torch.ones(2))]
        with pytest.raises(ConfigError, match=f'found one with .*{key}, .*"zero_force_ds_cpu_optimizer": false'):
            DeepSpeedCPUAdam(getattr(torch.optim, kind)(params).param_groups, lr=0.1, adamw_mode=False)
        for betas, eps in (((0.9, 0.99), 0.0), ((0.99, 0.0), 1e-8)):  # bitsandbytes' Lion, and RMSprop
            group = {"params": params, "lr": 0.1, "betas": betas, "eps": eps, "weight_decay": 0.0}
            with pytest.raises(ConfigError, match="found one with 0 for eps or beta2"):
                DeepSpeedCPUAdam([group])
        own = [{"params": params, "name": "all", "lr_scale": 0.5}]
        made = DeepSpeedCPUAdam(torch.optim.AdamW(own, lr=0.1).param_groups)
        assert DeepSpeedCPUAdam(made.param_groups).param_groups[0]["lr_scale"] == 0.5
        assert DeepSpeedCPUAdam(own).param_groups[0]["name"] == "all"

    @pytest.mark.parametrize("name", ["init_inference", "PipelineModule", "moe", "OnDevice", "zero.TiledLinear", "x"])
    def test_what_is_not_here_says_so(self, name: str) -> None:
        place, _, attribute = name.rpartition(".")
        module = getattr(deepspeed, place) if place else deepspeed
        assert not hasattr(module, attribute)
        with pytest.raises(MissingNameError, match=f"deepspeed.{name} does not exist here: "):
            getattr(module, attribute)

    @pytest.mark.parametrize(
        ("statement", "name", "advice"),
        [
            ("import tiered_zero.deepspeed.moe.layer", "moe", "does not split"),
            ("from tiered_zero.deepspeed.moe import layer", "moe", "does not split"),
            ("from tiered_zero.deepspeed import moe; moe.layer", "moe.layer", "does not split"),
            ("from tiered_zero.deepspeed.utils import groups; groups.x", "utils.groups.x", "does not split"),
            ("from tiered_zero.deepspeed.runtime.zero.stage3 import x", "runtime.zero.stage3", "tiered-zero plan"),
            ("import tiered_zero.deepspeed.runtime.zero.config as x; x.y", "zero.config.y", "zero_optimization"),
            ("from tiered_zero.deepspeed.utils.timer import x", "utils.timer", "step_report"),
            ("from tiered_zero.deepspeed.ops.lamb import FusedLamb", "ops.lamb", "name the optimizer in the config"),
            ("from tiered_zero.deepspeed import PipelineModule; PipelineModule(1)", "PipelineModule", "does not split"),
            ("from tiered_zero.deepspeed import OnDevice\nclass A(OnDevice): ...", "OnDevice", "under torch.device"),
        ],
    )
    def test_a_module_that_is_not_here_says_so(self, statement: str, name: str, advice: str) -> None:
        with pytest.raises((MissingModuleError, MissingNameError), match=rf"deepspeed\.{name} does .*: .*{advice}"):
            exec(statement)

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="asks what a CPU answers")
    def test_the_accelerator(self) -> None:
        from tiered_zero.deepspeed.accelerator import get_accelerator

        found = get_accelerator()
        assert found is deepspeed.get_accelerator() and found.is_available()
        assert (found.device_name(), found.device_name(3), found.current_device_name()) == ("cpu", "cpu", "cpu")
        assert found.current_device() == 0 and found.communication_backend_name() == "gloo"
        found.synchronize()
        found.empty_cache()
        assert found.memory_allocated() > 0 and found.max_memory_allocated() > 0
        tensor = torch.ones(2)
        assert found.pin_memory(tensor) is tensor and found.on_accelerator(tensor)
        assert found.is_bf16_supported() and found.is_fp16_supported()
        assert found.device_count() == 1 and found.Stream is torch.cpu.Stream  # of torch's module
        with pytest.raises(
            MissingNameError, match=r"get_accelerator\(\)\.graph_replay of DeepSpeed does not exist here"
        ):
            found.graph_replay  # noqa: B018

    def test_a_name_that_nobody_has(self) -> None:
        with pytest.raises(AttributeError, match="module 'tiered_zero' has no attribute 'nothing'"):
            tiered_zero.nothing  # noqa: B018

    def test_modules_import_by_name(self) -> None:
        code = "import sys, tiered_zero; assert 'torch' not in sys.modules; from tiered_zero.deepspeed.zero import Init"
        subprocess.run([sys.executable, "-c", code], check=True)


def test_a_loader_without_end() -> None:
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert next(iter(loader)) == 2
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_line_is_logged_on_the_ranks_that_it_is_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(deepspeed.utils, "get_rank", lambda: rank)
    for ranks in (None, [-1], [0], [1], [0, 1], []):
        deepspeed.utils.log_dist(f"for {ranks}", ranks=ranks, level=30)
    assert caplog.messages == ["for None", "for [-1]", f"for [{rank}]", "for [0, 1]"]


def test_small_things() -> None:
    assert deepspeed.DeepSpeedConfigError is ConfigError


def test_leaf_modules() -> None:
    model, names = nn.Sequential(Net(), nn.ReLU()), deepspeed.utils
    net = model[0]
    assert names.set_z3_leaf_modules(model, [nn.Linear, "Net"]) == [net, net.first, net.second]
    assert names.set_z3_leaf_modules(model, [f"{Net.__module__}.Net"]) == [net]
    assert names.set_z3_leaf_modules(model, [nn.Conv1d], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="Expected modules of Conv1d, X in Sequential; found none"):
        names.set_z3_leaf_modules(model, [nn.Conv1d, "X"])


class TestZero:
    def test_init_builds_what_the_constructor_writes(self) -> None:
        with deepspeed.zero.Init(enabled=False):
            assert not torch.distributed.is_initialized()
        with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}, remote_device="cpu"):
            assert torch.distributed.get_world_size() == 1  # as scripts ask while they build
            model = Net()
        torch.distributed.destroy_process_group()
        assert torch.equal(model.first.weight, Net().first.weight)
        assert deepspeed.zero.Init(module=model, enabled=False) is not None

    @PLACEMENTS
    def test_gathered_parameters(self, placement: str, swap_path: Path) -> None:
        model = Net()
        before = model.first.weight.detach().clone()
        with deepspeed.zero.GatheredParameters(model.first.weight, modifier_rank=0), torch.no_grad():
            model.first.weight.add_(1)  # before initialize: the parameter itself
        with deepspeed.initialize(model=model, config=settings(swap_path, placement))[0] as engine:
            with deepspeed.zero.GatheredParameters([model.first.weight, None, model.first.bias]):
                assert torch.equal(model.first.weight, before + 1)
            with deepspeed.zero.GatheredParameters(model.first.weight, modifier_rank=0), torch.no_grad():
                model.first.weight.zero_()
            assert not engine.module.state_dict()["first.weight"].any()
            with deepspeed.zero.GatheredParameters(model.first.weight, enabled=False):
                pass
            with pytest.raises(ModelError, match="compile the model's blocks"):
                engine.compile(backend="inductor", compile_kwargs={})
            with pytest.raises(ModelError, match="modifier_rank: expected None or less than 1"):
                deepspeed.zero.GatheredParameters(model.first.weight, modifier_rank=1).__enter__()


class TestFullValues:
    @PLACEMENTS
    @pytest.mark.parametrize("bf16", [False, True])
    def test_masters_and_state_are_plain_pytorchs(self, placement: str, bf16: bool, swap_path: Path) -> None:
        model, plain = Net(), Net()
        if bf16:
            model.bfloat16()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0)
        config = settings(swap_path, placement, bf16={"enabled": bf16, "check_grad_overflow": False})
        with deepspeed.initialize(model=model, config=config)[0] as engine:
            assert safe_get_full_optimizer_state(model.first.weight, "exp_avg") is None
            with pytest.raises(ModelError, match="no optimizer state before its first step"):
                safe_set_full_optimizer_state(model.first.weight, torch.zeros(16, 8), "exp_avg")
            for step in range(2):
                engine.backward(engine(batch(step).to(model.first.weight.dtype)).float().square().mean())
                engine.step()
                optimizer.zero_grad()
                plain(batch(step)).square().mean().backward()
                optimizer.step()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                master, average = safe_get_full_fp32_param(ours), safe_get_full_optimizer_state(ours, "exp_avg")
                assert master is not None and average is not None
                assert (master.dtype, average.dtype) == (torch.float32, torch.float32)
                if bf16:
                    assert torch.equal(master.bfloat16(), engine.module.state_dict()[_name(model, ours)])
                else:
                    assert torch.equal(master, theirs) and torch.equal(average, optimizer.state[theirs]["exp_avg"])
            with pytest.raises(
                ModelError, match="Expected optimizer state 'exp_avg' or 'exp_avg_sq' or 'step'; found 'x'"
            ):
                safe_get_full_optimizer_state(model.first.weight, "x")

    @PLACEMENTS
    def test_what_is_set_is_trained_from(self, placement: str, swap_path: Path) -> None:
        model, plain = Net(), Net()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0)
        with deepspeed.initialize(model=model, config=settings(swap_path, placement))[0] as engine:
            for step in range(4):
                if step == 2:
                    value = torch.linspace(-1, 1, 128).view(16, 8)
                    safe_set_full_fp32_param(model.first.weight, value)
                    safe_set_full_optimizer_state(model.first.weight, value / 8, "exp_avg")
                    safe_set_full_optimizer_state(model.second.bias, torch.ones(4), "exp_avg_sq")
                    plain.first.weight.data.copy_(value)
                    optimizer.state[plain.first.weight]["exp_avg"].copy_(value / 8)
                    optimizer.state[plain.second.bias]["exp_avg_sq"].fill_(1)
                run_step(engine, step)
                optimizer.zero_grad()
                plain(batch(step)).square().mean().backward()
                optimizer.step()
            found = engine.module.state_dict()
            assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())

    @PLACEMENTS
    @pytest.mark.parametrize("bf16", [False, True])
    def test_gradients(self, placement: str, bf16: bool, swap_path: Path) -> None:
        """Read and set between backward and step(), also of an accumulation."""
        model, plain = Net(), Net()
        more = {"gradient_accumulation_steps": 2, "bf16": {"enabled": bf16}, "tiered_zero": {"update": "barrier"}}
        config = settings(swap_path, placement, **more)
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.5}}
        with deepspeed.initialize(model=model, config=config)[0] as engine:
            assert safe_get_full_grad(model.first.weight) is None
            with pytest.raises(ModelError, match="There is no gradient to set"):
                safe_set_full_grad(model.first.weight, torch.zeros(16, 8))
            dtype = torch.bfloat16 if bf16 else torch.float32
            for step in range(2):
                engine.backward(engine(batch(step).to(dtype)).float().square().mean())
                (plain(batch(step)).square().mean() / 2).backward()
                if step == 0:
                    engine.step()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                grad = safe_get_full_grad(ours)
                assert grad is not None and theirs.grad is not None and grad.dtype == torch.float32
                assert torch.allclose(grad, theirs.grad, atol=0.01) if bf16 else torch.equal(grad, theirs.grad)
            before = engine.module.state_dict()["second.bias"].float()
            safe_set_full_grad(model.second.bias, torch.ones(4))
            engine.step()
            assert safe_get_full_grad(model.second.bias) is None
            assert torch.allclose(engine.module.state_dict()["second.bias"].float(), before - 0.5, atol=0.01 * bf16)

    def test_masters_keep_what_bf16_does_not(self, swap_path: Path) -> None:
        model = Net()
        with deepspeed.initialize(model=model, config=settings(swap_path, "cpu", bf16={"enabled": True}))[0] as engine:
            value = torch.full((16, 8), 1 + 2**-12)
            safe_set_full_fp32_param(model.first.weight, value)
            master = safe_get_full_fp32_param(model.first.weight)
            assert master is not None and torch.equal(master, value)
            assert torch.equal(engine.module.state_dict()["first.weight"], torch.ones(16, 8, dtype=torch.bfloat16))

    def test_remainders(self, swap_path: Path) -> None:
        """The same masters and second moments as in fp32, whose signs carry marks."""
        found = []
        for state_format in ("fp32", "bf16_remainder"):
            model = Net().bfloat16()
            config = settings(swap_path, "cpu", bf16={"enabled": True}, tiered_zero={"state_format": state_format})
            with deepspeed.initialize(model=model, config=config)[0] as engine:
                for step in range(3):
                    engine.backward(engine(batch(step).bfloat16()).float().square().mean())
                    engine.step()
                weight = model.first.weight
                found.append([safe_get_full_fp32_param(weight), safe_get_full_optimizer_state(weight, "exp_avg_sq")])
        for left, right in zip(*found, strict=True):
            assert left is not None and right is not None and torch.equal(left, right)

    def test_of_no_engine(self, swap_path: Path) -> None:
        model = Net()
        model.second.bias.requires_grad_(False)
        assert safe_get_full_fp32_param(model.first.weight) is None
        with pytest.raises(ModelError, match="a parameter that an open engine trains"):
            safe_set_full_fp32_param(model.first.weight, torch.zeros(16, 8))
        with deepspeed.initialize(model=model, config=settings(swap_path))[0]:
            assert safe_get_full_fp32_param(model.second.bias) is None
            with pytest.raises(ModelError, match=r"second\.bias is not trained"):
                safe_set_full_fp32_param(model.second.bias, torch.zeros(4))
            with pytest.raises(ModelError, match=r"Expected shape \(16, 8\), that of first.weight; found \(3,\)"):
                safe_set_full_fp32_param(model.first.weight, torch.zeros(3))
        assert safe_get_full_fp32_param(model.first.weight) is None


def test_errors_survive_a_pickle() -> None:
    assert str(pickle.loads(pickle.dumps(MissingNameError("a name")))) == "a name"


def _name(model: nn.Module, wanted: nn.Parameter) -> str:
    return next(name for name, param in model.named_parameters() if param is wanted)
