"""Checkpoints: what a run holds, written to and read from directories that do not depend on how the run was placed.

Promise.  A tag is whole or absent: it gets its name by one rename, after its files and its manifest are durable. What
    is read back is what was written, or an error that names file and offset. A file from a stranger cannot run code.
Owner.  One process at a time writes in a save directory (flock). Tensors are keyed by parameter name and original
    shape, never by rank, tier, stage or sub-group, so that any placement reads what any other has written.
Never.  No pickle; no master and no state as a whole in memory, for they move through fixed buffers. Buffers of the
    model, and a few frozen units at a time, are copied whole.

    checkpoints.py   save and load of one run, as the engine calls them; last_save: the save that is under way
    a run            portable: its keys and shapes | saving, loading: to and from a tag | matching: what is loaded where
                     driver: all that is not a tensor; values: that as JSON
    a tag            manifest; save_directory: lock, rename; tag_writer: begin, publish, discard;
                     directory: list, find, verify; prune
    its data files   data_files: bytes | hashing: their checksums | file_writer, file_reader over them, tensors
    in-place commit  written: commit_save: with its tag, by one rank or many | commit: make this rank's durable
                     copies: of what rests in memory, beside it | commit_layout: a hash of where each byte lies
                     read: committed: another run's, as files | places: which bytes of its records are which tensor
                     store_reader: the two as a reader of tensors
    resume.py        find what the config names, and adopt an in-place commit
    PyTorch's Distributed Checkpoint (DCP) finds which saved boxes meet which wanted ones: boxes, planner, tag_reader;
                     storage: the names for programs that call DCP themselves
    weights.py       safetensors files: of a model, or by export.py of a tag
"""
