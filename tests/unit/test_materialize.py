"""A model that is built on the meta device gets the values that it would have got on the CPU, unit by unit."""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tiered_zero
from tests.support.configs import SMALL_DEVICE
from tests.support.forked import run_forked
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.errors import ModelError
from tiered_zero.plan.gpt_shape import GPTConfig

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("one_thread")


def settings(**runtime: Any) -> dict[str, Any]:
    host = {"device": "cpu"}
    zero = {"stage": 3, "offload_param": host, "offload_optimizer": host, "stage3_param_persistence_threshold": 0}
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    return {
        "train_batch_size": 4,
        "optimizer": adam,
        "zero_optimization": zero,
        "tiered_zero": {**SMALL_DEVICE, **runtime},
    }


def initialized(model: nn.Module, **runtime: Any) -> dict[str, Tensor]:
    """The model's state_dict after its birth."""
    with tiered_zero.initialize(model=model, config=settings(**runtime))[0] as engine:
        return dict(engine.module.state_dict())


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, and the same distribution of each: constants are equal, and means and deviations of random draws
    agree within 5 and 8 times sigma / sqrt(n). (A deviation's own error is sigma / sqrt(2n) or less.)"""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        ours = found[name]
        assert (ours.shape, ours.dtype, ours.device.type) == (value.shape, value.dtype, "cpu"), name
        if value.numel() < 2 or not value.is_floating_point() or value.std() == 0:
            assert torch.equal(ours, value), name
            continue
        sigma, num = value.double().std().item(), value.numel()
        assert abs(ours.double().mean() - value.double().mean()) < 5 * sigma * math.sqrt(2 / num), name
        assert abs(ours.double().std() - sigma) < 8 * sigma * math.sqrt(1 / num), name
        assert ours.abs().max() < 2 * value.abs().max(), name


# -- from initialisers -------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The head is met before the embedding that it is tied to."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 64, bias=False)
        self.tokens = nn.Embedding(64, 32)
        self.tokens.weight = self.head.weight


class Owner(nn.Module):
    """A parameter, a buffer and children of its own; its word on a child's weight is the last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(7))
        self.register_buffer("table", torch.empty(5))
        self.register_buffer("count", torch.empty((), dtype=torch.int64), persistent=False)
        self.child = nn.Linear(64, 64)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 3.0)
        self.table.copy_(torch.arange(5.0))
        self.count = torch.tensor(4)
        nn.init.normal_(self.child.weight, std=5.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


class Rotary(nn.Module):
    """Buffers and no parameters, as rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.frequency = 1.0 / (10000 ** (torch.arange(4) / 4))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # seconds, in each process that collects tests

    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def demo() -> nn.Module:
    return build_gpt(GPTConfig(layers=3, hidden=64, vocab=256, context=64), "cpu")


def demo_on_meta() -> nn.Module:
    return build_gpt(GPTConfig(layers=3, hidden=64, vocab=256, context=64))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": gpt2,
    "linear, convolution, norms": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.GroupNorm(2, 16), nn.PReLU(), nn.Linear(64, 64), nn.LayerNorm(64)
    ),
    "attention": lambda: nn.Sequential(nn.TransformerEncoderLayer(64, 2, 128), nn.MultiheadAttention(64, 2)),
    "an owner with a child": lambda: nn.Sequential(Owner(), nn.Linear(64, 64)),
    "tied, head first": Tied,
    "recurrent": lambda: nn.LSTM(32, 64, num_layers=2),
}


@pytest.mark.parametrize("cap", [None, 1], ids=["units as found", "a unit a module"])
@pytest.mark.parametrize("name", [*MODELS, "the demo's GPT"])
def test_values_are_distributed_as_on_the_cpu(name: str, cap: int | None) -> None:
    torch.manual_seed(1)
    expected = dict((demo() if name == "the demo's GPT" else MODELS[name]()).state_dict())
    model = demo_on_meta() if name == "the demo's GPT" else on_meta(MODELS[name])
    torch.manual_seed(2)
    assert_alike(initialized(model, unit_size_cap=cap), expected)


