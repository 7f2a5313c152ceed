"""Hooks around the forward of a module, placeholders for offloaded weights, and the swap of the two."""
