"""What the process of tests/support/forked.py imports, once for all of its forks; it has one thread."""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import transformers.models.gpt2.modeling_gpt2  # noqa: F401

from tests.support.imports import freeze_imports

freeze_imports()
