"""Checkpoints: a save is a commit, a load verifies, and no pickle is written.

`format.py` says what stands in the manifest, `commit.py` how a folder becomes a checkpoint, `save.py` and `load.py` what is in it.
"""
