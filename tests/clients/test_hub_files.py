"""Files of mixtures of experts as the hub has them: a tensor for each expert, where transformers 5 has one for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.support.models import named_weights
from tests.support.trainers import adamw, tiered
from tiered_zero.cli.checkpoint import checkpoint
from tiered_zero.errors import ModelError

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
KINDS = ["Mixtral", "Qwen3Moe", "Qwen2Moe", "DeepseekV3"]
MORE = {"DeepseekV3": {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}}


def build(kind: str) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES, **MORE.get(kind, {}))
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def contents(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name, value in left.items() if not torch.equal(value, right[name])] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("original", [True, False], ids=["as the hub has it", "fused"])
def test_they_are_read_and_written_as_transformers_does(
    kind: str, original: bool, swap_path: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, files, out = build(kind), tmp_path / "files", tmp_path / "out"
    model.save_pretrained(files, save_original_format=original, max_shard_size="20KB")
    assert any(".experts.0." in name for name in contents(files)) is original
    with torch.device("meta"):
        empty = build(kind)
    with tiered(empty, swap_path, make_optimizer=adamw, runtime={"weights": str(files)}) as engine:
        assert_equal(dict(named_weights(model)), dict(named_weights(engine.module)))
        engine.save_16bit_model(out, max_shard_size="20KB")
        engine.save_checkpoint(tmp_path / "ck")
    model.save_pretrained(files)
    assert_equal(contents(files), contents(out))
    loaded = type(model).from_pretrained(out)
    assert_equal(dict(named_weights(model)), dict(named_weights(loaded)))


@pytest.mark.parametrize("with_weights", [True, False], ids=["names", "config alone"])
def test_an_export_is_like_a_directory(with_weights: bool, swap_path: Path, tmp_path: Path) -> None:
    """bf16 weights and config of a run in bf16, with the tokenizer's file, of which vLLM and GGUF writers make use."""
    model, files, out = build("Mixtral"), tmp_path / "files", tmp_path / "out"
    model.save_pretrained(files)
    (files / "tokenizer.json").write_text("{}")
    if not with_weights:
        (files / "model.safetensors").unlink()
    with tiered(build("Mixtral"), swap_path, make_optimizer=adamw, bf16={"enabled": True}) as engine:
        expected = dict(named_weights(engine.module))
        engine.save_checkpoint(tmp_path / "ck")
    options = ["--dtype", "bf16", "--max-shard-size", "20KB", "--like", str(files)]
    run = CliRunner().invoke(checkpoint, ["export", str(tmp_path / "ck"), str(out), *options], catch_exceptions=False)
    assert run.exit_code == 0, run.output
    assert (out / "tokenizer.json").read_text() == "{}"
    assert len(list(out.glob("*.safetensors"))) > 1 and any(".experts.0." in name for name in contents(out))
    loaded = type(model).from_pretrained(out)
    assert loaded.dtype is torch.bfloat16
    assert_equal(expected, dict(named_weights(loaded)))


def test_an_export_is_refused_where_the_directory_is_of_another_model(swap_path: Path, tmp_path: Path) -> None:
    build("Qwen3Moe").save_pretrained(tmp_path / "files")
    with tiered(build("Mixtral"), swap_path, make_optimizer=adamw) as engine:
        engine.save_checkpoint(tmp_path / "ck")
    arguments = ["export", str(tmp_path / "ck"), str(tmp_path / "out"), "--like", str(tmp_path / "files")]
    with pytest.raises(ModelError, match="one side only"):
        CliRunner().invoke(checkpoint, arguments, catch_exceptions=False)
    assert not (tmp_path / "out").exists()


def test_a_missing_expert_is_refused_before_anything_moves(swap_path: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    build("Mixtral").save_pretrained(tmp_path)
    values = contents(tmp_path)
    del values[next(name for name in values if ".experts.3." in name)]
    save_file(values, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = build("Mixtral")
    with pytest.raises(ModelError, match="experts"):
        tiered(empty, swap_path, runtime={"weights": str(tmp_path)})
