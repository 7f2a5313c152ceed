"""A batch that does not fit on one process is reduced on all of them; nothing of a failed try is left, and no other error is hidden."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from slipstream import Accelerator, PartialState
from slipstream.errors import ConfigError, PeerLostError, StateError
from slipstream.observability.memory import report_if_out_of_memory
from slipstream.training.batch_size import BatchSizeSchedule, find_executable_batch_size


def fitting(limit: int, seen: list[int]) -> Any:
    def train(batch_size: int, *args: Any, **kwargs: Any) -> Any:
        seen.append(batch_size)
        if batch_size > limit:
            raise torch.OutOfMemoryError(f"no room for {batch_size}")
        return batch_size, args, kwargs

    return train


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decorate",
    [
        lambda function: find_executable_batch_size(function, starting_batch_size=16),
        lambda function: find_executable_batch_size(function, 16),
        lambda function: find_executable_batch_size(starting_batch_size=16)(function),
        lambda function: find_executable_batch_size(function=function, starting_batch_size=16, reduce_batch_size_fn=None),
    ],
    ids=["called", "positional", "with parentheses", "by name"],
)
def test_size_is_halved(decorate: Any) -> None:
    """The size is halved until it fits and arguments are passed on."""
    seen: list[int] = []
    assert decorate(fitting(5, seen))("a", b=2) == (4, ("a",), {"b": 2})
    assert seen == [16, 8, 4]


def test_default_starting_size() -> None:
    """Without parentheses it begins with 128."""

    @find_executable_batch_size
    def train(batch_size: int) -> int:
        if batch_size > 100:
            raise MemoryError
        return batch_size

    assert train() == 64


def test_later_call_starts_with_fitting_size() -> None:
    """A later call begins with the size that fitted."""
    seen: list[int] = []
    train = find_executable_batch_size(fitting(5, seen), 16)
    train()
    train()
    assert seen == [16, 8, 4, 4]


def test_reduce_batch_size_fn() -> None:
    """Reduce batch size fn with the present size and with a count of its own."""
    seen: list[int] = []
    find_executable_batch_size(fitting(70, seen), 100, lambda size: size - 15)()
    assert seen == [100, 85, 70]
    counts = iter([50, 20])
    seen.clear()
    find_executable_batch_size(fitting(30, seen), 100, lambda: next(counts))()
    assert seen == [100, 50, 20]


@pytest.mark.parametrize("given", [lambda size: size, lambda size: size * 0.5, lambda: 500, lambda: True, lambda: None])
def test_invalid_next_size_refused(given: Any) -> None:
    """A next size that makes no sense is refused."""
    with pytest.raises(ConfigError, match="reduce_batch_size_fn gave .* after 8 did not fit"):
        find_executable_batch_size(fitting(0, []), 8, given)()


def test_nothing_fits() -> None:
    """When nothing fits the error names the sizes and the last cause."""
    with pytest.raises(StateError, match="train ran out of memory with 4, 2, 1 .the last time: OutOfMemoryError: no room for 1") as caught:
        find_executable_batch_size(fitting(0, []), 4)()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_reduction_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each reduction is reported in one line."""
    with caplog.at_level(logging.WARNING):
        find_executable_batch_size(fitting(3, []), 8)()
    said, alive = zip(*(record.getMessage().split(". When memory ran out: ") for record in caplog.records), strict=True)
    assert said == (
        "batch size 8 did not fit (OutOfMemoryError: no room for 8); trying 4",
        "batch size 4 did not fit (OutOfMemoryError: no room for 4); trying 2",
    )
    assert all("tensor" in text for text in alive)


def test_alive_tensors_logged(caplog: pytest.LogCaptureFixture) -> None:
    """What was alive when it did not fit is reported."""

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        activations = torch.ones(batch_size, 5_000_000)  # larger than what other tests have left
        if batch_size > 2:
            raise MemoryError
        return len(activations)

    with caplog.at_level(logging.WARNING):
        assert train() == 2
    assert "the largest 76.29 MB: float32 [4, 5000000] on cpu" in caplog.text


def test_other_errors_raised() -> None:
    """Other errors are raised as they are."""
    calls = []

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        calls.append(batch_size)
        raise ValueError("out of memory, says the user")

    with pytest.raises(ValueError, match="says the user"):
        train()
    assert calls == [128]


