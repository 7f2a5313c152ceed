"""Checks that the shards of an FSDP model, merged into one file, are the weights of the model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.test_utils.scripts._checks import expect_close, run_checks
from accelerate.utils import broadcast_object_list, merge_fsdp_weights, set_seed


def check_merge() -> None:
    """Merged shards equal the whole state dict"""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(fsdp_plugin=plugin)
    set_seed(0)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)))
    whole = accelerator.get_state_dict(model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(broadcast_object_list([name])[0])
        accelerator.save_state(str(folder / "checkpoint"))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shards = next((path for path in (folder / "checkpoint").glob("pytorch_model_fsdp_*")), folder / "checkpoint")
            merge_fsdp_weights(str(shards), str(folder / "merged"))
            from safetensors.torch import load_file

            merged = load_file(folder / "merged" / "model.safetensors")
            for key, value in whole.items():
                expect_close(merged[key], value, key)
        accelerator.wait_for_everyone()


def main() -> None:
    """Run the check."""
    run_checks((check_merge,))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
