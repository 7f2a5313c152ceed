"""What scripts ask an Accelerator and its state about engines, and options that were given to the wrong place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from slipstream import Accelerator, AcceleratorState, GradientState, PartialState
from slipstream.utils import DataLoaderConfiguration, TorchDynamoPlugin

NO_ENGINE = {
    "deepspeed_plugin": None,
    "deepspeed_plugins": None,
    "fsdp_plugin": None,
    "megatron_lm_plugin": None,
    "torch_tp_plugin": None,
    "parallelism_config": None,
    "device_mesh": None,
    "dynamo_plugin": None,
    "is_fsdp2": False,
}
OF_ACCELERATOR = {
    "deepspeed_plugin": None,
    "parallelism_config": None,
    "torch_device_mesh": None,
    "is_fsdp2": False,
    "is_composable_parallelism_enabled": False,
    "deepspeed_engine_wrapped": None,
    "deepspeed_config": None,
    "has_lomo_optimizer": False,
}


def test_engines() -> None:
    """Scripts that ask which engine is in use hear that there is none."""
    accelerator = Accelerator(cpu=True)
    for state in (accelerator.state, AcceleratorState(cpu=True)):
        assert {name: getattr(state, name) for name in NO_ENGINE} == NO_ENGINE
    assert {name: getattr(accelerator, name) for name in OF_ACCELERATOR} == OF_ACCELERATOR


def test_dynamo_plugin() -> None:
    """The state of an Accelerator that compiles has the plugin."""
    compiling = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager", fullgraph=True))
    assert compiling.state.dynamo_plugin.to_kwargs() == {"backend": "eager", "fullgraph": True}
    assert Accelerator(cpu=True).state.dynamo_plugin is None


def test_context_parallel() -> None:
    """Without a mesh for it, context parallelism is a block that does nothing."""
    accelerator = Accelerator(cpu=True)
    buffer = torch.arange(6.0).reshape(2, 3)
    with accelerator.maybe_context_parallel(buffers=[buffer], buffer_seq_dims=[1], no_restore_buffers={buffer}):
        assert buffer.tolist() == [[0, 1, 2], [3, 4, 5]]
    with accelerator.maybe_context_parallel():
        pass


def test_dataloader_config() -> None:
    """Options of loaders can be replaced as a whole; loaders that are prepared afterwards follow them."""
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config = DataLoaderConfiguration(split_batches=True, data_seed=7)
    assert accelerator.split_batches
    assert accelerator.prepare(DataLoader(range(4), shuffle=True)).seed == 7
    with pytest.raises(TypeError, match=re.escape("accelerator.dataloader_config = DataLoaderConfiguration(...)")):
        accelerator.dataloader_config = {"split_batches": True}


@pytest.mark.parametrize(
    ("option", "written"),
    [
        ({"resume": "auto"}, "Accelerator(dataloader_config=DataLoaderConfiguration(resume='auto'))"),
        ({"dispatch_batches": True}, "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))"),
        ({"num_steps": 2}, "Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))"),
        ({"total_limit": 3}, "Accelerator(project_config=ProjectConfiguration(total_limit=3))"),
        ({"fullgraph": True}, "Accelerator(dynamo_plugin=TorchDynamoPlugin(fullgraph=True))"),
        ({"find_unused_parameters": True}, "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])"),
        ({"enabled": False}, "Accelerator(kwargs_handlers=[AutocastKwargs(enabled=False)])"),
    ],
)
def test_misplaced(option: dict[str, Any], written: str) -> None:
    """An option of a plugin that was given to Accelerator is a TypeError that shows where to write it."""
    with pytest.raises(TypeError, match=re.escape(written)):
        Accelerator(cpu=True, **option)


def test_reset_state(ranks: Any) -> None:
    """After `_reset_state` the next state reads the environment again and works."""

    def run() -> Any:
        before = PartialState()
        GradientState._reset_state()
        AcceleratorState._reset_state()
        assert before.gather([before.process_index]) == list(range(before.num_processes))
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        after = Accelerator()
        return after.gather(torch.tensor([after.process_index])).tolist()

    assert ranks(1).run(run) == [[0]]
    assert ranks(2).run(run) == [[0, 1], [0, 1]]