@pytest.mark.parametrize("chained", [False, True])
def test_failed_try_is_freed(chained: bool) -> None:
    """Nothing of the failed try is alive in the next."""
    alive: list[weakref.ref[torch.Tensor]] = []
    found: list[int] = []

    def deeper(activations: torch.Tensor) -> None:
        more = activations * 2
        alive.append(weakref.ref(more))
        cycle: list[Any] = [more]
        cycle.append(cycle)
        try:
            raise MemoryError
        except MemoryError as error:
            if chained:
                raise torch.OutOfMemoryError("again") from error
            raise

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        found.append(sum(reference() is not None for reference in alive))
        activations = torch.ones(batch_size)
        alive.append(weakref.ref(activations))
        deeper(activations)

    with pytest.raises(StateError):
        train()
    gc.collect()
    assert found == [0, 0, 0]
    assert len(alive) == 6


def test_mistakes_in_the_use_are_named() -> None:
    with pytest.raises(TypeError, match="starting_batch_size=64"):
        find_executable_batch_size(64)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"no place for batch_size: write def"):
        find_executable_batch_size(lambda: None)
    with pytest.raises(TypeError, match="no place for batch_size, gradient_accumulation_steps"):
        find_executable_batch_size(lambda batch_size: None, effective_batch_size=8)
    with pytest.raises(TypeError, match="cannot decorate the method"):

        class Trainer:
            @find_executable_batch_size
            def train(self, batch_size: int) -> None: ...

    for name in ("starting_batch_size", "effective_batch_size"):
        for value in (0, -1, 2.5, True, "8"):
            with pytest.raises(ConfigError, match=f"{name}={value!r}"):
                find_executable_batch_size(**{name: value})
    with pytest.raises(ConfigError, match="not a function"):
        find_executable_batch_size(reduce_batch_size_fn=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="called with the batch size that did not fit, or with nothing"):
        find_executable_batch_size(reduce_batch_size_fn=lambda a, b: 1)


def test_filled_in_argument_refused() -> None:
    """Passing what is filled in is named."""

    @find_executable_batch_size
    def train(batch_size: int, model: str) -> str:
        return model

    assert train("m") == train(model="m") == "m"
    for args, kwargs in [((64, "m"), {}), (("m",), {"batch_size": 64}), ((), {}), (("m",), {"other": 1})]:
        with pytest.raises(TypeError, match=r"fills in batch_size by itself, so call it as train\(model\)"):
            train(*args, **kwargs)


def test_effective_batch_constant() -> None:
    """The effective batch stays the same for every size."""
    for processes in (1, 2, 3):
        sizes = BatchSizeSchedule(100, None, effective_batch_size=360)
        tried = [sizes.first(processes)]
        while following := sizes.after(tried[-1], processes):
            tried.append(following)
        assert tried[-1] == 1
        for size in tried:
            batch_size, steps = sizes.arguments(size, processes)
            assert batch_size * processes * steps == 360
        assert sorted(tried, reverse=True) == tried
    with pytest.raises(ConfigError, match="=10 cannot be shared by 4 processes: write a multiple of 4, such as 8 or 12"):
        BatchSizeSchedule(8, None, 10).first(4)


# -- several processes ------------------------------------------------------------------------------------------------


def shortly(seconds: float = 0.7) -> Any:
    """Processes that do not come by themselves are fetched sooner than usual."""
    return mock.patch("slipstream.training.batch_size._GRACE_SECONDS", seconds)


def outcome_of(train: Any) -> Any:
    """The result of a call on a rank, or the type and text of its error."""
    try:
        return train()
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("world", [2, 3])
def test_smallest_fitting_size_everywhere(ranks: Any, world: int) -> None:
    """All ranks take the size that fits on the poorest."""

    def run() -> Any:
        state = PartialState()
        seen: list[int] = []
        limit = 5 if state.process_index == 1 else 100
        size = find_executable_batch_size(fitting(limit, seen), 16)()[0]
        return size, seen, state.gather([state.process_index])

    for size, seen, gathered in ranks(world).run(run):
        assert (size, seen) == (4, [16, 8, 4])
        assert gathered == list(range(world))


def test_log_line_names_rank(ranks: Any) -> None:
    """The line names the rank and is reported once."""

    def run() -> None:
        state = PartialState()
        find_executable_batch_size(fitting(5 if state.process_index == 1 else 9, []), 8)()

    main, other = ranks(2).outcomes(run)
    (line,) = main.output.splitlines()
    assert line.startswith("batch size 8 did not fit (rank 1: OutOfMemoryError: no room for 8); trying 4. When memory ran out: rank 1: ")
    assert other.output == ""


