"""Connect the ranks of a run: collectives over torch.distributed, decisions that ranks make together, and reports of
failed ranks."""
