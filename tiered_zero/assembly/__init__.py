"""The one folder that knows every concrete class: builds the parts of a run and joins them."""

from tiered_zero.assembly.builder import SHUTDOWN, build

__all__ = ["SHUTDOWN", "build"]
