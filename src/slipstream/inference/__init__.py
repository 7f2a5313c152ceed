"""Inference with a model that is cut into stages, one for each process.

`pipeline.py` is the door. Behind it: `cutting.py` (where to cut, pure), `batches.py` (what a call brings, and its pieces),
`tracing.py` (a model taken apart by torch's tracer) and `stages.py` (one traced form at work on this process).
"""
