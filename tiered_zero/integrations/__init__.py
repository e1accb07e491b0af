"""Connect to other training tools: callbacks for Transformers' Trainer, a strategy for Lightning, a plugin for axolotl.

Promise: a script for the tool changes by one line. In fp32 on one rank, the script computes the same numbers as without
this package. Owner: the tool owns its training loop. Never: is imported by the rest of the package, because it imports
the tool.
"""
