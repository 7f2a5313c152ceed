"""Collectives over data in the memory of a device: results are on the device of each rank, and nothing goes through the host needlessly."""

from __future__ import annotations

import types
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from slipstream import MismatchError, PartialState
from slipstream.distributed.current import current
from slipstream.utils import copy_tensor_to_devices, set_seed, synchronize_rng_states


def values(data: Any) -> Any:
    """Return nested data with (device, type, values) in the place of tensors, which can leave the rank."""
    if isinstance(data, torch.Tensor):
        return str(data.device), str(data.dtype).removeprefix("torch."), data.detach().cpu().tolist()
    if isinstance(data, dict):
        return {key: values(item) for key, item in data.items()}
    return [values(item) for item in data] if isinstance(data, list | tuple) else data


def costs() -> tuple[int, int, int, int]:
    """Return copies to the device and to the host, synchronisations and collectives since the last call."""
    found = torch.standin.counters()
    torch.standin.reset_counters()
    return found.copies_to_device, found.copies_to_host, found.synchronizations, found.collectives


def test_facts_of_a_rank(ranks: Any) -> None:
    """Each rank has the device of its local rank, and torch's group the backend of the device beside gloo for the host."""

    def run() -> list[Any]:
        state = PartialState()
        group = dist.group.WORLD
        assert group is not None
        backends = {str(device): group._get_backend(device).name() for device in group._device_types}
        return [str(state.device), torch.standin.current_device(), state.distributed_type.value, state.backend, backends]

    for rank, facts in enumerate(ranks(2, device="standin").run(run)):
        assert facts == [f"standin:{rank}", rank, "MULTI_GPU", "standin", {"cpu": "gloo", "standin": "standin"}]


def test_opening_the_group_warns_of_nothing(ranks: Any) -> None:
    """torch warns of a group of several backends without a default one; ours has that of the device."""
    outcomes = ranks(2, device="standin").outcomes(lambda: PartialState().destroy_process_group())
    assert [(outcome.error, outcome.output) for outcome in outcomes] == [(None, "")] * 2


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gather_of_all_types_and_shapes(ranks: Any, world: int) -> None:
    """A gather of device tensors equals that of the same tensors on the host, and is on the rank's own device."""
    kinds = ("float16", "bfloat16", "float8_e4m3fn", "bool", "int8", "int16", "uint16", "int64", "float64", "complex64")

    def make(rank: int, device: Any) -> dict[str, Any]:
        data = {kind: torch.arange(rank + 1).to(getattr(torch, kind)).to(device) for kind in kinds}
        data |= {"number": torch.tensor(rank, device=device), "nothing": torch.empty(0, 3, device=device)}
        data |= {"none on rank 0": torch.full((rank, 2), rank, device=device)}
        data |= {"transposed": torch.arange(6, device=device).view(2, 3).t() * rank}
        data |= {"column": torch.arange(8, device=device).view(4, 2)[::2, 1], "expanded": torch.ones(1, device=device).expand(3)}
        return data

    def run() -> Any:
        state = PartialState()
        rank, device = state.process_index, state.device
        got = state.gather({"device": make(rank, device), "host": torch.tensor([rank]), "text": [f"r{rank}"]})
        twin = state.gather({"device": make(rank, "cpu"), "host": torch.tensor([rank]), "text": [f"r{rank}"]})
        assert {tensor.device for tensor in got["device"].values()} == {device}
        assert values({**got["device"]}) == {key: (str(device), *rest) for key, (_, *rest) in values({**twin["device"]}).items()}
        return got["host"].tolist(), got["text"]

    assert ranks(world, device="standin").run(run) == [(list(range(world)), [f"r{rank}" for rank in range(world)])] * world


