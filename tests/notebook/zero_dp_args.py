"""Cell 38 of the notebook, src/zero_dp_args.py: the configuration comes by --deepspeed_config.

Its use of the library is untouched but for the import. Model, tokenizer and text are local, and tensors go to a GPU
where there is one.
"""

from argparse import ArgumentParser

import torch
import torch.distributed as dist
from local_gpt2 import ByteTokenizer, build_model, load_texts
from torch.optim import Adam
from torch.utils.data import DataLoader

import tiered_zero as deepspeed

model = build_model()
tokenizer = ByteTokenizer()
tokenizer.pad_token = tokenizer.eos_token
device = "cuda" if torch.cuda.is_available() else "cpu"

parser = ArgumentParser()
parser.add_argument("--deepspeed_config", default="../src/zero_dp_config.json", type=str)
parser.add_argument("--local_rank", default=0, type=int)
args = parser.parse_args()

optimizer = Adam(model.parameters(), lr=3e-5, weight_decay=3e-7)

engine, optimizer, _, scheduler = deepspeed.initialize(
    args=args,
    model=model,
    optimizer=optimizer,
)

datasets = load_texts()
datasets = [str(sample) for sample in datasets]
data_loader = DataLoader(datasets, batch_size=8, num_workers=0)

for i, data in enumerate(data_loader):
    tokens = tokenizer(
        data,
        return_tensors="pt",
        truncation=True,
        padding=True,
        max_length=1024,
    )

    loss = engine(
        input_ids=tokens.input_ids.to(device),
        attention_mask=tokens.attention_mask.to(device),
        labels=tokens.input_ids.to(device),
    ).loss

    engine.backward(loss)
    engine.step()

    if i % 10 == 0 and dist.get_rank() == 0:
        print(f"step:{i}, loss:{loss}")

    if i >= 300:
        break