def test_quoted_error(ranks: Any) -> None:
    """A rank that learns in a collective that memory ran out on another one is not named as one that ran out."""

    def run() -> str:
        state = PartialState()

        @find_executable_batch_size(starting_batch_size=2)
        def train(batch_size: int) -> None:
            if state.process_index == 1:
                torch.empty(2**50)
            state.wait_for_everyone()

        try:
            train()
        except StateError as error:
            report_if_out_of_memory(error)
            return str(error)
        return ""

    main, other = ranks(2).outcomes(run)
    for outcome in (main, other):
        assert "(the last time: rank 1: RuntimeError: " in outcome.value
        assert "MismatchError" not in outcome.value
    assert main.output.count("\n") == 1, main.output
    assert "batch size 2 did not fit (rank 1: RuntimeError: " in main.output
    assert "rank 0" not in main.output
    assert "[RANK 1] memory ran out: " in other.output


@pytest.mark.parametrize("world", [2, 3])
def test_rank_in_gather_retries(ranks: Any, world: int) -> None:
    """A rank inside a gather is called away and tries again."""

    def run() -> Any:
        state = PartialState()
        seen: list[int] = []

        @find_executable_batch_size(starting_batch_size=8)
        def train(batch_size: int) -> Any:
            seen.append(batch_size)
            state.gather([batch_size])
            if batch_size > 3 and state.process_index == 1:
                raise MemoryError
            return state.gather([batch_size])

        return train(), seen, torch.distributed.is_initialized()

    assert ranks(world).run(run) == [([2] * world, [8, 4, 2], True)] * world


@pytest.mark.parametrize(("world", "where"), [(3, "inside"), (2, "outside")])
def test_rank_in_backward_retries(ranks: Any, world: int, where: str) -> None:
    """A rank inside a backward of DDP is called away.

    Also if something outside of the function still refers to the model, and so to the process group.
    """

    def run() -> Any:
        state = PartialState()
        kept: list[Any] = []
        alive: list[weakref.ref[Any]] = []

        @find_executable_batch_size(starting_batch_size=8)
        def train(batch_size: int) -> Any:
            assert where == "outside" or all(reference() is None for reference in alive)
            model = DistributedDataParallel(torch.nn.Linear(300, 300))
            alive.append(weakref.ref(model.module.weight))
            if where == "outside":
                kept.append(model)
            loss = model(torch.ones(batch_size, 300)).sum()
            if batch_size > 4 and state.process_index == 1:
                raise MemoryError
            loss.backward()
            return batch_size, model.module.weight.grad is not None

        with shortly():
            return train(), len(alive), state.gather([state.process_index])

    for result, tries, gathered in ranks(world).run(run):
        assert (result, tries) == ((4, True), 2)
        assert gathered == list(range(world))


def test_out_of_memory_in_backward(ranks: Any) -> None:
    """Memory that runs out in the middle of a backward.

    Some buckets of gradients are on their way on the rank that fails.
    """

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
            ctx.fails = fails
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            if ctx.fails:
                raise torch.OutOfMemoryError("in the backward pass")
            return gradient, None

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(400, 400) for _ in range(6))

        def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                x = layer(x)
                if number == 2:
                    x = Fails.apply(x, fails)
            return x

    def run() -> Any:
        state = PartialState()

        @find_executable_batch_size(starting_batch_size=8)
        def train(batch_size: int) -> int:
            model = DistributedDataParallel(Net(), bucket_cap_mb=1)
            model(torch.ones(batch_size, 400), batch_size > 2 and state.process_index == 0).sum().backward()
            return batch_size

        with shortly():
            return train(), state.gather([1])

    assert ranks(2).run(run) == [(2, [1, 1])] * 2


