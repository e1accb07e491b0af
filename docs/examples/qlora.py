"""Train LoRA adapters over a base of 4 bits that rests on NVMe (docs/quantised.md).

    python docs/examples/qlora.py MODEL

MODEL: a directory, or a name on the hub, of a causal language model that bitsandbytes has saved in 4 bits.
"""

import sys

import peft
import torch
from transformers import AutoModelForCausalLM

import tiered_zero

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "swap", "max_in_cpu": 0}},
}


def main(name: str, num_steps: int = 20) -> list[float]:
    base = AutoModelForCausalLM.from_pretrained(name, device_map={"": "cpu"})  # maps its files: takes no memory yet
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear"))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    losses = []
    with tiered_zero.initialize(model=model, config=CONFIG)[0] as engine:
        for _ in range(num_steps):
            tokens = (torch.randint(16, (4, 1)) + torch.arange(16)).to(engine.device)  # your data, in place of counting
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        model.save_pretrained("adapters")
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1]))