def test_a_parents_word_on_its_child_is_the_last() -> None:
    """GPT-2 scales the projections into its residual stream, in _init_weights of the module around them."""
    found = initialized(on_meta(gpt2), unit_size_cap=1)
    assert found["transformer.h.1.attn.c_attn.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert found["transformer.h.1.attn.c_proj.weight"].std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.05)
    assert found["transformer.h.1.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.05)


@pytest.mark.parametrize("build", [Tied, gpt2], ids=["head first", "GPT-2"])
def test_ties_are_kept(build: Callable[[], nn.Module]) -> None:
    model = on_meta(build)
    params = list(model.parameters())
    with tiered_zero.initialize(model=model, config=settings())[0] as engine:
        assert [id(param) for param in engine.module.parameters()] == [id(param) for param in params]
        head, tokens = (model.head, model.tokens) if isinstance(model, Tied) else (model.lm_head, model.transformer.wte)
        assert head.weight is tokens.weight
        state = engine.module.state_dict()
        names = [name for name in state if name.endswith(("head.weight", "tokens.weight", "wte.weight"))]
        assert len(names) == 2
        assert state[names[0]].data_ptr() == state[names[1]].data_ptr()


class Recurrent(nn.Module):
    """Called as GPT-2 is. An LSTM keeps weak references to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 16)
        self.lstm = nn.LSTM(16, 32, num_layers=2)
        self.lm_head = nn.Linear(32, 256)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.lstm(self.tokens(input_ids))[0])
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize("build", [gpt2, Recurrent])
def test_a_model_so_initialized_trains_to_the_bit_like_one_with_its_values(build: Callable[[], nn.Module]) -> None:
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    weights = []
    first: dict[str, Tensor] = {}
    for model in (on_meta(build), build()):
        if first:
            model.load_state_dict(first)
        model.eval()  # no dropout
        with tiered_zero.initialize(model=model, config=settings())[0] as engine:
            first = first or dict(engine.module.state_dict())
            for _ in range(2):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
            weights.append(dict(engine.module.state_dict()))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert not torch.equal(first["lm_head.weight"], weights[0]["lm_head.weight"])


def test_buffers_without_parameters_are_filled() -> None:
    model = on_meta(lambda: nn.Sequential(Rotary(), nn.Linear(4, 4)))
    initialized(model)
    assert torch.equal(model[0].frequency, Rotary().frequency)


def test_what_has_values_keeps_them() -> None:
    """A model of which only a part is on meta: the other is not initialised again."""
    known = nn.Linear(4, 4)
    expected = known.weight.detach().clone()
    model = nn.Sequential(known, on_meta(lambda: nn.Linear(4, 4)), nn.BatchNorm1d(4))
    model[2].running_mean.fill_(7.0)
    found = initialized(model)
    assert torch.equal(found["0.weight"], expected)
    assert torch.equal(found["2.running_mean"], torch.full((4,), 7.0))
    assert found["1.weight"].abs().max() <= 0.5


class Mixed(nn.Module):
    """One unit: a part with trained values, and one on meta, whose initialiser would reset all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        nn.init.constant_(self.norm.weight, 5.0)
        self.norm.running_mean.fill_(7.0)
        self.last = on_meta(lambda: nn.Linear(4, 4))

    def reset_parameters(self) -> None:
        self.norm.reset_parameters()
        self.last.reset_parameters()


def test_what_has_values_keeps_them_inside_a_unit_too() -> None:
    found = initialized(Mixed(), unit_size_cap=1 << 20)
    assert found["norm.weight"].tolist() == [5.0] * 4
    assert found["norm.running_mean"].tolist() == [7.0] * 4
    assert 0 < found["last.weight"].abs().max() <= 0.5


def test_a_model_with_values_is_never_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for kind in (nn.Linear, nn.LayerNorm):
        monkeypatch.setattr(kind, "reset_parameters", lambda self: pytest.fail("initialised"))
    assert all(torch.equal(value, expected[name]) for name, value in initialized(model).items())


def test_what_users_note_on_parameters_stays() -> None:
    model = on_meta(lambda: nn.Linear(4, 4))
    model.weight.no_decay = True
    initialized(model)
    assert model.weight.no_decay is True


@pytest.mark.parametrize("placement", ["none", "cpu"])
def test_sixteen_bit_parameters_round_an_exact_master(placement: str) -> None:
    """First values are made in the model's own dtype; the master is that, the parameter its rounding."""
    config = settings()
    config["bf16"] = {"enabled": True}
    config["zero_optimization"]["offload_param"] = {"device": placement}
    torch.manual_seed(3)
    with tiered_zero.initialize(model=on_meta(lambda: nn.Linear(64, 64)), config=config)[0] as engine:
        assert engine.module.state_dict()["weight"].dtype == torch.bfloat16
        rounded = dict(engine.module.state_dict())
    torch.manual_seed(3)
    exact = initialized(on_meta(lambda: nn.Linear(64, 64)))
    assert torch.equal(rounded["weight"], exact["weight"].bfloat16())
    assert not torch.equal(rounded["weight"].float(), exact["weight"])


# -- refusals ----------------------------------------------------------------------------------------------------------


class Forgotten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.child = nn.Linear(3, 3)


class AlmostForgotten(Forgotten):
    def reset_parameters(self) -> None:
        """Sets nothing."""


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3))


