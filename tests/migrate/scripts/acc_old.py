"""A script for an old version: fp16, options of loaders as arguments, a logging folder, DeepSpeed's placeholders, variables."""

import os

import torch

import accelerate.utils
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, get_max_memory, set_seed

os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"
os.environ["ACCELERATE_DYNAMO_SOMETHING"] = "1"
accelerator = Accelerator(fp16=True, dispatch_batches=True, even_batches=False, logging_dir="logs")
if accelerator.state.deepspeed_plugin is not None and "optimizer" in accelerator.deepspeed_plugin.deepspeed_config:
    optimizer = DummyOptim(torch.nn.Linear(1, 1).parameters(), DeepSpeedPlugin)
    scheduler = DummyScheduler(optimizer)
set_seed(0)
accelerate.utils.release_memory(get_max_memory())
