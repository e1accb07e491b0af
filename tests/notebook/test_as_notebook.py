"""The notebook's own cells, run by nbclient with the `deepspeed` of the alias: a small GPT-2, BERT and text lie in the
directories that they name, and no cell is changed. zero.ipynb has its code and its configurations, without prose."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tiered_zero.cli.main import main

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other

NOTEBOOK = Path(__file__).parent / "zero.ipynb"
BROKEN = {
    "with amp.scale_loss(loss0": "NameError",  # an excerpt
    "in data_iter:": "NameError",  # an excerpt
    "from apex import amp": "ModuleNotFoundError",
    "parser.parse_args()": "SystemExit",  # of the kernel's own arguments: it is a script
    "BertLayer": "IndexError",  # hands the mask on in a shape that this Transformers does not take
}
"""What a cell has -> the error that it ends with on any machine."""
NEEDS_GPU = {
    '"cuda"': "AssertionError" if torch.version.cuda is None else "RuntimeError",
    "L.backward()": "NameError",
    "print(f'before: {fp32_model.w1.weight}": "NameError",
    "fp16_model.w1.weight.grad": "NameError",
}
"""The same, where there is no GPU."""
NO_GPU = "import torch\n\nif not torch.cuda.is_available():\n    torch.Tensor.cuda = lambda self, *_: self\n"
"""Run before each program: where there is no GPU, what is sent to one stays."""


def write_models(folder: Path) -> None:
    """What `from_pretrained` finds by the names "gpt2" and "bert-base-cased", and `load_dataset` by "squad"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertTokenizer, PreTrainedTokenizerFast

    from tests.notebook.local_gpt2 import build_model, load_texts

    build_model().save_pretrained(folder / "gpt2")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder / "gpt2")
    bert = folder / "bert-base-cased"
    BertConfig(hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=9).save_pretrained(bert)
    (bert / "vocab.txt").write_text("\n".join("[PAD] [UNK] [CLS] [SEP] [MASK] Hello I am Kevin".split()))
    BertTokenizer(str(bert / "vocab.txt")).save_pretrained(bert)
    (folder / "squad").mkdir()
    rows = (json.dumps({"context": text}) + "\n" for text in load_texts())
    (folder / "squad" / "train.jsonl").write_text("".join(rows))


def sources(notebook: Any, kind: str, text: str) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == kind and text in cell.source]


def printed(notebook: Any, text: str) -> list[list[str]]:
    """The losses that each cell with this text has printed."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and text in cell.source:
            shown = "".join(output.text for output in cell.outputs if output.output_type == "stream")
            found.append(re.findall(r"step:(?:0|10|20), loss:[0-9.]+", shown))
    return found


@pytest.mark.timeout(1800)
def test_every_cell_that_is_not_broken_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (tmp_path / "src").mkdir()
    (tmp_path / "notebook").mkdir()
    (tmp_path / "sitecustomize.py").write_text(NO_GPU)
    write_models(tmp_path / "notebook")
    script, with_dict = sources(notebook, "code", "import deepspeed")
    files = dict(zip(["dp", "r", "off"], sources(notebook, "markdown", '"zero_optimization"'), strict=True))
    (tmp_path / "src/zero_args.py").write_text(script)
    (tmp_path / "src/zero_config.py").write_text(with_dict)
    for name, text in files.items():
        (tmp_path / f"src/zero_{name}_config.json").write_text(text.strip().strip("`"))
    assert CliRunner().invoke(main, ["deepspeed-alias", "install", "--target", str(tmp_path)]).exit_code == 0
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    monkeypatch.setenv("PATH", os.pathsep.join((str(tmp_path / "bin"), os.environ["PATH"])))
    for name in ("HF_HOME", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    where = {"metadata": {"path": str(tmp_path / "notebook")}}
    NotebookClient(notebook, timeout=900, allow_errors=True, kernel_name="python3", resources=where).execute()
    broken = BROKEN if torch.cuda.is_available() else {**NEEDS_GPU, **BROKEN}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            expected = next((name for text, name in broken.items() if text in cell.source), None)
            (found,) = [o.ename for o in cell.outputs if o.output_type == "error"] or [None]
            assert found == expected, (cell.source, cell.outputs)
    first, *others = printed(notebook, "!deepspeed --num_gpus=4")
    assert len(first) == 3 and others == [first] * 3, "whatever the stage, wherever it rests"
    (here,) = (losses for losses in printed(notebook, "import deepspeed") if losses)
    assert len(here) == 3 and here[0] == first[0], "before any update"
