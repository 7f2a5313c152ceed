"""What a profiler sees of prepared loaders is what it sees of torch's."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator


def marks(loader: DataLoader) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        list(loader)
    return sum(event.count for event in profiler.key_averages() if "DataLoader" in event.key)


def test_profiler_sees_every_batch() -> None:
    """A profiler sees every batch of a prepared loader."""
    plain = DataLoader(TensorDataset(torch.arange(12)), batch_size=4)
    assert marks(Accelerator(cpu=True).prepare(plain)) == marks(plain) > 2


def test_profiling_within_a_pass() -> None:
    """Profiling can begin and end within a pass."""
    loader = Accelerator(cpu=True).prepare(DataLoader(TensorDataset(torch.arange(12)), batch_size=4))
    batches = iter(loader)
    seen = next(batches)[0].tolist()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        seen += next(batches)[0].tolist()
    seen += next(batches)[0].tolist()
    assert seen == list(range(12))
    assert list(batches) == []
