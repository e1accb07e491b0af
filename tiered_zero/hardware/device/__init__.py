"""Compute with torch on a device: ordered lanes of work next to compute, events between them, memory figures."""
