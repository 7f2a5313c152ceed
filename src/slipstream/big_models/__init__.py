"""Models larger than memory: what they take, where their parts go, and how weights get to a module when it runs.

`device_map/` decides (no tensor is touched), `weight_store/` keeps weights in memory-mapped files, `hooks/` brings them to a module that
is about to run, `dispatch.py` and `load.py` put these together, `layer_major.py` runs many calls side by side. `quantize.py` and
`estimate/` stand beside them. Nothing here knows an `Accelerator`, and importing the package imports no torch.
"""
