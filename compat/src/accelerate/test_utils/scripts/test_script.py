"""The script of `accelerate test`: does what an ordinary training script does, and compares with one process.

    accelerate launch test_script.py
    accelerate launch --cpu --num_processes 2 test_script.py
"""

from __future__ import annotations

import contextlib
import io

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, PartialState
from accelerate.data_loader import skip_first_batches
from accelerate.state import AcceleratorState
from accelerate.test_utils.scripts._checks import expect, expect_close, run_checks
from accelerate.test_utils.training import RegressionDataset, RegressionModel
from accelerate.utils import DataLoaderConfiguration, gather, gather_object, set_seed, synchronize_rng_states

_LENGTH = 48
_EPOCHS = 3


class _Numbers(IterableDataset):
    """The numbers from 0, as a stream."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(torch.arange(self.length))


def _fresh() -> None:
    AcceleratorState._reset_state()


def check_process_control() -> None:
    """Process control: functions that run on some processes, and turns"""
    accelerator = Accelerator()
    state = accelerator.state
    ran: list[str] = []
    accelerator.on_main_process(lambda: ran.append("main"))()
    accelerator.on_local_main_process(lambda: ran.append("local"))()
    accelerator.on_last_process(lambda: ran.append("last"))()
    accelerator.on_process(lambda: ran.append("zero"), process_index=0)()
    wanted = [
        *(["main"] if accelerator.is_main_process else []),
        *(["local"] if accelerator.is_local_main_process else []),
        *(["last"] if accelerator.is_last_process else []),
        *(["zero"] if state.process_index == 0 else []),
    ]
    expect(ran, wanted, "functions for some processes")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        accelerator.print("once")
    expect(printed.getvalue(), "once\n" if accelerator.is_local_main_process else "", "accelerator.print")
    with accelerator.main_process_first():
        pass


def check_split() -> None:
    """Splitting lists, tensors and dictionaries between processes"""
    state = PartialState()
    items = list(range(state.num_processes * 2 + 1))
    with state.split_between_processes(items) as mine:
        everything = gather_object(list(mine))
    expect(everything, items, "split_between_processes")
    with state.split_between_processes(items, apply_padding=True) as mine:
        lengths = gather_object([len(mine)])
    expect(len(set(lengths)), 1, "the lengths after padding")
    with state.split_between_processes({"a": items, "b": torch.tensor(items)}) as mine:
        expect(list(mine["b"]), [torch.tensor(value) for value in mine["a"]], "a dictionary that is split")


def check_random_states() -> None:
    """Random states: set apart, then made equal"""
    set_seed(1 + PartialState().process_index)
    synchronize_rng_states(["torch"])
    drawn = gather(torch.get_rng_state().to(PartialState().device)[None])
    expect(all(torch.equal(drawn[0], row) for row in drawn), True, "the random states after synchronizing")


def _seen(accelerator: Accelerator, loader: DataLoader) -> list[int]:
    found: list[torch.Tensor] = []
    for batch in loader:
        found.append(accelerator.gather(batch).cpu())
    return torch.cat(found).tolist()


def check_data() -> None:
    """Data loaders: every sample arrives, in every way of sharing them out"""
    for split_batches in (False, True):
        for dispatch in (False, True):
            _fresh()
            options = DataLoaderConfiguration(split_batches=split_batches, dispatch_batches=dispatch)
            accelerator = Accelerator(dataloader_config=options)
            size = 4 * accelerator.num_processes if split_batches else 4
            length = 8 * accelerator.num_processes
            loader = accelerator.prepare(DataLoader(torch.arange(length), batch_size=size))
            expect(_seen(accelerator, loader), list(range(length)), f"split_batches={split_batches} dispatch_batches={dispatch}")
            shuffled = accelerator.prepare(DataLoader(torch.arange(length), batch_size=size, shuffle=True))
            expect(sorted(_seen(accelerator, shuffled)), list(range(length)), "shuffled data")
            stream = accelerator.prepare(DataLoader(_Numbers(length), batch_size=size))
            expect(sorted(_seen(accelerator, stream)), list(range(length)), "a stream")
    _fresh()


def check_uneven_data() -> None:
    """Data that does not divide evenly: wrapped around for training, and cut for metrics"""
    accelerator = Accelerator()
    length = 4 * accelerator.num_processes + 3
    loader = accelerator.prepare(DataLoader(torch.arange(length), batch_size=2))
    found = torch.cat([accelerator.gather_for_metrics(batch).cpu() for batch in loader]).tolist()
    expect(found, list(range(length)), "gather_for_metrics")
    counts = gather_object([sum(len(batch) for batch in loader)])
    expect(len(set(counts)), 1, "samples per process")


def check_skipping() -> None:
    """Skipping the first batches"""
    accelerator = Accelerator()
    length = 8 * accelerator.num_processes
    loader = accelerator.prepare(DataLoader(torch.arange(length), batch_size=2))
    rest = _seen(accelerator, skip_first_batches(loader, 2))
    expect(rest, list(range(4 * accelerator.num_processes, length)), "what is left after two batches")


def _train_alone(batch_size: int) -> RegressionModel:
    """Train without any library, on all samples."""
    set_seed(42)
    data = RegressionDataset(length=_LENGTH, seed=42)
    model = RegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(_EPOCHS):
        for batch in DataLoader(data, batch_size=batch_size):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
    return model


def check_training() -> None:
    """Training: the same weights as one process that sees the whole batch"""
    processes = PartialState().num_processes
    alone = _train_alone(8 * processes)
    for split_batches in (False, True):
        _fresh()
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split_batches))
        set_seed(42)
        model = RegressionModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        size = 8 * processes if split_batches else 8
        loader = DataLoader(RegressionDataset(length=_LENGTH, seed=42), batch_size=size)
        loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
        for _ in range(_EPOCHS):
            for batch in loader:
                model.train()
                loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        trained = accelerator.unwrap_model(model)
        expect_close(trained.a, alone.a, f"the slope with split_batches={split_batches}", 1e-5)
        expect_close(trained.b, alone.b, f"the offset with split_batches={split_batches}", 1e-5)
    _fresh()


def check_precision() -> None:
    """Mixed precision: computes in the half format, returns float32, and learns"""
    _fresh()
    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(42)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(RegressionDataset(length=_LENGTH, seed=42), batch_size=8)
    loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
    losses = []
    for _ in range(_EPOCHS):
        for batch in loader:
            output = model(batch["x"][:, None])
            expect(output.dtype, torch.float32, "the dtype of outputs")
            loss = torch.nn.functional.mse_loss(output, batch["y"][:, None])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    expect(losses[-1] < losses[0], True, "the loss falls")
    _fresh()


def check_trigger() -> None:
    """A trigger that one process sets is seen by all, once"""
    accelerator = Accelerator()
    expect(accelerator.check_trigger(), False, "a trigger that nobody set")
    if accelerator.is_main_process:
        accelerator.set_trigger()
    expect(accelerator.check_trigger(), True, "a trigger that the main process set")
    expect(accelerator.check_trigger(), False, "a trigger after it was seen")


CHECKS = (
    check_process_control, check_split, check_random_states, check_data, check_uneven_data, check_skipping, check_training, check_precision,
    check_trigger,
)


def main() -> None:
    """Run every check."""
    state = PartialState()
    if state.is_main_process:
        print(f"{state.num_processes} process(es), {state.distributed_type}, device {state.device}", flush=True)
    run_checks(CHECKS)
    state.destroy_process_group()


if __name__ == "__main__":
    main()
