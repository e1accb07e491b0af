"""Keep bytes on the device, in pinned host memory or on NVMe, behind one interface.

Promise: `read`, `write` and `fetch` mean the same on every tier, so the movers have no special case for any; every
transfer carries its own error; memory and disk space are charged to the ledger before they are allocated. Owner: the
Inventory knows which slot of which tier holds what; a tier owns its staging buffers. Never: parameters as modules know
them, gradients, arithmetic.
"""
