"""Keep bytes on the device, in pinned host memory or on NVMe, behind one interface.

Promise: `read`, `write` and `fetch` mean the same on every tier. Every transfer carries its own error. Memory and disk
space are charged to the ledger (telemetry/spans.py) before they are allocated.
Owner: the Inventory holds the home of each unit and sub-group; the TierRack owns tiers and staging buffers.
Never: knows modules or autograd, or computes anything."""
