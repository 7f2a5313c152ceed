"""Prepared loaders on a device whose copies complete late: where batches are, what they cost, and that none is read or reused too early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from slipstream import Accelerator
from slipstream.utils import DataLoaderConfiguration


class Samples(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((64,), float(index)), "id": index, "pair": (torch.tensor([index]), f"s{index}")}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Samples(20)[index] for index in range(20))


def accelerator(put_on_device: bool = True, **options: Any) -> Accelerator:
    return Accelerator(device_placement=put_on_device, dataloader_config=DataLoaderConfiguration(**options))


def read(loader: Any) -> tuple[list[list[int]], set[str], set[tuple[int, int, int]]]:
    """Return the ids of the batches, the devices of their tensors, and what each batch cost: copies, copies back, synchronisations."""
    torch.standin.synchronize()
    torch.standin.reset_counters()
    torch.standin.set_delay(copies=0.01)
    kept, costs = [], set()
    for batch in loader:
        found = torch.standin.counters()
        costs.add((found.copies_to_device, found.copies_to_host, found.synchronizations))
        kept.append((batch, batch["x"].sum(dim=1)))  # computed on the device behind the copy
        torch.standin.reset_counters()
    torch.standin.set_delay(copies=0.0)
    for batch, sums in kept:
        assert torch.equal(sums, batch["id"] * 64.0), "read before it had arrived"
        assert torch.equal(batch["x"], batch["id"][:, None].expand(-1, 64).float()), "its source was reused during the copy"
        assert list(batch["pair"][1]) == [f"s{number}" for number in batch["id"].tolist()]
    devices = {str(tensor.device) for batch, _ in kept for tensor in (batch["x"], batch["id"], batch["pair"][0])}
    return [batch["id"].tolist() for batch, _ in kept], devices, costs


@pytest.mark.parametrize("data", ["samples", "stream", "dispatched"])
@pytest.mark.parametrize("pin", [False, True])
def test_one_copy_per_tensor_and_no_wait(ranks: Any, data: str, pin: bool) -> None:
    """Each tensor of a batch is copied once; with `non_blocking` nobody waits, and what is computed from it is right."""

    def run() -> Any:
        found = []
        for non_blocking in (False, True):
            own = accelerator(non_blocking=non_blocking, dispatch_batches=data == "dispatched")
            found.append(read(own.prepare(DataLoader(Stream() if data == "stream" else Samples(20), batch_size=5, pin_memory=pin))))
        return found

    for rank, (waiting, late) in enumerate(ranks(2, device="standin").run(run)):
        ids = [list(range(start, start + 5)) for start in range(5 * rank, 20, 10)]
        assert waiting == (ids, {f"standin:{rank}"}, {(3, 0, 3)})
        assert late == (ids, {f"standin:{rank}"}, {(3, 0, 0)})


def test_workers_and_pinned_memory(ranks: Any) -> None:
    """Workers, a pinning thread, prefetching and late copies together."""

    def run() -> Any:
        options = {"batch_size": 2, "pin_memory": True, "num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}
        loader = accelerator(non_blocking=True).prepare(DataLoader(Samples(16), **options))
        return [read(loader) for _ in range(2)]

    for rank, found in enumerate(ranks(2, device="standin").run(run)):
        ids = [[start, start + 1] for start in range(2 * rank, 16, 4)]
        assert found == [(ids, {f"standin:{rank}"}, {(3, 0, 0)})] * 2


def test_dispatched_batches_are_pinned_where_they_arrive(ranks: Any) -> None:
    """`pin_memory` holds on every rank, not only on the one that reads."""

    def run() -> list[bool]:
        loader = accelerator(dispatch_batches=True).prepare(DataLoader(Samples(8), batch_size=2, pin_memory=True))
        return [batch["x"].is_pinned() and batch["pair"][0].is_pinned() for batch, *_ in loader._batches(0, 0)]

    assert ranks(2, device="standin").run(run) == [[True, True]] * 2


@pytest.mark.parametrize("dispatched", [False, True])
def test_data_that_is_on_the_device(ranks: Any, dispatched: bool) -> None:
    """A dataset in the memory of the device: no copy is made of it, and without placement every rank has its batches there too."""

    def run() -> Any:
        found = []
        for put in (True, False):
            own = accelerator(put, dispatch_batches=dispatched)
            data = torch.arange(8.0, device=own.device)
            torch.standin.reset_counters()
            batches = [batch for (batch,) in own.prepare(DataLoader(TensorDataset(data), batch_size=2))]
            copies = torch.standin.counters().copies_to_device
            found.append(([batch.tolist() for batch in batches], {str(batch.device) for batch in batches}, copies))
        return found

    for rank, found in enumerate(ranks(2, device="standin").run(run)):
        copies = 2 if dispatched and rank else 0  # what another rank has read comes through the host
        assert found == [([[start, start + 1.0] for start in (2.0 * rank, 4.0 + 2 * rank)], {f"standin:{rank}"}, copies)] * 2


def test_placement_may_be_left_out(ranks: Any) -> None:
    """Without placement batches stay on the host, and nothing is copied."""

    def run() -> Any:
        loader = accelerator(False).prepare(DataLoader(Samples(4), batch_size=2))
        torch.standin.reset_counters()
        return {str(batch["x"].device) for batch in loader}, torch.standin.counters().copies_to_device

    assert ranks(1, device="standin").run(run) == [({"cpu"}, 0)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_metrics_in_order_without_waiting(ranks: Any, world: int) -> None:
    """Results are gathered in the order of the dataset, on each rank's device, without repeated samples, copies or synchronisations."""

    def run() -> Any:
        own = accelerator(even_batches=True)
        loader = own.prepare(DataLoader(Samples(22), batch_size=4))
        joined, devices, costs = [], set(), set()
        for batch in loader:
            torch.standin.synchronize()
            torch.standin.reset_counters()
            ids, found = own.gather_for_metrics((batch["id"], {"rows": batch["x"][:, :1], "loss": batch["x"].mean()}))
            spent = torch.standin.counters()
            costs.add((spent.copies_to_device, spent.copies_to_host, spent.synchronizations))
            assert torch.equal(found["rows"].flatten(), ids.float())
            devices |= {str(tensor.device) for tensor in (ids, *found.values())}
            joined += ids.tolist()
        return joined, devices, costs

    for rank, found in enumerate(ranks(world, device="standin").run(run)):
        assert found == (list(range(22)), {f"standin:{rank}"}, {(0, 0, 0)})


