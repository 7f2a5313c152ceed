"""Train a tiny GPT-2 with transformers' Trainer and print, on rank 0, when the first step ended, how long later steps took, and the loss.

The time of a step is that of the best window of 20 steps, because others may use the cores; the CPU time is the mean of all steps.

    _trainer_worker.py STEPS [PROFILE]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

WARM = 20
"""Steps that are not timed, and the length of a window."""


def main(steps: int, profile: str | None) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    torch.set_num_threads(1)
    seconds: list[float] = []
    cpu: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Notes when each step ends, by the clock of the whole machine."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds.append(time.time())
            cpu.append(time.process_time())
            if profile and state.global_step == WARM:
                profiler.enable()

    if profile:
        import cProfile

        profiler = cProfile.Profile()
    set_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    rows = torch.randint(1, 128, (256, 16), generator=torch.Generator().manual_seed(0))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=8 // world, max_steps=steps, learning_rate=1e-3, logging_steps=steps,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=data, callbacks=[Clock()])
        trainer.train()
    if profile:
        profiler.disable()
        profiler.dump_stats(profile)
    if trainer.is_world_process_zero():
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        best = min(seconds[at + WARM] - seconds[at] for at in range(WARM, steps - WARM)) / WARM
        mean = (cpu[-1] - cpu[WARM]) / (steps - WARM - 1)
        print("RESULT " + json.dumps({"first": seconds[0], "step": best, "cpu": mean, "loss": loss}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
