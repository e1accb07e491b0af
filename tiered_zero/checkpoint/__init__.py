"""Save a run's weights, optimizer state and driver state in directories, and load them into a run of any placement.

Promise. A tag (one saved checkpoint) is whole or absent: one rename of its manifest publishes it, after its files and
the manifest are durable. A read returns what was written, or raises an error that names file and offset. Loading a file
from another person cannot run code.

Owner. One process at a time writes in a save directory (flock). Tensors are saved under their names, so a run with
another placement can read them.

Never. No file is a pickle. Masters and state are never copied whole in memory: they pass through fixed buffers.

    checkpoints.py   order the steps of a save and of a load, as the engine calls them; let the ranks agree
    save.py          capture, write and publish one rank's part of a tag
    load.py          compare a checkpoint with a run, read ranges of its tensors, write them to the run
    index.py         keys -> ranges of records; the keys of a run, and the place of each
    driver.py        everything that is not a tensor, as JSON
    tag.py           judge, list, find, open and prune tags
    tag_writer.py    lock a save directory; begin, publish and discard a tag
    in_place.py      commit the swap files that the run uses; adopt the commit in the next run
    weights.py       write safetensors files of a model or a checkpoint
    dcp.py           read tags through PyTorch's Distributed Checkpoint"""