def test_positions_do_not_depend_on_the_device(ranks: Any) -> None:
    """A shuffled loader, skipping and resuming give the batches that the CPU gives, on the device."""

    def run() -> Any:
        def make(**options: Any) -> tuple[Accelerator, Any]:
            own = Accelerator(**options)
            return own, own.prepare(DataLoader(Samples(24), batch_size=3, shuffle=True, num_workers=0))

        def ids(batches: Any) -> list[Any]:
            return [(batch["id"].tolist(), str(batch["x"].device)) for batch in batches]

        own, loader = make()
        begin = iter(loader)
        first = ids([next(begin), next(begin)])
        state = loader.state_dict()
        begin.close()
        _, again = make()
        again.load_state_dict(state)
        resumed = ids(again)
        skipped = ids(own.skip_first_batches(make()[1], 2))
        return first, resumed, skipped, [entry for entry, _ in ids(make(cpu=True)[1])]

    for rank, (first, resumed, skipped, on_host) in enumerate(ranks(2, device="standin").run(run)):
        assert [entry for entry, _ in first + resumed] == [entry for entry, _ in first + skipped] == on_host
        assert {device for _, device in first + resumed + skipped} == {f"standin:{rank}"}


def test_default_device_of_torch(ranks: Any) -> None:
    """`torch.set_default_device` moves what the script makes, and neither breaks loaders nor changes the order of samples."""

    def run() -> Any:
        def ids(loader: Any) -> list[Any]:
            return [batch.tolist() for batch in loader]

        def loaders(device: Any) -> list[Any]:
            own, drawn = Accelerator(), torch.Generator(device)
            dispatched = accelerator(dispatch_batches=True)
            return [
                own.prepare(DataLoader(range(12), batch_size=2, shuffle=True)),
                dispatched.prepare(DataLoader(range(12), batch_size=2, shuffle=True, generator=drawn)),
            ]

        expected = [ids(loader) for loader in loaders("cpu")]
        torch.set_default_device(Accelerator().device)
        try:
            sampler = RandomSampler(range(12), replacement=True)
            drawn = ids(Accelerator().prepare(DataLoader(range(12), batch_size=2, sampler=sampler)))
            return [ids(loader) for loader in loaders(Accelerator().device)] == expected, len(drawn)
        finally:
            torch.set_default_device(None)

    assert ranks(2, device="standin").run(run) == [(True, 3)] * 2


def test_pinned_stream_leaves_random_states_alone(ranks: Any) -> None:
    """Reading a stream into pinned memory draws nothing from the script's random state."""

    def run() -> bool:
        loader = accelerator().prepare(DataLoader(Stream(), batch_size=5, pin_memory=True))
        before = torch.get_rng_state()
        device = torch.standin.get_rng_state()
        assert len(list(loader)) == 4
        return torch.equal(torch.get_rng_state(), before) and torch.equal(torch.standin.get_rng_state(), device)

    assert ranks(1, device="standin").run(run) == [True]
