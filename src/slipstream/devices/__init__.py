"""Device families, memory, random states, and installed packages.

Importing these modules imports no torch.
"""
