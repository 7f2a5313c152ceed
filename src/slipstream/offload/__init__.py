"""Models larger than memory: what they weigh, where their parts go, and how weights get to a module when it runs.

`planning/` decides (no tensor is touched), `store/` keeps weights in mapped files, `hooking/` brings them to a module that is about to
run, `dispatch.py` and `load.py` put it all together, `lanes.py` runs many calls side by side. `quantize/` and `estimate/` are beside it.
Nothing here knows an `Accelerator`.
"""
