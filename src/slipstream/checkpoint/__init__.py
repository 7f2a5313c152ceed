"""Checkpoints: a save is a commit, a load verifies, and no pickle is written.

Saving: `saver.py` -> `capture.py` -> `serialize.py`, `weights.py` -> `writer.py` -> `commit.py`. Loading: `restore.py` -> `locate.py` ->
`manifest.py`.
"""
