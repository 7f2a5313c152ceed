"""Guards that watch a run: one small file for each thing that goes wrong, and `guards.py`, which joins them."""
