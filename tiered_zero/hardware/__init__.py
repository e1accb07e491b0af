"""Give access to the machine: lanes (worker threads with device streams), pinned host memory, staging buffers, process
groups, facts about hardware.

Promise: a lane runs its jobs in order, and each job's transfer raises the job's error. Slots and staging buffers in
host memory lie in one block of the planned size. A warning says if it cannot be pinned. A lease that waits too long
raises an error that names all holders. No other subpackage uses `torch.cuda`, or `torch.distributed` except its
`checkpoint` module.

Owner: each run owns one accelerator, one arena (the block of host memory) and one collectives object. It closes lanes,
then pools, then the arena. Each lane's thread owns its stream. A lease belongs to its holder.

Never: synchronizes a device except for measurements, dropped steps and shutdown; allocates slots or staging buffers
outside the arena; falls back to pageable memory without a warning.
"""
