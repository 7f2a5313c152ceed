"""Models with weights of 8 or 4 bits: linear layers are converted one after the other while they are loaded.

`config.py` says what is wanted, `choice.py` which layers, `bnb.py` and `ao.py` how bitsandbytes and torchao do it, `load.py` does it to a
model. Nothing here trains; the two libraries are imported when a layer is converted, and not before.
"""
