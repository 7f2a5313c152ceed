"""State and collectives of the drop-in on two and three processes: results, nested data, padding, and the errors of debug mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.ranks


def begin() -> Any:
    """Make a state of this rank; the pool has made others before."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return PartialState(cpu=True)


def collect_everything() -> dict[str, Any]:
    from accelerate import utils

    rank = begin().process_index
    tensor = torch.tensor([[1.0, 2.0]]) + 10 * rank
    ragged = torch.arange(rank + 1)
    return {
        "gather": utils.listify(utils.gather({"a": tensor, "b": [tensor, (tensor,)]})),
        "scalars": utils.gather(torch.tensor(rank)).tolist(),
        "objects": utils.gather_object([rank, {"rank": rank}]),
        "sum": utils.reduce(tensor, "sum").tolist(),
        "mean": utils.reduce({"a": tensor})["a"].tolist(),
        "scaled": utils.reduce(tensor, "sum", scale=0.5).tolist(),
        "broadcast": utils.broadcast({"a": tensor}, from_process=1)["a"].tolist(),
        "list": utils.broadcast_object_list([rank, "x"], from_process=1),
        "padded": utils.gather(utils.pad_across_processes(ragged, pad_index=-1)).tolist(),
        "padded first": utils.gather(utils.pad_across_processes(ragged, pad_index=-1, pad_first=True)).tolist(),
        "padded dim": list(utils.pad_across_processes(torch.ones(2, rank + 1), dim=-1).shape),
        "no such dim": list(utils.pad_across_processes(torch.ones(2, rank + 1), dim=4).shape),
        "untouched": tensor.tolist(),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_agree_with_a_model_of_them(ranks: Any, world: int) -> None:
    tensors = [[1.0 + 10 * rank, 2.0 + 10 * rank] for rank in range(world)]
    total = [sum(column) for column in zip(*tensors, strict=True)]
    for rank, found in enumerate(ranks(world).run(collect_everything)):
        assert found["gather"] == {"a": tensors, "b": [tensors, (tensors,)]}
        assert found["scalars"] == list(range(world))
        assert found["objects"] == [entry for rank in range(world) for entry in (rank, {"rank": rank})]
        assert found["sum"] == [total]
        assert found["mean"] == [[value / world for value in total]]
        assert found["scaled"] == [[value * 0.5 for value in total]]
        assert found["broadcast"] == [tensors[1]]
        assert found["list"] == [1, "x"]
        assert found["padded"] == [value for row in range(world) for value in [*range(row + 1), *[-1] * (world - row - 1)]]
        assert found["padded first"] == [value for row in range(world) for value in [*[-1] * (world - row - 1), *range(row + 1)]]
        assert found["padded dim"] == [2, world]
        assert found["no such dim"] == [2, rank + 1]
        assert found["untouched"] == [tensors[rank]]


def split_everything(total: int) -> dict[str, Any]:
    from accelerate import Accelerator, utils

    begin()
    accelerator = Accelerator(cpu=True)
    items, columns = list(range(total)), {"a": list(range(total)), "b": torch.arange(total)}
    found = {}
    for name, inputs in {"list": items, "tuple": tuple(items), "tensor": torch.arange(total), "dict": columns}.items():
        for padding in (False, True):
            with accelerator.split_between_processes(inputs, apply_padding=padding) as part:
                found[name, padding] = utils.listify(part)
    found["unchanged"] = utils.listify(columns)
    return found


@pytest.mark.parametrize("total", [0, 1, 4, 5])
def test_inputs_are_split_in_order_with_the_last_one_repeated(ranks: Any, total: int) -> None:
    results, items = ranks(3).run(split_everything, total), list(range(total))
    each, extra = divmod(total, 3)
    most = each + bool(extra)
    for rank, found in enumerate(results):
        start = rank * each + min(rank, extra)
        part = items[start : start + each + (rank < extra)]
        padded = part + [(part or items)[-1]] * (most - len(part)) if items else []
        for padding, wanted in ((False, part), (True, padded)):
            assert found["list", padding] == wanted
            assert found["tuple", padding] == tuple(wanted)
            assert found["tensor", padding] == wanted
            assert found["dict", padding] == {"a": wanted, "b": wanted}
        assert found["unchanged"] == {"a": items, "b": items}


def who_runs() -> dict[str, Any]:
    from accelerate import Accelerator

    state, order = begin(), []
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        order.append(state.process_index)
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return {
        "main": accelerator.on_main_process(lambda: "ran")(),
        "local main": accelerator.on_local_main_process(lambda: "ran")(),
        "last": accelerator.on_last_process(lambda: "ran")(),
        "one": accelerator.on_process(process_index=1)(lambda: "ran")(),
        "local one": accelerator.on_local_process(lambda: "ran", local_process_index=1)(),
        "trigger": [accelerator.check_trigger(), accelerator.check_trigger()],
        "kind": (state.distributed_type.value, state.backend, state.num_processes, state.use_distributed, accelerator.multi_device),
        "order": order,
    }


def test_functions_run_where_they_should(ranks: Any) -> None:
    first, second = ranks(2).run(who_runs)
    assert [first[name] for name in ("main", "local main", "last", "one", "local one")] == ["ran", "ran", None, None, None]
    assert [second[name] for name in ("main", "local main", "last", "one", "local one")] == [None, None, "ran", "ran", "ran"]
    assert first["trigger"] == second["trigger"] == [True, False]
    assert first["kind"] == second["kind"] == ("MULTI_CPU", "gloo", 2, True, False)


def differ(operation: str) -> str:
    from accelerate import Accelerator, utils
    from accelerate.utils.operations import DistributedOperationException

    state = begin()
    accelerator = Accelerator(cpu=True)
    tensor = torch.ones(2 + state.process_index)
    calls = {
        "gather": lambda: utils.gather(tensor), "reduce": lambda: utils.reduce(tensor), "broadcast": lambda: utils.broadcast(tensor),
        "Accelerator.gather": lambda: accelerator.gather(tensor), "Accelerator.reduce": lambda: accelerator.reduce(tensor),
    }  # fmt: skip
    try:
        calls[operation]()
    except DistributedOperationException as error:
        assert utils.gather(torch.ones(1)).tolist() == [1.0, 1.0]  # the group still works
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("operation", ["gather", "reduce", "broadcast", "Accelerator.gather", "Accelerator.reduce"])
def test_debug_mode_names_the_shapes_of_all_processes(ranks: Any, operation: str) -> None:
    for text in ranks(2).run(differ, operation, environ={"ACCELERATE_DEBUG_MODE": "1"}):
        assert operation in text
        assert "Process 0: [2]" in text
        assert "Process 1: [3]" in text


def test_without_debug_mode_rows_may_differ_where_they_are_gathered(ranks: Any) -> None:
    assert ranks(2).run(differ, "gather") == ["nothing was raised"] * 2
    assert all("rank 1: reduce(mean) float32(3,)" in text for text in ranks(2).run(differ, "reduce"))


def train(steps: int, prepared: bool = True, **options: Any) -> dict[str, Any]:
    import warnings

    from accelerate import Accelerator

    begin()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    loader = torch.utils.data.DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=1)
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    model = accelerator.prepare(model) if prepared else model
    synced, counted = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if not prepared else "error")
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).pow(2).mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            synced.append(accelerator.sync_gradients)
            counted.append(accelerator.step)
    plain = accelerator.unwrap_model(model)
    return {
        "weights": [round(parameter.item(), 5) for parameter in plain.parameters()], "rate": round(scheduler.get_last_lr()[0], 6),
        "epoch": scheduler.scheduler.last_epoch, "synced": synced, "counted": counted,
    }  # fmt: skip