class Viewed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        with torch.no_grad():
            self.flat = self.weight.view(-1)


class Squared(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.square = self.weight * self.weight


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a parameter without an initialiser": (Forgotten, r"_init_weights\(module\): scale\. Set it in one of them"),
    "an initialiser that forgets it": (lambda: nn.Sequential(AlmostForgotten()), r": 0\.scale\. Set it"),
    "a buffer that nothing fills": (Masked, r": mask\. .*build it on the CPU \(under torch\.device\('cpu'\)\)"),
    "a parametrization": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))),
        r": 0\.parametrizations\.weight\.original0, 0\.parametrizations\.weight\.original1\.",
    ),
    "a parameter that somebody views": (Viewed, r"weight was built on the meta device and cannot be given memory"),
    "a parameter that a graph holds": (Squared, r"weight was built on the meta device and cannot be given memory"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("no_leaks")
def test_what_nothing_sets_is_refused_by_name(name: str) -> None:
    build, text = REFUSED[name]
    with pytest.raises(ModelError, match=text):
        tiered_zero.initialize(model=on_meta(build), config=settings())


# -- from files --------------------------------------------------------------------------------------------------------


def saved(model: nn.Module, path: Path, names: Callable[[str], bool] = lambda name: True) -> str:
    """The tensors of a model, each storage once, as Hugging Face files have them."""
    state = model.state_dict()
    unique: dict[int, str] = {}
    for name, value in state.items():
        unique.setdefault(value.data_ptr(), name)
    save_file({name: state[name].contiguous() for name in unique.values() if names(name)}, path)
    return str(path)


def test_exact_values_from_several_files(tmp_path: Path) -> None:
    source = gpt2()
    parts = [
        saved(source, tmp_path / "1.safetensors", lambda name: ".h." in name),
        saved(source, tmp_path / "2.safetensors", lambda name: ".h." not in name),
    ]
    found = initialized(on_meta(gpt2), weights=parts)
    assert found.keys() == source.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in source.state_dict().items())


