"""Bytes to disk and back, trusting neither: safe names, files opened inside a folder, durable writes, checksums, safetensors layout.

Nothing here imports torch or knows what a checkpoint is.
"""