def test_costs_of_collectives(ranks: Any) -> None:
    """A tree of device tensors is one collective of the device's backend: no copy through the host, and nobody waits."""

    def run() -> list[Any]:
        state = PartialState()
        tree = {str(number): torch.ones(4, 4, device=state.device) for number in range(5)}
        state.gather(tree)
        torch.standin.synchronize()
        costs()
        found = []
        for act in (
            lambda: state.gather(tree),
            lambda: state.gather_for_metrics(tree),
            lambda: state.reduce(tree, "mean"),
            lambda: state.broadcast(tree, 1),
            lambda: state.pad_across_processes(tree),
            lambda: state.gather(torch.empty(0, 2, device=state.device)),
            lambda: state.wait_for_everyone(),
        ):
            act()
            found.append(costs())
        return found

    expected = [(0, 0, 0, 1)] * 4 + [(0, 0, 0, 0)] * 3
    assert ranks(2, device="standin").run(run) == [expected] * 2


def test_late_collectives_are_waited_for_on_the_device(ranks: Any) -> None:
    """Collectives complete late: their results are right all the same, and the data of the user may change at once."""

    def run() -> Any:
        state = PartialState()
        torch.standin.set_delay(copies=0.05)
        own = torch.full((3,), float(state.process_index + 1), device=state.device)
        results = [state.gather(own), state.reduce(own), state.broadcast(own, 1)]
        own.zero_()
        return values([*results, own])

    for rank, (gathered, total, sent, own) in enumerate(ranks(2, device="standin").run(run)):
        assert gathered == (f"standin:{rank}", "float32", [1.0] * 3 + [2.0] * 3)
        assert (total[2], sent[2], own[2]) == ([3.0] * 3, [2.0] * 3, [0.0] * 3)


def test_reduce_of_host_and_device(ranks: Any) -> None:
    """Tensors on the host and on the device, arrays and numbers are combined in one call, each where it was."""

    def run() -> Any:
        state = PartialState()
        rank, device = state.process_index, state.device
        data = {
            "device": torch.tensor([rank, 2.0], device=device),
            "half": torch.tensor([rank + 0.5], device=device, dtype=torch.float16),
            "host": torch.tensor([float(rank)]),
            "array": numpy.array([1.0 + rank]),
            "number": float(rank),
            "scalar": torch.tensor(3.0 * rank, device=device),
            "transposed": torch.arange(4.0, device=device).view(2, 2).t(),
            "nothing": torch.empty(0, device=device),
        }
        flags = torch.tensor([rank == 0, True], device=device)
        means = state.reduce(data, "mean")
        assert type(means["array"]) is numpy.ndarray
        means["array"] = means["array"].tolist()
        return values([means, state.reduce(flags, "max"), state.reduce(flags, "min"), state.reduce(torch.tensor([1j], device=device))])

    for rank, (means, some, every, imaginary) in enumerate(ranks(2, device="standin").run(run)):
        here = f"standin:{rank}"
        assert means == {
            "device": (here, "float32", [0.5, 2.0]),
            "half": (here, "float16", [1.0]),
            "host": ("cpu", "float32", [0.5]),
            "array": [1.5],
            "number": 0.5,
            "scalar": (here, "float32", 1.5),
            "transposed": (here, "float32", [[0.0, 2.0], [1.0, 3.0]]),
            "nothing": (here, "float32", []),
        }
        assert (some, every) == ((here, "bool", [True, True]), (here, "bool", [False, True]))
        assert imaginary == (here, "complex64", [2j])


