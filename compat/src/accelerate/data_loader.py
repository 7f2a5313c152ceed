"""Prepared loaders, and the samplers that share batches out to processes."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate._batch_sharding": "BatchSamplerShard IterableDatasetShard SeedableRandomSampler SkipBatchSampler get_sampler",
        "accelerate.logging": "get_logger",
        "accelerate.state": "GradientState PartialState",
        "accelerate.utils.dataclasses": "DistributedType RNGType",
        "accelerate.utils.imports": "is_datasets_available is_torch_xla_available is_torchdata_stateful_dataloader_available",
        "accelerate.utils.operations": """broadcast broadcast_object_list concatenate find_batch_size get_data_structure
            initialize_tensors send_to_device slice_tensors""",
        "accelerate.utils.random": "synchronize_rng_states",
        "accelerate.utils.versions": "compare_versions is_torch_version",
        "slipstream": "prepare_data_loader skip_first_batches",
    },
)
