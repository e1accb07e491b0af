"""The machine behind one interface: lanes of work, pinned host memory, staging buffers, process group, facts.

Promise: work on a lane runs in order and its transfer carries its error; host memory is one block of the planned size,
pinned or said not to be; a lease that must wait, waits, and a deadlock is an error with the holders' names.
`torch.cuda` and `torch.distributed` occur nowhere else.
Owner: the assembly builds one accelerator, one arena and one collectives for a run, and closes them: lanes, then pools,
then the arena. Each lane's thread owns its stream; a lease belongs to its holder until it is released.
Never: synchronizing a device outside measurements and shutdown; host allocations outside the arena; silent fallbacks.
"""
