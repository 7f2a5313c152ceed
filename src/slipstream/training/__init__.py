"""The training step: accumulation windows, backward, clipping, and the optimizers and schedulers that follow updates."""
