"""Keep bytes on the device, in pinned host memory or on NVMe, behind one interface.

Promise: `read`, `write` and `fetch` mean the same on every tier, so no caller treats one tier differently. Every
transfer carries its own error. Memory and disk space are charged to the run's account of bytes (telemetry/spans.py)
before they are allocated.
Owner: the Inventory knows which slot of which tier holds what; a tier owns its staging buffers.
Never: knows modules or autograd, or computes anything."""
