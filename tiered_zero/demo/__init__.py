"""Provide a built-in workload, a small GPT and English text, so that every placement can be tried offline.

Promise: the model can be built on the `meta` device. A batch depends only on text, seed and index, so a resumed run
sees the same batches. Owner: this package and the command line. Never: uses the network or a tokenizer file.
"""
