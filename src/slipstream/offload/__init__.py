"""Models larger than memory: what they weigh, where their parts go, and how weights get to a module when it runs.

`sizes.py` and `plan.py` decide (no tensor is touched), `store/` keeps weights in mapped files, `hooks.py` brings them to a module that
is about to run, `dispatch.py` and `load.py` put it all together. Nothing here knows an `Accelerator`.
"""
