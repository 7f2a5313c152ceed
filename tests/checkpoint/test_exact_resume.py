"""A run that was stopped and goes on equals one that never stopped, bit for bit, wherever it was cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from runs import Run, begin, steps

from slipstream import Accelerator, skip_first_batches
from slipstream.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, GradScalerKwargs

HARD: dict[str, Any] = {"mixed_precision": "fp16", "gradient_accumulation_steps": 4}


def scaled() -> dict[str, Any]:
    """fp16 with a scale that moves within the run."""
    return {**HARD, "kwargs_handlers": [GradScalerKwargs(init_scale=2.0**17, growth_interval=3)]}


def straight(folder: Path, every: int, **options: Any) -> tuple[list[Any], list[int], torch.Tensor, int]:
    """A run of one epoch and a bit that saves after every so many batches."""
    run = begin(**options)
    came = []
    for number, step in enumerate(steps(run, run.loader)):
        came.append(step)
        if number % every == 0:
            run.accelerator.save_state(folder / f"after_{number}")
    run.accelerator.wait_for_everyone()
    epoch = len(came)
    for number, step in enumerate(steps(run, run.loader)):
        came.append(step)
        if number == 2:
            break
    return came, run.counter.seen, run.weights(), epoch


def disturb() -> None:
    """Anything may happen between two runs."""
    torch.rand(100), random.random(), numpy.random.rand(3)
    torch.manual_seed(77)


def go_on(run: Run, folder: Path, skipped: int | None) -> tuple[list[Any], list[int], torch.Tensor]:
    disturb()
    run.accelerator.load_state(folder)
    loader = run.loader if skipped is None else skip_first_batches(run.loader, skipped)
    came = list(steps(run, loader))
    for number, step in enumerate(steps(run, run.loader)):
        came.append(step)
        if number == 2:
            break
    return came, run.counter.seen, run.weights()


def compare_all(folder: Path, every: int, *, by_itself: bool, **options: Any) -> int:
    """Cuts a run everywhere, and compares each rest with that of the straight run; how many cuts there were."""
    came, seen, weights, epoch = straight(folder, every, **options)
    if not by_itself:
        options = {**options, "dataloader_config": DataLoaderConfiguration(resume="manual")}
    for cut in range(0, epoch, every):
        run = begin(seed=11, **options)
        rest, again, ended = go_on(run, folder / f"after_{cut}", None if by_itself else cut + 1)
        assert [str(step) for step in rest] == [str(step) for step in came[cut + 1 :]], cut  # a norm may be nan, which equals nothing
        assert torch.equal(ended, weights), cut
        assert again == seen or not run.accelerator.is_main_process, cut  # registered objects are those of the main process
        run.accelerator.free_memory()
    return len(range(0, epoch, every))


def test_every_cut_of_an_epoch(tmp_path: Path) -> None:
    """Every cut of an epoch goes on bit for bit."""
    assert compare_all(tmp_path, 1, by_itself=False, **scaled()) == 40


def test_next_loop_goes_on_by_itself(tmp_path: Path) -> None:
    """The next loop goes on by itself."""
    assert compare_all(tmp_path, 3, by_itself=True, **scaled()) == 14


def test_loaders_with_workers(tmp_path: Path) -> None:
    """Loaders with workers go on bit for bit."""
    assert compare_all(tmp_path, 13, by_itself=True, workers=2, **HARD) == 4


def test_every_cut_on_two_processes(ranks: Any, tmp_path: Path) -> None:
    """Every cut on two processes goes on bit for bit."""
    def cut_everywhere() -> int:
        return compare_all(tmp_path, 1, by_itself=False, batch_size=2, **scaled())

    assert ranks(2).run(cut_everywhere) == [40, 40]


@pytest.mark.parametrize(("world", "batch_size"), [(3, 3), (4, 2)], ids=["short last batch", "four"])
def test_more_than_two_processes(ranks: Any, tmp_path: Path, world: int, batch_size: int) -> None:
    """The order of a sum of three or more depends on the buckets, which are the same in every pass."""
    def cut_everywhere() -> int:
        return compare_all(tmp_path, 5, by_itself=True, batch_size=batch_size, **HARD)

    assert set(ranks(world).run(cut_everywhere)) == {4}


@pytest.mark.parametrize("options", [{}, {"static_graph": True, "find_unused_parameters": True}], ids=["plain", "static"])
def test_buckets_of_a_method_and_of_an_unused_forward(ranks: Any, options: dict[str, Any]) -> None:
    """Gradients lie in the same buckets, from the last parameter to the first, in every pass, also where a forward led to no loss."""
    def buckets() -> list[list[str]]:
        accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        layers = [torch.nn.Linear(4, 4) for _ in range(3)]
        model = accelerator.prepare(torch.nn.Sequential(*layers))
        names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
        seen: list[list[str]] = []

        def look(state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            seen.append([names[parameter.data_ptr()] for parameter in bucket.parameters()])
            return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

        look.__annotations__.clear()
        model.register_comm_hook(None, look)
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 4)).sum())
        if not options:  # torch averages every pass of a static graph
            model(torch.ones(1, 4))
            with accelerator.no_sync(model):
                accelerator.backward(model(torch.ones(1, 4)).sum())
        accelerator.backward(model(torch.ones(1, 4)).sum())
        return seen

    expected = ["2.bias", "2.weight", "1.bias", "1.weight", "0.bias", "0.weight"]
    assert ranks(2).run(buckets) == [[expected] * 3] * 2


@pytest.mark.parametrize(("before", "after", "device"), [(2, 1, None), (1, 2, None), (2, 4, None), (4, 2, "standin")])
@pytest.mark.parametrize("cut", [6, 7], ids=["inside of an update", "between updates"])
def test_other_number_of_processes(
    ranks: Any, tmp_path: Path, before: int, after: int, device: str | None, cut: int
) -> None:
    """Another number of processes goes on with the same samples."""
    def straight_on() -> Any:
        run = begin(batch_size=8 // before, gradient_accumulation_steps=2)
        run.model.eval()  # every process has random numbers of its own
        for number, _ in enumerate(steps(run, run.loader)):
            if number == cut:
                run.accelerator.save_state(tmp_path / "middle")
        read = (cut + 1) * 8 // before
        return run.counter.seen[:read], run.counter.seen[read:], run.weights()

    def go_on_elsewhere() -> Any:
        run = begin(batch_size=8 // after, gradient_accumulation_steps=2)
        run.model.eval()
        run.accelerator.load_state(tmp_path / "middle")
        run.counter.seen = []
        list(steps(run, run.loader))
        return run.counter.seen, run.weights()

    first, second = ranks(before, device=device).run(straight_on), ranks(after, device=device).run(go_on_elsewhere)
    read, left = (sorted(sum((entry[part] for entry in first), [])) for part in (0, 1))
    assert sorted(sum((entry[0] for entry in second), [])) == left
    assert not set(read) & set(left)
    for _, weights in second:
        torch.testing.assert_close(weights, first[0][2], rtol=1e-5, atol=1e-6)
