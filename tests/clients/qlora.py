"""Models with a base of 4 bits under adapters of PEFT, as transformers loads them; for the tests beside it.

python -m tests.clients.qlora DIRECTORY SWAP: trains the model of DIRECTORY with everything on NVMe, and prints what it
has seen as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.configs import zero_section
from tests.support.inspection import units

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
TARGETS = ["q_proj", "v_proj", "down_proj"]


def save_first(kind: str, directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write a model of random weights, in whole precision: "llama", or "moe", whose attention has biases, and whose
    layers have a shared expert of linear layers beside the others."""
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **options}))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        shared = {"shared_expert_intermediate_size": 64, **SMALL, **options}
        model = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**experts, **shared))
    model.to(dtype).save_pretrained(directory)
    return directory


def quantize(directory: Path, double: bool, dtype: torch.dtype = torch.float32) -> Any:
    """Load a model, its linear layers as NF4."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=dtype
    )
    return AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=config, dtype=dtype, device_map={"": "cpu"}
    )


def adapt(model: Any, checkpoints: str = "none") -> Any:
    """Add adapters. `checkpoints`: "none", "default" as transformers has them, or "reentrant"."""
    import peft

    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=TARGETS))
    if checkpoints != "none":
        options = {"use_reentrant": True} if checkpoints == "reentrant" else None
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.enable_input_require_grads()
    model.config.use_cache = False
    return model.train()


def train(trainer: Any, num_steps: int = 3) -> list[Tensor]:
    losses = []
    for number in range(num_steps):
        tokens = torch.randint(1, 32, (2, 16), generator=torch.Generator().manual_seed(number))
        loss = trainer(input_ids=tokens, labels=tokens).loss
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.detach())
    return losses


def deepen(directory: Path, layers: int) -> Path:
    """Write a saved model of one layer, of 4 bits, as one of `layers`: the same tensors, a file a layer."""
    from safetensors.torch import load_file, save_file

    deep = directory.with_name(f"{directory.name}-{layers}")
    deep.mkdir()
    config = json.loads((directory / "config.json").read_text())
    (deep / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    tensors, places = load_file(directory / "model.safetensors"), {}
    for layer in range(layers):
        name = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        own = {key.replace(".0.", f".{layer}."): tensors[key] for key in tensors if ".0." in key or not layer}
        save_file(own, deep / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(own, name))
    index = {"metadata": {}, "weight_map": places}
    (deep / "model.safetensors.index.json").write_text(json.dumps(index))
    return deep


class PeakMemory(threading.Thread):
    """The most bytes of this process's own memory. Pages of mapped files are not counted: the kernel may drop them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.nbytes = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.002):
            rows = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
            own = sum(int(row[1]) * 1024 for row in rows if row[0] in ("RssAnon:", "RssShmem:"))
            self.nbytes = max(self.nbytes, own)

    def stop(self) -> int:
        self._stopped.set()
        self.join()
        return self.nbytes


def main(directory: str, swap: str) -> dict[str, Any]:
    import peft
    from transformers import AutoModelForCausalLM

    import tiered_zero

    torch.set_num_threads(1)
    nn.Linear(8, 8)(torch.ones(1, 8)).sum().backward()  # what torch makes once
    peak = PeakMemory()
    peak.start()
    time.sleep(0.05)
    before = peak.nbytes
    model = adapt(AutoModelForCausalLM.from_pretrained(directory, device_map={"": "cpu"}), "default")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero_section("nvme", "nvme", swap),
        "tiered_zero": {"device": "cpu", "device_memory_limit": "32MiB", "host_memory_limit": "48MiB"},
    }
    with tiered_zero.initialize(model=model, config=config)[0] as engine:
        train(engine)
        engine.flush()
        assert isinstance(model, peft.PeftModel)
        return {
            "base": sum(unit.nbytes for unit in units(engine) if not unit.trainable),
            "adapters": sum(unit.nbytes for unit in units(engine) if unit.trainable),
            "grown": peak.stop() - before,
            "host": engine.plan.nbytes("host"),
            "ledger": sum(kind["peak"] for kind in engine.memory_report()["host"].values()),
            "window": engine.memory_report()["device"]["param_window"]["peak"],
        }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
