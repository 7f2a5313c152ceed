"""Checks metrics over several processes: predictions that are gathered give the figures of one process, whatever the sizes."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.test_utils.scripts._checks import expect, run_checks
from accelerate.test_utils.training import RegressionDataset, RegressionModel
from accelerate.utils import DataLoaderConfiguration, set_seed


def _predictions(length: int, batch_size: int, **options: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gathered predictions and labels, and the predictions of one process."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    set_seed(42)
    data = RegressionDataset(length=length, seed=7)
    model = RegressionModel(2, 3)
    size = batch_size * accelerator.num_processes if options.get("split_batches") else batch_size
    prepared, loader = accelerator.prepare(model, DataLoader(data, batch_size=size))
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for batch in loader:
        with torch.no_grad():
            found.append(accelerator.gather_for_metrics((prepared(batch["x"]), batch["y"])))
    alone = RegressionModel(2, 3)(torch.tensor(data.x)).detach()
    return torch.cat([pair[0] for pair in found]).cpu(), torch.cat([pair[1] for pair in found]).cpu(), alone


def check_lengths() -> None:
    """Every length and way of sharing out gives each prediction once, in order"""
    for length in (16, 17, 30, 33):
        for split_batches in (False, True):
            for dispatch_batches in (False, True):
                ours, labels, alone = _predictions(length, 4, split_batches=split_batches, dispatch_batches=dispatch_batches)
                what = f"{length} samples, split_batches={split_batches}, dispatch_batches={dispatch_batches}"
                expect(len(ours), length, f"predictions of {what}")
                expect(len(labels), length, f"labels of {what}")
                expect(bool(torch.allclose(ours, alone)), True, f"the predictions of {what}")


def check_objects() -> None:
    """Lists that are no tensors are gathered, and cut, too"""
    AcceleratorState._reset_state()
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(list(range(11)), batch_size=2))
    found: list[int] = []
    for batch in loader:
        found += accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
    expect(found, list(range(11)), "gathered objects")


def main() -> None:
    """Run every check."""
    run_checks((check_lengths, check_objects))
    AcceleratorState._reset_state()
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
