"""How bytes get to disk and back, with trust in neither: safe names, files opened inside a folder, durable writes, the layout of tensors.

Nothing here imports torch or knows what a checkpoint is.
"""
