"""Checkpoints: what a run holds, written to and read from directories that do not depend on how the run was placed.

Promise.  A tag is whole or absent: it gets its name by one rename, after its files and its manifest are durable. What
    is read back is what was written, or an error that names file and offset. A file from a stranger cannot run code.
Owner.  One process at a time writes in a save directory (flock). Tensors are keyed by parameter name and original
    shape, never by rank, tier, stage or sub-group, so that any placement reads what any other has written.
Never.  No pickle; no master and no state as a whole in memory, for they move through fixed buffers. Buffers of the
    model, and a few frozen units at a time, are copied whole.

    checkpoints.py   the order of a save and of a load, as the engine calls them; ranks: what the ranks agree on
    save.py          capture, write and publish one rank's part of a tag, in the call or during training
    a run            run_state: its keys, where each rests, the loop through its sub-groups | write: to a tag
                     load: match a checkpoint, read its tensors, write them to the run
                     driver: all that is not a tensor; values: that as JSON
    a tag            a store of records (record/writer.py) with an index of keys (index.py)
                     tag: judge, list, find, open | tag_writer: lock, begin, publish, discard; prune
    in-place commit  the store that the run uses, with the same index. in_place: commit it with its tag, by one rank or
                     many, and adopt it in the next run | committed: read what runs have committed
    read             load.py: ranges of tensors, of a tag or a commit | dcp: for torch's own planners
    weights.py       safetensors files: of a model, or of a checkpoint
"""
