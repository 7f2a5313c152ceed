"""Trackers by the names that users import: `from slipstream.tracking import GeneralTracker`. What they do is in `track/`."""

from __future__ import annotations

from slipstream.track.aim import AimTracker
from slipstream.track.base import GeneralTracker, on_main_process
from slipstream.track.clearml import ClearMLTracker
from slipstream.track.comet import CometMLTracker
from slipstream.track.dvclive import DVCLiveTracker
from slipstream.track.local import LocalTracker
from slipstream.track.mlflow import MLflowTracker
from slipstream.track.registry import filter_trackers, get_available_trackers, register_tracker_class
from slipstream.track.swanlab import SwanLabTracker
from slipstream.track.tensorboard import TensorBoardTracker
from slipstream.track.trackio import TrackioTracker
from slipstream.track.wandb import WandBTracker

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
