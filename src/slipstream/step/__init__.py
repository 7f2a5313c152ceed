"""The step: windows of accumulation, backward, clipping, and the optimizers and schedulers that follow them."""
