"""Connect the ranks of a run: collectives over torch.distributed, joint decisions, and failures that ranks post."""
