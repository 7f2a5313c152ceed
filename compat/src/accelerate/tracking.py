"""Names of `accelerate.tracking`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils.dataclasses": "LoggerType",
        "accelerate.utils.environment": "str_to_bool",
        "accelerate.utils.imports": """is_aim_available is_clearml_available is_comet_ml_available is_dvclive_available
            is_mlflow_available is_swanlab_available is_tensorboard_available is_trackio_available
            is_wandb_available""",
        "accelerate.utils.operations": "listify",
        "accelerate.utils.versions": "compare_versions",
        "slipstream.tracking": """AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker MLflowTracker
            SwanLabTracker TensorBoardTracker TrackioTracker WandBTracker filter_trackers
            get_available_trackers on_main_process register_tracker_class""",
    },
)
