"""The device that torch computes on: ordered lanes of work besides compute, events between them, memory figures."""
