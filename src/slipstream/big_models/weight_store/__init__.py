"""Offloaded weights in files: memory-mapped, prefetched, given back, and within a memory limit."""
