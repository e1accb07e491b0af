"""Wrap the operating system: descriptors, anonymous memory, this process and its control groups.

Promise: a descriptor is closed once, and with its object; a forked child knows that it is one.
Owner: who opened or mapped. Never: torch, numpy, anything of a run.
"""