def test_broadcast_and_pad(ranks: Any) -> None:
    """Data of one rank, records and objects included, arrives on the devices of the others."""

    def run() -> Any:
        state = PartialState()
        rank, device = state.process_index, state.device
        data = {
            "rows": torch.full((2,), rank, device=device),
            "scalar": torch.tensor(rank, device=device),
            "flag": torch.tensor([rank == 1], device=device),
            "transposed": (torch.arange(4.0, device=device) * rank).view(2, 2).t(),
            "host": torch.tensor([rank]),
            "name": f"r{rank}",
            "records": [{"row": torch.tensor([rank], device=device), "text": "a"}],
        }
        padded = state.pad_across_processes({"a": torch.ones(rank + 1, 2, device=device), "b": torch.ones(rank + 1)}, pad_index=7)
        return values([state.broadcast(data, 1), padded])

    for rank, (sent, padded) in enumerate(ranks(2, device="standin").run(run)):
        here = f"standin:{rank}"
        assert sent == {
            "rows": (here, "int64", [1, 1]),
            "scalar": (here, "int64", 1),
            "flag": (here, "bool", [True]),
            "transposed": (here, "float32", [[0.0, 2.0], [1.0, 3.0]]),
            "host": ("cpu", "int64", [1]),
            "name": "r1",
            "records": [{"row": (here, "int64", [1]), "text": "a"}],
        }
        last = 7.0 if rank == 0 else 1.0
        assert padded == {"a": (here, "float32", [[1.0, 1.0], [last, last]]), "b": ("cpu", "float32", [1.0, last])}


def test_objects_arrive_on_the_device_of_the_receiver(ranks: Any) -> None:
    """Tensors inside of objects, pickled ones too, are on the receiver's device and not on the one of the sender's number."""

    def run() -> Any:
        state = PartialState()
        rank, device = state.process_index, state.device
        tied = torch.nn.Linear(1, 1, bias=False).to(device)
        own = types.SimpleNamespace(row=torch.tensor([rank], device=device), pair=[tied.weight, tied.weight])
        gathered = state.gather_object([own])
        assert all(entry.pair[0] is entry.pair[1] and type(entry.pair[0]) is torch.nn.Parameter for entry in gathered)
        devices = {str(tensor.device) for entry in gathered for tensor in (entry.row, *entry.pair)}
        memory = [torch.standin.memory_allocated(other) for other in range(2)]
        sent = state.broadcast_object_list([torch.tensor([rank], device=device), {"n": rank}], from_process=1)
        plain = state.gather_object({"row": torch.tensor([rank], device=device), "host": torch.tensor([rank])})
        one = copy_tensor_to_devices(torch.tensor([5]) if rank == 1 else None)
        return devices, memory[1 - rank], values([[entry.row for entry in gathered], sent, plain, one])

    for rank, (devices, elsewhere, (rows, sent, plain, one)) in enumerate(ranks(2, device="standin").run(run)):
        here = f"standin:{rank}"
        assert devices == {here}
        assert elsewhere == 0, "memory of another rank's device"
        assert rows == [(here, "int64", [0]), (here, "int64", [1])]
        assert sent == [(here, "int64", [1]), {"n": 1}]
        assert plain == [{"row": (here, "int64", [sender]), "host": ("cpu", "int64", [sender])} for sender in range(2)]
        assert one == (here, "int64", [5])


def test_leaves_on_several_devices_of_one_rank(ranks: Any) -> None:
    """A process that uses two devices gets each result where that leaf was."""

    def run() -> Any:
        state = PartialState()
        first, second = (torch.device("standin", 2 * state.process_index + number) for number in range(2))
        pair = [torch.full((1,), state.process_index, device=second), torch.full((1,), state.process_index, device=first)]
        results = [state.gather(pair), state.broadcast(pair, 1), state.reduce(pair)]
        return [[str(tensor.device) for tensor in result] for result in results], values(results[0])[0][2], values(results[2])[1][2]

    for rank, (devices, gathered, total) in enumerate(ranks(2, device="standin").run(run)):
        assert devices == [[f"standin:{2 * rank + 1}", f"standin:{2 * rank}"]] * 3
        assert (gathered, total) == ([0, 1], [1])


