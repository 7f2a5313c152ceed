"""Everything of a complete example: trackers, checkpoints by steps, resuming with skipped batches, saving weights."""

import os

import torch

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.logging import get_logger
from accelerate.tracking import TensorBoardTracker
from accelerate.utils import ProjectConfiguration, set_seed

logger = get_logger(__name__)


def training_function(config, args, model, optimizer, train_dataloader, lr_scheduler):
    # Initialize accelerator
    dataloader_config = DataLoaderConfiguration(use_stateful_dataloader=args.use_stateful_dataloader)
    if args.with_tracking:
        accelerator = Accelerator(
            cpu=args.cpu, mixed_precision=args.mixed_precision, dataloader_config=dataloader_config, log_with="all", project_dir=args.project_dir
        )
    else:
        accelerator = Accelerator(
            cpu=args.cpu, mixed_precision=args.mixed_precision, dataloader_config=dataloader_config
        )

    if hasattr(args.checkpointing_steps, "isdigit"):
        checkpointing_steps = args.checkpointing_steps
    if args.with_tracking:
        run = os.path.split(__file__)[-1].split(".")[0]
        accelerator.init_trackers(run, config)
        assert isinstance(accelerator.get_tracker("tensorboard"), TensorBoardTracker)
    set_seed(int(config["seed"]))
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)

    overall_step = resume_step = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        resume_step = int(os.path.splitext(os.path.basename(args.resume_from_checkpoint))[0].replace("step_", ""))

    for epoch in range(int(config["num_epochs"])):
        active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step) if resume_step else train_dataloader
        for step, batch in enumerate(active_dataloader):
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if overall_step % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
        if args.with_tracking:
            accelerator.log({"epoch": epoch}, step=overall_step)
        logger.info("done", main_process_only=True)
    accelerator.save_model(model, args.output_dir, max_shard_size="1GB")
    ProjectConfiguration(total_limit=1)
    accelerator.end_training()


def unused():
    torch.zeros(1)
