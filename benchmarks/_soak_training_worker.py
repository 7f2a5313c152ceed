"""The worker of `soak_training.py` on every rank: training with everything on, which resumes wherever it was ended.

    _soak_training_worker.py FOLDER PROJECT_DIR PACE

A small model with dropout, shuffled data read by a worker process, accumulation, clipping, a schedule, checkpoints every few steps (half
of them async), the run folder, ledger and guards. In FOLDER every rank leaves `status-RANK` (where it is), `losses-RANK` (eight bytes for
every step; a step that is repeated must give the same bits), `usage-RANK.jsonl` (what the process holds, at the end of every epoch) and
`final-RANK.json` (checksums of everything that was trained). The file `until` in FOLDER says after which step to end.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from soak_usage import usage
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.utils import ProjectConfiguration, set_seed

STATUS = struct.Struct("<qqqqd")
"""Launch, attempt, process id, finished steps, time."""
SAMPLES, BATCH = 2048, 8
CHECKPOINT_EVERY = 7
"""Steps; an odd number, so that every other checkpoint is in the middle of an update."""
LOSS = struct.Struct("<d")


class Position:
    """The number of finished steps; in the checkpoint."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Records:
    """What one rank leaves in the folder of the soak."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.launch, self.attempt = int(os.environ.get("SOAK_LAUNCH", "0")), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._status = os.open(folder / f"status-{rank}", os.O_RDWR | os.O_CREAT)
        self._losses = os.open(folder / f"losses-{rank}", os.O_RDWR | os.O_CREAT)
        self._process = psutil.Process()

    def finish_step(self, step: int, loss: float) -> None:
        """Record a finished step. Nothing here is atomic: a rank may be killed in between, and repeats the step."""
        before = os.pread(self._losses, 8, 8 * step)
        now = LOSS.pack(loss)
        if len(before) == 8 and any(before) and before != now:
            was = LOSS.unpack(before)[0]
            self.append("differences.jsonl", rank=self.rank, step=step, was=was.hex(), now=loss.hex(), attempt=self.attempt)
        os.pwrite(self._losses, now, 8 * step)
        os.pwrite(self._status, STATUS.pack(self.launch, self.attempt, os.getpid(), step, time.time()), 0)

    def append(self, name: str, **facts: object) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def sample_usage(self, steps: int) -> None:
        process, role = f"{self.launch}.{self.attempt}.{self.rank}", f"{self.rank} of {os.environ['GROUP_WORLD_SIZE']} machines"
        self.append(f"usage-{self.rank}.jsonl", process=process, role=role, work=steps, **usage(self._process))

    def until(self) -> float:
        try:
            return int((self.folder / "until").read_text())
        except FileNotFoundError:
            return float("inf")


def digest(*trees: Any) -> str:
    """Return a checksum over all tensors and numbers."""
    found = hashlib.sha256()
    for leaf in torch.utils._pytree.tree_leaves(trees):
        found.update(leaf.detach().contiguous().numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return found.hexdigest()


def prepared(accelerator: Accelerator) -> tuple[Any, ...]:
    """Return the model, the optimizer, the data and the schedule."""
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 32, generator=numbers)
    y = (x @ torch.randn(32, 10, generator=numbers)).argmax(dim=1)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    layers = [torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 128), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 500)
    found: tuple[Any, ...] = accelerator.prepare(model, optimizer, loader, schedule)
    return found


def main(folder: Path, project_dir: str, pace: float) -> None:
    project = ProjectConfiguration(project_dir=project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(gradient_accumulation_steps=2, project_config=project)
    set_seed(1)
    model, optimizer, loader, schedule = prepared(accelerator)
    position = Position()
    accelerator.register_for_checkpointing(position)
    accelerator.init_trackers("soak", init_kwargs={"local": {"name": "soak", "resume": True}})
    if accelerator.save_iteration:
        accelerator.load_state()
    records = Records(folder, accelerator.process_index)
    records.append("starts.jsonl", launch=records.launch, attempt=records.attempt, rank=records.rank, step=position.step, time=time.time())
    first = position.step
    for _ in itertools.count():
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), reduction="mean").item()
            position.step += 1
            accelerator.log({"loss": mean}, step=position.step)
            if position.step % CHECKPOINT_EVERY == 0:
                accelerator.save_state(async_save=position.step // CHECKPOINT_EVERY % 4 < 2)
            records.finish_step(position.step, loss.item())
            if position.step >= records.until():
                finish(accelerator, records, position.step, (model, optimizer, schedule))
                return
            time.sleep(pace)
        records.sample_usage(position.step - first)


def finish(accelerator: Accelerator, records: Records, step: int, trained: tuple[Any, ...]) -> None:
    """Write the checksums of this rank, and end."""
    states = {name: digest(part.state_dict()) for name, part in zip(("weights", "optimizer", "schedule"), trained, strict=True)}
    states["random"] = digest(torch.get_rng_state())
    accelerator.end_training()
    (records.folder / f"final-{records.rank}.json").write_text(json.dumps({"step": step, **states}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
