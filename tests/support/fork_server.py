"""What the process of tests/support/forked.py imports, once for all of its forks; it has one thread."""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

from tests.support.imports import freeze_imports
from tests.support.inspection.insides import GradNorm
from tiered_zero.rules.from_config import make_rule
from tiered_zero.rules.native_rules import open_kernel


def compare_with_torch() -> None:
    """Find whether the kernel has torch's bits, which a process does once, before its first step: 0.1 s of the
    processor. Forks know it."""
    rule = make_rule(torch.optim.AdamW([torch.zeros(1)]), num_threads=1)
    kernel = open_kernel(num_threads=1)
    GradNorm(kernel)
    if kernel is not None:
        kernel.close()
    rule.close()


compare_with_torch()
freeze_imports()
