"""Tiers: device, host (pinned) and nvme, behind one interface.

Promise: `read`, `write` and `fetch` mean the same on every tier, so the movers above hold no case for a tier; every
transfer carries its own error; what a tier holds is charged to the ledger before it is allocated.
Owner: the Inventory says which slot of which tier holds what. A tier owns its staging buffers.
Never: parameters as modules know them, gradients, arithmetic.
"""