def test_a_directory_and_an_index_mean_the_files_of_a_model(tmp_path: Path) -> None:
    source = gpt2()
    source.save_pretrained(tmp_path / "parts", max_shard_size="60KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    source.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "other.safetensors").write_bytes(b"of another program")
    for path in ("parts", "parts/model.safetensors.index.json", "whole"):
        found = initialized(on_meta(gpt2), weights=[str(tmp_path / path)])
        assert all(torch.equal(found[name], value) for name, value in source.state_dict().items())


@pytest.mark.parametrize(
    ("files", "path", "text"),
    [
        (["a.safetensors", "b.safetensors"], "", "expected an index .* found a.safetensors, b.safetensors. Name"),
        (["pytorch_model.bin"], "", "found pytorch_model.bin; .* are pickles, which are not read"),
        ([], "", "found nothing"),
        (["x.safetensors.index.json"], "", r'expected {"weight_map": {tensor: file}} in .*x.safetensors.index.json'),
        ([], "absent.safetensors", "absent.safetensors cannot be read as safetensors .* Name safetensors files"),
    ],
)
def test_a_directory_that_does_not_say_its_files_is_refused(
    files: list[str], path: str, text: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_text("[]")
    with pytest.raises(ModelError, match=text):
        initialized(on_meta(gpt2), weights=str(tmp_path / path))


def test_a_path_that_cannot_be_looked_into_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name longer than names may be, and a directory of another user."""

    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    for path in ("x" * 300, str(tmp_path)):
        with pytest.raises(ModelError, match=rf"tiered_zero\.weights: {path} cannot be read \(.*\)\. Name a"):
            initialized(on_meta(gpt2), weights=path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_fifo_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name}.* is no file; expected a file"):
        initialized(on_meta(gpt2), weights=str(tmp_path))


@pytest.mark.parametrize("kind", ["nested", "huge", "name"])
def test_an_index_that_no_model_has_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text("[" * 100_000 if kind == "nested" else json.dumps({"weight_map": {"a": "x" * 5000}}))
    if kind == "huge":
        os.truncate(path, 1 << 40)
    with pytest.raises(ModelError, match=f"expected .* in {path}; .*Name the files themselves"):
        initialized(on_meta(gpt2), weights=str(tmp_path))


def test_a_file_that_an_index_names_is_expected_beside_it(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path, max_shard_size="60KB")
    first = min(tmp_path.glob("*.safetensors"))
    first.unlink()
    with pytest.raises(ModelError, match=f"{first.name} is not beside it, of 1 that are missing"):
        initialized(on_meta(gpt2), weights=str(tmp_path))


@pytest.mark.parametrize("is_absolute", [True, False])
def test_an_index_names_no_file_outside_of_its_directory(is_absolute: bool, tmp_path: Path) -> None:
    path = saved(nn.Linear(4, 4), tmp_path / "elsewhere.safetensors")
    (tmp_path / "model").mkdir()
    named = str(path) if is_absolute else "../elsewhere.safetensors"
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": named, "bias": named}}))
    with pytest.raises(ModelError, match=f"{named} is not in its directory. Name the files themselves"):
        initialized(on_meta(lambda: nn.Linear(4, 4)), weights=str(index.parent))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_only_floats_are_converted_to_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    model = on_meta(lambda: nn.Linear(4, 4, dtype=torch.bfloat16))
    path = tmp_path / "file.safetensors"
    save_file({"weight": torch.ones(4, 4).to(dtype), "bias": torch.ones(4, dtype=torch.float64)}, path)
    with pytest.raises(ModelError, match=rf"expected weight as torch.bfloat16, .* found {dtype}\. .* dequantized"):
        initialized(model, weights=str(path))
    save_file({"weight": torch.ones(4, 4, dtype=torch.float16), "bias": torch.ones(4, dtype=torch.float64)}, path)
    assert all((value == 1).all() for value in initialized(model, weights=str(path)).values())


def test_a_file_may_name_a_tied_weight_either_way(tmp_path: Path) -> None:
    value = torch.randn(64, 32)
    for name in ("head.weight", "tokens.weight"):
        save_file({name: value}, tmp_path / "file.safetensors")
        found = initialized(on_meta(Tied), weights=str(tmp_path / "file.safetensors"))
        assert torch.equal(found["head.weight"], value)
        assert torch.equal(found["tokens.weight"], value)


def test_buffers_come_from_files_too(tmp_path: Path) -> None:
    """Trained statistics; what files never have (the buffer that is not persistent) comes from the initialiser."""
    source = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Owner())
    source[1](torch.randn(8, 4))
    source[2].table.fill_(9.0)
    path = saved(source, tmp_path / "file.safetensors")
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Owner()))
    found = initialized(model, weights=path)
    assert all(torch.equal(found[name], value) for name, value in source.state_dict().items())
    assert found["1.num_batches_tracked"] == 1
    assert model[2].count == 4


def test_values_are_rounded_to_the_models_dtype(tmp_path: Path) -> None:
    source = nn.Linear(8, 8)
    path = saved(source, tmp_path / "file.safetensors")
    found = initialized(on_meta(lambda: nn.Linear(8, 8, dtype=torch.bfloat16)), weights=path)
    assert torch.equal(found["weight"], source.weight.bfloat16())
    path = saved(source.bfloat16(), tmp_path / "file.safetensors")
    found = initialized(on_meta(lambda: nn.Linear(8, 8)), weights=path)
    assert torch.equal(found["weight"], source.weight.float())


@pytest.mark.usefixtures("no_leaks")
def test_files_that_do_not_fit_are_refused_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    whole = saved(gpt2(), tmp_path / "whole.safetensors")
    partly = saved(gpt2(), tmp_path / "partly.safetensors", lambda name: ".h.1." not in name)
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(3, 4), "bias": torch.zeros(4)}, other)
    (tmp_path / "broken.safetensors").write_bytes(b"no such thing")
    for model, path, text in (
        (on_meta(gpt2), partly, r"found none for transformer\.h\.1\.ln_1\.weight, .* and 7 more\. Name the file"),
        (
            on_meta(lambda: nn.Sequential(nn.Linear(4, 4))),
            other,
            r"found none for 0\.weight, 0\.bias, and without use bias, weight\. .* for models of transformers 5",
        ),
        (
            on_meta(lambda: nn.Linear(4, 4)),
            other,
            r"expected weight of shape \(4, 4\), as in the model; found \(3, 4\)",
        ),
        (on_meta(gpt2), str(tmp_path / "broken.safetensors"), r"broken\.safetensors cannot be read as safetensors"),
        (gpt2(), whole, r"found one with values of its own, which they would not change"),
    ):
        with pytest.raises(ModelError, match=text):
            tiered_zero.initialize(model=model, config=settings(weights=str(path)))
        if path != whole:
            assert all(param.is_meta for param in model.parameters())
        initialized(model)


def test_tensors_that_the_model_does_not_have_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = {f"old.{i}": torch.zeros(1) for i in range(7)} | {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    save_file(tensors, tmp_path / "file.safetensors")
    initialized(on_meta(lambda: nn.Linear(4, 4)), weights=str(tmp_path / "file.safetensors"))
    (notice,) = [record.getMessage() for record in caplog.records if "tiered_zero.weights" in record.getMessage()]
    assert "no use for old.0, old.1, old.2, old.3, old.4 and 2 more in the files" in notice


# -- memory ------------------------------------------------------------------------------------------------------------

MEASURE = """
import json, sys, torch, tiered_zero
from tests.support.inspection import units
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.plan.gpt_shape import GPTConfig, num_parameters

def build(config, weights=None):
    nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
    zero = {"stage": 3, "offload_param": {**nvme, "max_in_cpu": 0}, "offload_optimizer": nvme, "sub_group_size": 1e6}
    settings = {"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"},
                "zero_optimization": zero, "tiered_zero": {"weights": weights or None}}
    return tiered_zero.initialize(model=build_gpt(config), config=settings)[0]

def peak_nbytes():
    return 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))

