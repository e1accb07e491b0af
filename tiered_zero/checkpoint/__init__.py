"""A run's state as files, at step boundaries: what a tag holds, how it is written, read and listed.

Promise: a tag is complete or does not count; what is read is verified before anything is changed.
Never: pickle, a name of a rank, a tier or a sub-group in a file.
"""
