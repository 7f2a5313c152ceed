"""The directory of a run, how it is written and how it is read.

Imports no torch.
"""
