"""Checkpoints: what a run holds, written to and read from directories that do not depend on how the run was placed.

Promise.  A tag is whole or absent: it gets its name by one rename, after its files and its manifest are durable. What
    is read back is what was written, or an error that names file and offset. A file from a stranger cannot run code.
Owner.  One process at a time writes in a save directory (flock). Tensors are keyed by parameter name and original
    shape, never by rank, tier, stage or sub-group, so that any placement reads what any other has written.
Never.  No pickle; no tensor as a whole in memory, for all of it moves through fixed buffers.

    boxes.py           a flat range of an array as boxes, which PyTorch's Distributed Checkpoint (DCP) speaks of
    manifest.py        the manifest of a tag: encode, and decode of what may be hostile
    data_files.py      bytes of data files, over the I/O engines, with a checksum for each MiB
    file_writer.py     file_reader.py    tensors.py    DCP's StorageWriter and StorageReader over these; storage.py
    save_directory.py  the lock of a save directory, and names that change durably or not at all
    tag_writer.py      begin, publish and discard a tag
    directory.py       tags of a save directory: list, find, prune, verify
"""
