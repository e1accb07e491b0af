"""Manage host memory: one block of the planned size, staging buffers that are leased, huge pages for units on the
CPU."""
