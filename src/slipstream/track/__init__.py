"""Trackers: where the numbers of a run are kept, and progress bars that one process shows."""
