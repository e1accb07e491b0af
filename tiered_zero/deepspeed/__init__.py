"""DeepSpeed's namespaces: `zero`, `utils`, `comm`, `checkpointing` and `accelerator`, of which scripts import names.

Promise: `import tiered_zero as deepspeed` and `from tiered_zero.zero import Init` find them; a name that does not exist
here raises an error that says what to do. Owner: nothing. Never: a mechanism of its own.
"""
