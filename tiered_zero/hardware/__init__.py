"""Give access to the machine: lanes (worker threads with a device stream), pinned host memory, staging buffers, process
groups, facts.

Promise: jobs on a lane run in order, and each job's transfer carries the job's error. Host memory is one block of the
planned size, pinned or reported as pageable. A deadlock of leases raises an error that names their holders.
`torch.cuda` and `torch.distributed` are used nowhere else.

Owner: the assembly builds one accelerator, one arena (the block of host memory) and one collectives object for a run,
and closes lanes, then pools, then the arena. Each lane's thread owns its stream. A lease belongs to its holder.

Never: synchronizes a device outside measurements and shutdown, allocates host memory outside the arena, falls back in
silence.
"""
