"""Pipeline inference: a model cut into stages, one for each process.

`pipeline.py` has the public functions and runs the stages, `stage_plan.py` decides where to cut (pure), `microbatches.py` cuts the
arguments of a call, `trace.py` takes a model apart with torch's tracer.
"""

from __future__ import annotations

from slipstream.public_names import lazy_attributes

__all__, __getattr__, __dir__ = lazy_attributes(
    __name__, {"inference.pipeline": "build_pipeline find_pippy_batch_size generate_device_map pippy_forward prepare_pippy"}
)
