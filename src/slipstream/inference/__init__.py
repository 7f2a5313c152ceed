"""Inference with a model that is cut into stages, one for each process.

`pipeline.py` is the door. Behind it: `cutting.py` (where to cut, pure), `batches.py` (what a call brings, and its pieces),
`tracing.py` (a model taken apart by torch's tracer) and `stages.py` (one traced form at work on this process).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.lazy import lazily as _lazily

if TYPE_CHECKING:
    from slipstream.inference.pipeline import (
        build_pipeline as build_pipeline,
        find_pippy_batch_size as find_pippy_batch_size,
        generate_device_map as generate_device_map,
        pippy_forward as pippy_forward,
        prepare_pippy as prepare_pippy,
    )

__all__ = ["build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward", "prepare_pippy"]

__getattr__, __dir__ = _lazily(__name__, {"slipstream.inference.pipeline": tuple(__all__)})
