"""Torch's profiler for a run: its options, the block that it watches, traces of all ranks in one file, and a table of operators."""
