"""Define the devices on which torch computes: lanes that run jobs during compute, events that order them, unit
memory."""
