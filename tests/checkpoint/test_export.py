"""A tag's weights as safetensors: every name and value, in any order in memory, and no wrong value quietly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tags import fields, open_tag, write_share, written_by
from tests.support.trainers import same_bits
from tiered_zero.checkpoint import weights as weights_module
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.checkpoint.weights import list_weights, write_weights
from tiered_zero.errors import CorruptionError, StoreError


def write_tag(directory: Path, tensors: dict[str, torch.Tensor], step: int = 3) -> Path:
    """A tag of whole tensors by key; one that is not row-major keeps its order in memory."""
    with TagWriter.begin(directory, f"global_step{step}") as tag:
        orders = {
            key: sorted(range(tensor.dim()), key=lambda dim, own=tensor: -own.stride(dim))  # type: ignore[misc]
            for key, tensor in tensors.items()
            if not tensor.is_contiguous()
        }
        own = written_by(tiered_zero="1.0", rule="AdamW", kernel="avx2", created_s=time.time())
        tag.publish(fields(step, written_by=own), [write_share(tag, tensors, orders)])
        return tag.path


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "master/a.weight": torch.randn(40, 7, 3),
        "master/turned": torch.randn(5, 33).t(),
        "master/images": torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last),
        "master/scalar": torch.tensor(2.5),
        "exp_avg/a.weight": torch.randn(40, 7, 3),
        "param/frozen": torch.randn(9, 2).bfloat16(),
        "param/codes": torch.randint(0, 256, (12,), dtype=torch.uint8),
        "buffer/mean": torch.randn(6),
        "buffer/count": torch.tensor(7),
        "buffer/mask": torch.arange(5) % 2 > 0,
    }


def exported(path: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("chunk_numel", [8 << 20, 64, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_is_there_rounded_once(
    dtype: torch.dtype, chunk_numel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "_CHUNK_NUMEL", chunk_numel)
    tensors = state()
    path = write_tag(tmp_path / "ck", tensors)
    paths = write_weights(tmp_path / "out", list_weights(open_tag(path), dtype), max_shard_nbytes=1000)
    assert paths[-1].name == "model.safetensors.index.json" and len(paths) > 3
    found = exported(tmp_path / "out")
    assert found.keys() == {key.partition("/")[2] for key in tensors if not key.startswith("exp_avg")}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if kind != "exp_avg":
            casts = kind != "buffer" and value.is_floating_point()
            assert same_bits(found[name], value.to(dtype) if casts else value), key


def test_it_loads_into_the_plain_model(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    values = dict(model.named_parameters())
    tensors = {f"master/{name}": value.detach() for name, value in values.items()}
    tensors |= {f"buffer/{name}": value for name, value in model.named_buffers()}
    write_weights(tmp_path / "out", list_weights(open_tag(write_tag(tmp_path / "ck", tensors))))
    torch.manual_seed(1)
    other = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    other.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    assert all(same_bits(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_value_that_the_dtype_cannot_hold_is_an_error(tmp_path: Path) -> None:
    path = write_tag(tmp_path / "ck", {"master/w": torch.tensor([1.0, 70000.0, float("inf"), float("nan")])})
    with pytest.raises(StoreError, match=r"master/w has values that float16 cannot hold: the largest is 7e\+04"):
        write_weights(tmp_path / "out", list_weights(open_tag(path), torch.float16))
    assert not list((tmp_path / "out").iterdir())
    write_weights(tmp_path / "out", list_weights(open_tag(path), torch.bfloat16))
    assert exported(tmp_path / "out")["w"].isfinite().tolist() == [True, True, False, False]


def test_rotten_bytes_never_become_weights(tmp_path: Path) -> None:
    path = write_tag(tmp_path / "ck", state())
    data = next(path.glob("*.bin"))
    raw = bytearray(data.read_bytes())
    raw[100] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CorruptionError, match=r"are not those written"):
        write_weights(tmp_path / "out", list_weights(open_tag(path)))
    assert not list((tmp_path / "out").iterdir())


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    path = write_tag(tmp_path / "ck", {"exp_avg/w": torch.ones(3), "buffer/b": torch.ones(3)})
    with pytest.raises(StoreError, match="There are no weights in this checkpoint"):
        write_weights(tmp_path / "out", list_weights(open_tag(path)))
    path = write_tag(tmp_path / "twice", {"master/w": torch.ones(3), "param/w": torch.ones(3)})
    with pytest.raises(StoreError, match="w is there twice, as param/w too"):
        write_weights(tmp_path / "out", list_weights(open_tag(path)))
