"""Looking into checkpoints without torch: what is there, whether it is whole, what differs. The commands are in `cli/checkpoint.py`."""