def test_accumulation_on_two_processes_is_that_of_one_with_larger_batches(ranks: Any) -> None:
    """Two processes and windows of two batches make two updates, each of four samples; the schedule moves twice per update."""
    first, second = ranks(2).run(train, 2)
    assert first == second
    assert first["synced"] == [False, True, False, True]
    assert first["counted"] == [1, 2, 3, 0]
    assert (first["epoch"], first["rate"]) == (4, round(0.05 * 0.9**4, 6))

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for update, batch in enumerate(torch.arange(8.0).reshape(2, 4, 1)):
        optimizer.param_groups[0]["lr"] = 0.05 * 0.9 ** (2 * update)
        model(batch).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert first["weights"] == [round(parameter.item(), 5) for parameter in model.parameters()]


def test_a_model_that_was_not_prepared_is_not_averaged(ranks: Any) -> None:
    first, second = ranks(2).run(train, 2, prepared=False)
    assert first["synced"] == second["synced"] == [False, True, False, True]
    assert first["weights"] != second["weights"]


def wait_too_long() -> list[str]:
    """One process stays away from a collective: the other gives up after the time that the script gave."""
    import time
    from datetime import timedelta

    from accelerate import Accelerator, InitProcessGroupKwargs, utils

    rank = begin().process_index
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=1))])
    began = time.monotonic()
    try:
        if rank == 1:
            utils.gather_object([1])
        else:
            time.sleep(3)
    except RuntimeError as error:
        return [type(error).__name__, str(time.monotonic() - began < 2.9)]
    return []


def test_a_timeout_counts_for_the_functions_of_utils_too(ranks: Any) -> None:
    assert ranks(2).run(wait_too_long) == [[], ["WaitTimeoutError", "True"]]


def average_now_and_then() -> list[float]:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    rank = begin().process_index
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    weights = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for _ in range(4):
            accelerator.backward(-model(torch.full((1, 1), float(rank))).sum())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            weights.append(accelerator.unwrap_model(model).weight.item())
    return weights


def test_local_sgd_averages_every_few_steps(ranks: Any) -> None:
    assert ranks(2).run(average_now_and_then) == [[0.0, 1.0, 1.0, 2.0], [1.0, 1.0, 2.0, 2.0]]


def log_from_everywhere() -> list[str]:
    import logging

    from accelerate.logging import get_logger

    begin()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.filename} {record.getMessage()}")  # type: ignore[method-assign]
    logger = get_logger("processes.log", log_level="INFO")
    logger.logger.addHandler(handler)
    logger.info("main only")
    logger.info("all", main_process_only=False)
    logger.info("ordered", in_order=True, main_process_only=False)
    logger.warning_once("once")
    logger.warning_once("once")
    logger.logger.removeHandler(handler)
    return records


def test_loggers_speak_once_or_everywhere(ranks: Any) -> None:
    first, second = ranks(2).run(log_from_everywhere)
    assert first == [f"test_processes.py {text}" for text in ("main only", "[RANK 0] all", "[RANK 0] ordered", "once")]
    assert second == [f"test_processes.py {text}" for text in ("[RANK 1] all", "[RANK 1] ordered")]
