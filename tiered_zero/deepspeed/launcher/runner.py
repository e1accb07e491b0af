"""Provide what Accelerate reads from DeepSpeed's `launcher.runner` before it starts torchrun."""

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""The file in which Accelerate leaves variables for other hosts."""
