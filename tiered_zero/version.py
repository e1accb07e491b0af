"""Define the package's version, which checkpoints record, and the version of DeepSpeed whose names the package has."""

__version__ = "0.1.0"

DEEPSPEED_VERSION = "0.19.8+tiered.zero"
"""The version of DeepSpeed whose names `tiered_zero.deepspeed` has. Libraries compare this version with the lowest
version that they accept."""
