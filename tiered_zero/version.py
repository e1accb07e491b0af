"""Give the version of the package, which checkpoints record, and the version of DeepSpeed whose names it has."""

__version__ = "0.1.0"

DEEPSPEED_VERSION = "0.19.8+tiered.zero"
"""The version of DeepSpeed whose names `tiered_zero.deepspeed` has. Libraries compare it with their least version."""
