"""Slipstream inside of other frameworks, one folder for each. A module here imports its framework; nothing else does."""
