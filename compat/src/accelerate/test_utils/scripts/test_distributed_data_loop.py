"""Checks loops over data that does not divide evenly: `even_batches`, `join_uneven_inputs`, and resuming a loader."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.test_utils.scripts._checks import expect, run_checks
from accelerate.utils import DataLoaderConfiguration, gather_object


def _fresh(**options: bool) -> Accelerator:
    AcceleratorState._reset_state()
    return Accelerator(dataloader_config=DataLoaderConfiguration(**options))


def _sizes(accelerator: Accelerator, length: int, batch_size: int) -> list[list[int]]:
    loader = accelerator.prepare(DataLoader(torch.arange(length), batch_size=batch_size))
    return gather_object([[len(batch) for batch in loader]])


def check_even_batches() -> None:
    """even_batches: all processes get the same number of batches of the same size"""
    accelerator = _fresh(even_batches=True)
    found = _sizes(accelerator, 2 * accelerator.num_processes + 1, 2)
    expect([sizes == found[0] for sizes in found], [True] * accelerator.num_processes, f"the sizes {found}")


def check_uneven_batches() -> None:
    """even_batches=False: every sample once, and the last process may have fewer"""
    accelerator = _fresh(even_batches=False)
    length = 2 * accelerator.num_processes + 1
    found = _sizes(accelerator, length, 2)
    expect(sum(map(sum, found)), length, f"samples in {found}")


def check_join() -> None:
    """join_uneven_inputs: the process with more batches does not wait for ever"""
    accelerator = _fresh(even_batches=False)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    length = accelerator.num_processes + 1
    loader = accelerator.prepare(DataLoader(torch.arange(float(length))[:, None], batch_size=1))
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            accelerator.backward(model(batch.float()).sum())
    finished = gather_object([accelerator.process_index])
    expect(finished, list(range(accelerator.num_processes)), "the processes that came out")


def check_join_override() -> None:
    """join_uneven_inputs(even_batches=...): changes it inside the block, and not after it"""
    accelerator = _fresh(even_batches=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = accelerator.prepare(DataLoader(torch.arange(float(accelerator.num_processes + 1))[:, None], batch_size=1))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        inside = gather_object([len(list(loader))])
    after = gather_object([len(list(loader))])
    expect(len(set(after)), 1, f"batches after the block, {after} (inside: {inside})")


CHECKS = (check_even_batches, check_uneven_batches, check_join, check_join_override)


def main() -> None:
    """Run every check."""
    run_checks(CHECKS)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
