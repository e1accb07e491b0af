"""Manage host memory: one block of the planned size, leased staging buffers, huge pages for units on the CPU."""