@pytest.mark.parametrize("where", ["before the backward pass", "at its beginning", "in the middle of it", "after it"])
def test_training_script(ranks: Any, where: str) -> None:
    """A training script that prepares inside of the function.

    The usual form, with an Accelerator that lives outside; also on three processes, of which one is neither first nor last.
    """

    def fail(gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("in a hook")

    def run() -> Any:
        accelerator = Accelerator()
        alive: list[weakref.ref[Any]] = []
        found: list[int] = []

        @find_executable_batch_size(starting_batch_size=8)
        def train(batch_size: int) -> Any:
            accelerator.free_memory()
            found.append(sum(reference() is not None for reference in alive))
            layers = [torch.nn.Linear(4, 300), torch.nn.Linear(300, 300), torch.nn.Linear(300, 1)]
            optimizer = torch.optim.SGD(torch.nn.Sequential(*layers).parameters(), lr=0.01)
            data = torch.utils.data.DataLoader(torch.ones(48, 4), batch_size=batch_size)
            model, optimizer, data = accelerator.prepare(torch.nn.Sequential(*layers), optimizer, data)
            alive.append(weakref.ref(layers[0].weight))
            for number, batch in enumerate(data):
                fails = number == 1 and batch_size > 4 and accelerator.process_index == 1
                if fails and where == "before the backward pass":
                    raise MemoryError
                loss = model(batch).mean()
                if fails and where == "at its beginning":
                    loss.register_hook(fail)
                if fails and where == "in the middle of it":
                    layers[0].weight.register_hook(fail)
                accelerator.backward(loss)
                if fails and where == "after it":
                    raise MemoryError
                optimizer.step()
                optimizer.zero_grad()
            return batch_size, len(set(accelerator.gather(loss.detach().reshape(1)).tolist()))

        with shortly():
            return train(), found

    assert ranks(3).run(run) == [((4, 1), [0, 0])] * 3


def test_same_failure_keeps_group(ranks: Any) -> None:
    """The same failure on all ranks keeps the group.

    So a model that was prepared before goes on to work.
    """

    def run() -> Any:
        state = PartialState()
        model = DistributedDataParallel(torch.nn.Linear(4, 4))

        @find_executable_batch_size(starting_batch_size=8)
        def train(batch_size: int) -> int:
            loss = model(torch.ones(batch_size, 4)).sum()
            if batch_size > 2:
                raise MemoryError
            loss.backward()
            return batch_size

        return train(), state._runtime.generation

    assert ranks(2).run(run) == [(2, 1)] * 2


def test_error_of_one_rank_raised(ranks: Any) -> None:
    """An error of one rank is not swallowed."""

    def run(inside: bool) -> None:
        state = PartialState()
        calls = []

        @find_executable_batch_size(starting_batch_size=8)
        def train(batch_size: int) -> None:
            calls.append(batch_size)
            if state.process_index == 1:
                raise RuntimeError("shapes do not match")
            if inside:
                state.gather([1])

        try:
            train()
        finally:
            assert calls == [8]

    for inside in (False, True):
        main, other = ranks(2).outcomes(run, inside)
        assert (type(other.error), str(other.error)) == (RuntimeError, "shapes do not match")
        assert isinstance(main.error, PeerLostError)
        assert "RuntimeError: shapes do not match" in str(main.error) or "rank 1 left the group" in str(main.error)


def test_nothing_fits_on_one_rank(ranks: Any) -> None:
    """When nothing fits on one rank all of them say so."""

    def run() -> Any:
        state = PartialState()
        return outcome_of(find_executable_batch_size(fitting(0 if state.process_index == 1 else 9, []), 2)), state.gather([1])

    for (kind, text), gathered in ranks(2).run(run):
        assert kind == "StateError"
        assert "train ran out of memory with 2, 1 (the last time: rank 1: OutOfMemoryError: no room for 1)" in text
        assert gathered == [1, 1]


def test_different_sizes_are_an_error(ranks: Any) -> None:
    """Sizes that differ between ranks are an error on all."""

    def run() -> Any:
        state = PartialState()
        return outcome_of(find_executable_batch_size(fitting(0, []), 9, lambda size: size - 2 - state.process_index))

    for kind, text in ranks(2).run(run):
        assert kind == "MismatchError"
        assert "try 2 with batch size 7" in text
        assert "try 2 with batch size 6" in text


def test_effective_batch_on_ranks(ranks: Any) -> None:
    """The effective batch on several ranks."""

    def run() -> Any:
        state = PartialState()

        @find_executable_batch_size(effective_batch_size=48, starting_batch_size=100)
        def train(batch_size: int, gradient_accumulation_steps: int) -> tuple[int, int]:
            if batch_size > 5 and state.is_last_process:
                raise MemoryError
            return batch_size, gradient_accumulation_steps

        return train()

    assert ranks(2).run(run) == [(3, 8)] * 2
    assert ranks(3).run(run) == [(4, 4)] * 3


def test_slow_rank_is_waited_for(ranks: Any) -> None:
    """A rank that works for long is waited for.

    Longer than the limit of a collective: the rank that failed waits as long as the other shows signs of life.
    """

    def run() -> Any:
        state = PartialState()

        @find_executable_batch_size(starting_batch_size=8)
        def train(batch_size: int) -> int:
            if batch_size == 8 and state.process_index == 1:
                raise MemoryError
            if batch_size == 8:
                time.sleep(6)
            return batch_size

        return train(), state.gather([state.process_index])

    assert ranks(2).run(run, environ={"SLIPSTREAM_TIMEOUT": "2"}) == [(4, [0, 1])] * 2
