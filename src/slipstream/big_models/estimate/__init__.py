"""Estimate the memory of a model before anything is allocated: weights, gradients, optimizer states, activations and KV cache.

`tensors.py` lists the tensors of a model and the bytes of each dtype, `formula.py` computes activations of known architectures from a
config, `meta_model.py` builds a model on the meta device and measures it, `report.py` assembles the figures. No weight is loaded.
"""
