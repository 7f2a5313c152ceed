"""Device maps: sizes, ties, memory budgets, and the packing of a model's layers into them.

No tensor is read or moved.
"""
