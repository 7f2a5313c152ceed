"""Names of `accelerate.commands.config.config`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.cluster": "get_cluster_input",
        "accelerate.commands.config.config_args": "load_config_from_file",
        "accelerate.commands.config.sagemaker": "get_sagemaker_input",
        "accelerate.utils.dataclasses": "ComputeEnvironment",
    },
)
