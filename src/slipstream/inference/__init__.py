"""Inference with a model that is cut into stages, one for each process."""
