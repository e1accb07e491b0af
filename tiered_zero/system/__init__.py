"""Wrap the operating system: descriptors, anonymous memory, this process and its control groups.

Promise: a descriptor is closed once, at the latest with its object; a forked child knows that it is one.
Owner: the caller that opened the descriptor or mapped the memory.
Never: imports torch or numpy, or knows of a run."""
