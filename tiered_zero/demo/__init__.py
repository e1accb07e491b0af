"""Provide a built-in workload, a small GPT and English text, so that every placement can be tried offline.

Promise: the model can be built on the `meta` device and initialized module by module; a batch depends on the text, the
seed and its index alone, so that a resumed run sees the batches that an uninterrupted one would have seen.
Owner: nothing outside this package and the command line knows that this model exists.
Never: the network, a tokenizer file, state between batches.
"""
