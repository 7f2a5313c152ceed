"""Experiment trackers, with the base class, the registry behind `log_with`, and one class for each supported package."""
