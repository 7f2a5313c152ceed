"""Data: the order of samples, the global batches, the part that each rank reads, and the loaders that scripts iterate over.

Order is a function of (seed, epoch), global batches do not depend on the number of processes, the user's random states are left alone,
and positions are counted in samples.
"""
