"""Provide a built-in workload, a small GPT and English text, so that every placement can be tried offline.

Promise: the model can be built on the `meta` device and initialized module by module; a batch depends on the text, the
seed and its index alone: a resumed run sees the batches that an uninterrupted one would have seen.
Owner: this package and the command line; nothing else knows that this model exists.
Never: uses the network or a tokenizer file, keeps state between batches.
"""
