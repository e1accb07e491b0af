"""Train a Hugging Face model with its state on NVMe.

    pip install 'tiered-zero[hf]'
    python docs/examples/hf_model.py [SWAP_DIRECTORY]

A GPT-2 of 2 layers is built from a config, without a download, and learns a short text. For a real model two lines
change: `AutoConfig.from_pretrained(NAME)`, and `"weights"` in the section `tiered_zero`, which names its safetensors
files.
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tiered_zero

TEXT = "A unit is fetched before it is used, and its bytes are dropped after that. " * 8


def config(swap_directory: str) -> dict:
    nvme = {"device": "nvme", "nvme_path": swap_directory}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},  # parameters and gradients in bfloat16, masters and Adam state in fp32
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 12}},
        "zero_optimization": {
            "stage": 3,
            # DeepSpeed's max_in_cpu: so many elements stay in host memory in spite of "nvme". 0 puts all on NVMe.
            "offload_param": {**nvme, "max_in_cpu": 0},
            "offload_optimizer": nvme,
            # Parameters of at most so many elements stay on the device; 0 because all of this model is small.
            "stage3_param_persistence_threshold": 0,
        },
        # What the plan may use. A run that does not fit is refused here, before anything is allocated.
        "tiered_zero": {"device_memory_limit": "1GiB", "host_memory_limit": "2GiB"},
    }


def build_model() -> GPT2LMHeadModel:
    """On the meta device: shapes and no bytes. initialize() gives values to one unit after another.

    So host memory never holds the whole model. A model that already has its values works too.
    """
    with torch.device("meta"):
        # Bytes are the tokens. The head's weight is tied to the embedding: it is one parameter, paged once.
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        )


def main(swap_directory: str = "swap", num_steps: int = 12) -> list[float]:
    """Train; return the loss of every micro-batch."""
    torch.manual_seed(0)
    engine, _, _, scheduler = tiered_zero.initialize(model=build_model(), config=config(swap_directory))
    print(engine.plan)  # every byte on every tier, and which update policy runs
    text = torch.tensor(list(TEXT.encode()))
    losses = []
    with engine:
        # One round is a micro-batch. Every second engine.step() updates the weights and moves the learning rate.
        for _ in range(num_steps * engine.gradient_accumulation_steps()):
            starts = torch.randint(len(text) - 64, (2,))
            tokens = torch.stack([text[start : start + 64] for start in starts]).to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss  # the model's own forward and its own result
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())

        engine.eval()  # evaluation between steps needs nothing else
        with torch.no_grad():
            loss = engine(input_ids=tokens, labels=tokens).loss
        print(f"loss {losses[0]:.2f} -> {loss.item():.2f}; learning rate {scheduler.get_last_lr()[0]:.2g}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
