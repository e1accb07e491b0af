"""Connect to other training tools: callbacks for Transformers' Trainer, a strategy for Lightning, a plugin for axolotl.

Promise: a script of the tool changes by one line, and in fp32 on one rank its numbers are those of the plain tool.
Owner: the tool owns its loop. Never: imported by the rest of the package, because it imports the tool.
"""
