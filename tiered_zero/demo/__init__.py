"""Provide a built-in workload, a small GPT and English text, so that every placement can be tried offline.

Promise: the model can be built on the `meta` device and initialized module by module. A batch depends only on the text,
the seed and its index, so that a resumed run sees the same batches as an uninterrupted run.
Owner: this package and the command line; nothing else knows that this model exists.
Never: uses the network or a tokenizer file, keeps state between batches.
"""
