"""Weights that lie in files: mapped, asked for ahead, given back behind, and within the memory that was allowed."""