def test_mismatches_raise_and_the_group_goes_on(ranks: Any) -> None:
    """Other shapes, types, places and calls are errors on every rank before anything begins on the device."""

    def run() -> Any:
        state = PartialState()
        rank, device = state.process_index, state.device
        costs()
        messages = []
        for act in (
            lambda: state.gather(torch.ones(2, 2 + rank, device=device)),
            lambda: state.gather(torch.ones(2, device=device if rank else "cpu")),
            lambda: state.reduce(torch.ones(2 + rank, device=device)),
            lambda: state.broadcast(torch.ones(2, device=device).to(torch.float16 if rank else torch.float32)),
            lambda: state.reduce(torch.ones(2, device=device)) if rank else state.gather(torch.ones(2, device=device)),
        ):
            with pytest.raises(MismatchError) as error:
                act()
            messages.append(str(error.value))
        assert costs()[3] == 0
        with pytest.raises(MismatchError, match="value: rank 0 . rank 1"):
            state.verify_replicas(value=torch.tensor(rank, device=device))
        state.verify_replicas(value=torch.ones(2, device=device))
        return messages, state.gather(torch.tensor([rank], device=device)).tolist()

    for messages, gathered in ranks(2, device="standin").run(run):
        assert "rank 0: gather float32(2,) at" in messages[1]
        assert "rank 1: gather float32(2,) on standin at" in messages[1]
        assert gathered == [0, 1]


def test_gradient_flows_back_over_the_device(ranks: Any) -> None:
    """A gather with gradient gives every rank the gradient of its own rows, on its device."""

    def run() -> Any:
        state = PartialState()
        own = torch.full((2,), float(state.process_index + 1), device=state.device, requires_grad=True)
        joined = state.gather(own, with_gradient=True)
        (joined * torch.arange(4.0, device=state.device)).sum().backward()
        return values([joined, own.grad])

    results = ranks(2, device="standin").run(run)
    assert [grad for _, grad in results] == [("standin:0", "float32", [0.0, 2.0]), ("standin:1", "float32", [4.0, 6.0])]


def test_split_work_and_results(ranks: Any) -> None:
    """Parts stay on the device and come back in order; results of shared work are on the host, where thousands of them have room."""

    def run() -> Any:
        state = PartialState()
        with state.split_between_processes({"x": torch.arange(5, device=state.device)}, apply_padding=True) as part:
            together = state.gather(part["x"] * 2)
        mapped = state.map_across_processes(lambda number: {"row": torch.tensor([number], device=state.device)}, list(range(4)))
        return values([part["x"], together, mapped])

    for rank, (part, together, mapped) in enumerate(ranks(2, device="standin").run(run)):
        assert part[0] == f"standin:{rank}"
        assert together == (f"standin:{rank}", "int64", [0, 2, 4, 6, 8])
        assert mapped == [{"row": ("cpu", "int64", [number])} for number in range(4)]


def test_random_states_of_devices(ranks: Any) -> None:
    """The random state of rank 0's device goes to those of the others; seeds by rank give others."""

    def run() -> Any:
        state = PartialState()
        torch.standin.manual_seed(100 + state.process_index)
        synchronize_rng_states(["standin"])
        state.verify_random_states("standin")
        equal = torch.rand(1, device=state.device).item()
        set_seed(3, device_specific=True)
        return equal, torch.rand(1, device=state.device).item()

    (first, other), (second, another) = ranks(2, device="standin").run(run)
    assert first == second == torch.rand(1, generator=torch.Generator().manual_seed(100)).item()
    assert other != another


def test_group_closes_and_reopens(ranks: Any) -> None:
    """Collectives of the device go on in the next generation of the group, and beside groups of the user's own."""

    def run() -> Any:
        state = PartialState()
        own = torch.full((1,), float(state.process_index), device=state.device)
        before = state.gather(own).tolist()
        generation = current().generation
        state.destroy_process_group()
        after = state.gather(own).tolist()
        pair = dist.new_group([0, 1])
        alone = dist.new_group([state.process_index], use_local_synchronization=True)
        total, single = own.clone(), own.clone()
        dist.all_reduce(total, group=pair)
        dist.all_reduce(single, group=alone)
        return before, after, state.gather(total).tolist(), single.item(), current().generation - generation

    for rank, found in enumerate(ranks(2, device="standin").run(run)):
        assert found == ([0.0, 1.0], [0.0, 1.0], [1.0, 1.0], float(rank), 1)
