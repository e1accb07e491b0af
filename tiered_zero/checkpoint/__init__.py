"""Checkpoints: what a run holds, written to and read from directories that do not depend on how the run was placed.

Promise.  A tag is whole or absent: it gets its name by one rename, after its files and its manifest are durable. What
    is read back is what was written, or an error that names file and offset. A file from a stranger cannot run code.
Owner.  One process at a time writes in a save directory (flock). Tensors are keyed by parameter name and original
    shape, never by rank, tier, stage or sub-group, so that any placement reads what any other has written.
Never.  No pickle; no master and no state as a whole in memory, for they move through fixed buffers. Buffers of the
    model, and a few frozen units at a time, are copied whole.

    checkpoints.py   the order of a save and of a load, as the engine calls them; ranks: what the ranks agree on
    save.py          capture, write and publish one rank's part of a tag, in the call or beside training
    a run            portable: its keys and shapes | places: in which records they lie | pipeline: the way through the
                     sub-groups of saving, to a tag, and loading, from one | matching: what is loaded where
                     driver: all that is not a tensor; values: that as JSON
    a tag            a store of records (store/record_writer.py) with tag_manifest, the index of keys
                     save_directory: lock, rename; tag_writer: begin, publish, discard; directory: list, find; prune
    in-place commit  the store that the run uses, with the same index. in_place: commit it with its tag, by one rank or
                     many, and adopt it in the next run | committed: read what runs have committed
    read             open: a tag or a commit, checked | reader: ranges of tensors | dcp: for torch's own planners
    resume.py        find the checkpoint that a path names
    weights.py       safetensors files: of a model, or by export.py of a tag
"""
