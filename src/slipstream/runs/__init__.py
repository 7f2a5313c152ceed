"""Runs and their folders: what a run writes down of itself while it goes on, and how it is read. Nothing here imports torch."""
