"""How much memory a model takes: weights, gradients, optimizer states, activations and cache, before anything is allocated.

`tensors.py` has the tensors of a model and the bytes of each dtype, `formula.py` computes activations of known architectures from a
config, `meta_model.py` builds a model without memory and measures it, `report.py` puts the figures together. No weight is loaded.
"""
