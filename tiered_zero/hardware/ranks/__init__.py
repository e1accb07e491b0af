"""The ranks of a run: collectives over torch.distributed, acts in which all take part, failures that they post."""