torch.set_num_threads(1)
build(GPTConfig(layers=2, hidden=64)).close()  # what a process allocates once
open("/proc/self/clear_refs", "w").write("5")  # the peak from here on
before = peak_nbytes()
config = GPTConfig(layers=48, hidden=192)
engine = build(config, sys.argv[2:])
grown = peak_nbytes() - before
unit = max(unit.numel for unit in units(engine))
print(json.dumps([grown, engine.plan.nbytes("host"), unit, num_parameters(config)]))
engine.close()
"""


@pytest.mark.parametrize("source", ["initialisers", "files"])
def test_peak_memory_of_initialize_is_one_group(source: str, swap_path: Path, tmp_path: Path) -> None:
    """Beside the planned host memory: a unit's parameters (4 bytes an element), flat (2), master (4) and the pages of
    its file that are mapped (4), those of two units; and 8 MiB for all else. The model in fp32 alone would be four
    times that."""
    files = []
    if source == "files":
        files = [saved(build_gpt(GPTConfig(layers=48, hidden=192), "cpu"), tmp_path / "weights.safetensors")]
    done = run_forked("-c", MEASURE, swap_path, *files)
    assert done.returncode == 0, done.stderr
    grown, planned, unit, num_parameters = json.loads(done.stdout)
    allowed = 2 * (4 + 2 + 4 + 4) * unit + (8 << 20)
    assert 4 * num_parameters > 4 * allowed
    assert grown < planned + allowed, f"{(grown - planned) / 2**20:.1f} MiB beyond the plan"
