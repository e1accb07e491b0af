"""Save what a run holds in directories that do not depend on where the run kept its bytes, and load it again.

Promise.  A tag (one saved checkpoint) is whole or absent: it gets its name by one rename, after its files and its
    manifest are durable. A read returns what was written, or raises an error that names file and offset. A file from
    another person cannot run code.
Owner.  One process at a time writes in a save directory (flock). Tensors are keyed by parameter name and original
    shape, never by rank, tier, stage or sub-group, so any placement can read what another one has written.
Never.  No file is a pickle. Masters and state are never whole in memory: they move through fixed buffers. Buffers of
    the model, and a few frozen units at once, are copied whole.

A tag is a directory with data files of records (record/data_files.py) and an index of keys (index.py).

    checkpoints.py   order the steps of a save and of a load, as the engine calls them; let the ranks agree
    save.py          capture, write and publish one rank's part of a tag, in the call or during training
    load.py          compare a checkpoint with a run, read ranges of its tensors, write them to the run
    index.py         keys -> ranges of records; the keys of a run, the place of each, the loop through its sub-groups
    driver.py        everything that is not a tensor, as JSON
    tag.py           judge, list, find, open and prune tags; open the commit to which a tag points
    tag_writer.py    lock a save directory; begin, publish and discard a tag
    in_place.py      commit the swap files that the run uses, with the same index and a tag, by one rank or many; adopt
                     the commit in the next run
    weights.py       write safetensors files of a model or a checkpoint
    dcp.py           read tags through PyTorch's Distributed Checkpoint
"""
