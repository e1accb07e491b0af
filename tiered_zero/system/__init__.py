"""Wrap the operating system: descriptors, anonymous memory, this process and its control groups.

Promise: a descriptor is closed once, and with its object; a forked child knows that it is one.
Owner: the caller that opened or mapped. Never: torch, numpy, knowledge of a run.
"""
