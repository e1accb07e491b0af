"""Give the version of the package, which checkpoints record."""

__version__ = "0.1.0"
