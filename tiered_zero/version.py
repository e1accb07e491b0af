"""Define the package's version, which checkpoints record, and the version of DeepSpeed whose names the package has."""

__version__ = "0.1.0"

DEEPSPEED_VERSION = "0.19.8+tiered.zero"
"""The version of DeepSpeed whose names `tiered_zero.deepspeed` has. Libraries check that it is at least the version
that they need."""
