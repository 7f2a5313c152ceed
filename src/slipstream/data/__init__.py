"""Data: the order of samples, global batches, what each rank reads of them, and the loaders that scripts iterate over.

What it promises: order is a function of (seed, epoch); the global batches do not depend on the number of processes; the user's
random state is left alone; position is counted in samples.
"""
