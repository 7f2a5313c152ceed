"""Preemption: on SIGTERM the run saves and ends; started again, it resumes.

    slipstream launch --cpu --num_processes 2 examples/preemption.py --project_dir runs/preemption

Send SIGTERM to the launcher, as clusters do before they take a machine back, and run the same command again. The launcher forwards the
signal to every process, and gives them ten seconds. Without --project_dir the example plays both parts itself, in a temporary folder.
"""

import argparse
import os
import signal
import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.utils import ProjectConfiguration, broadcast_object_list, set_seed

EPOCHS = 4


def train(folder: str, *, signal_after: int | None = None) -> bool:
    """Train from the newest valid checkpoint on, if there is one; return whether training is complete."""
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    signal.signal(signal.SIGTERM, lambda number, frame: accelerator.set_trigger())
    set_seed(0)
    x = torch.randn(256, 4)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02), loader)

    if accelerator.save_iteration:  # the number of the next checkpoint: some exist
        accelerator.print(f"goes on from {os.path.basename(accelerator.load_state())}, in epoch {loader.epoch}")

    batches, loss = 0, torch.zeros(())
    for epoch in range(loader.epoch, EPOCHS):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
            if batches == signal_after and accelerator.is_main_process:
                os.kill(os.getpid(), signal.SIGTERM)  # simulates the cluster
            if accelerator.check_trigger():  # whether any process got the signal: all of them stop at the same batch
                path = accelerator.save_state()  # inside the loop, where the loader knows its position
                accelerator.print(f"told to stop after {batches} batches, in epoch {epoch}: saved {os.path.basename(path)}")
                accelerator.wait_for_everyone()
                return False
        accelerator.save_state()
    accelerator.print(f"done after epoch {EPOCHS - 1}: loss {accelerator.reduce(loss.detach(), reduction='mean').item():.6f}")
    accelerator.wait_for_everyone()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project_dir", help="where the checkpoints are")
    given = parser.parse_args()
    accelerator = Accelerator()
    before = signal.getsignal(signal.SIGTERM)
    try:
        if given.project_dir is not None:
            train(given.project_dir)
        else:
            with tempfile.TemporaryDirectory() as mine:
                folder = broadcast_object_list([mine])[0]
                assert not train(folder, signal_after=45)
                assert train(folder)
                accelerator.wait_for_everyone()
    finally:
        signal.signal(signal.SIGTERM, before)
    accelerator.end_training()


if __name__ == "__main__":
    main()
