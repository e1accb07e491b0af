"""Give access to the machine: lanes of work, pinned host memory, staging buffers, process groups, facts.

Promise: work on a lane runs in order, and its transfer carries its error; host memory is one block of the planned size,
pinned or reported as pageable; a lease waits for a buffer, and a deadlock raises an error that names the holders.
`torch.cuda` and `torch.distributed` are used nowhere else.

Owner: the assembly builds one accelerator, one arena and one collectives for a run, and closes them: lanes, then pools,
then the arena. Each lane's thread owns its stream; a lease belongs to its holder until it is released.

Never: synchronizing a device outside measurements and shutdown; host allocations outside the arena; silent fallbacks.
"""
