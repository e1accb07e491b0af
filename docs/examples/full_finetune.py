"""Train all weights of a model of transformers on a text, with the config of a recipe (docs/recipes.md).

    python docs/examples/full_finetune.py configs/recipes/desktop.json MODEL_DIRECTORY TEXT [STEPS]

MODEL_DIRECTORY has config.json, and model.safetensors or its index; without weights the model begins with random ones.
The text's bytes are the tokens, so that no tokenizer is needed: take your own batches for a real run.
"""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiered_zero


def main(config_path: str, model_directory: str, text_path: str, num_steps: int = 100) -> list[float]:
    """Train; return the loss of every step."""
    config = json.loads(Path(config_path).read_text())
    if list(Path(model_directory).glob("*.safetensors")):
        config["tiered_zero"]["weights"] = model_directory
    torch.manual_seed(0)
    with torch.device("meta"):  # no memory: each part gets its values where it rests
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_directory))
    # Keep the inputs of each layer and compute the rest again in backward; transformers 4 has the second name only.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    engine, _, _, _ = tiered_zero.initialize(model=model, config=config)
    print(engine.plan)
    text = torch.tensor(list(Path(text_path).read_bytes()))
    length, size = config["tiered_zero"].get("sequence_length", 512), config["train_micro_batch_size_per_gpu"]
    losses = []
    with engine:
        for step in range(num_steps):
            starts = [random.Random(step * size + i).randrange(len(text) - length) for i in range(size)]
            tokens = torch.stack([text[start : start + length] for start in starts]).to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            print(f"step {step + 1}: loss {losses[-1]:.3f}")
        engine.save_16bit_model("trained")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:5]))
