"""Trackers under the module name that users of Accelerate know.

Scripts write `from slipstream.tracking import GeneralTracker`. The implementations are in `observability/trackers/`.
"""

from __future__ import annotations

from slipstream.observability.trackers.base import GeneralTracker, on_main_process
from slipstream.observability.trackers.hosted import ClearMLTracker, CometMLTracker, MLflowTracker, SwanLabTracker, WandBTracker
from slipstream.observability.trackers.local import LocalTracker
from slipstream.observability.trackers.on_disk import AimTracker, DVCLiveTracker, TensorBoardTracker, TrackioTracker
from slipstream.observability.trackers.registry import filter_trackers, get_available_trackers, register_tracker_class

__all__ = [
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "LocalTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]
