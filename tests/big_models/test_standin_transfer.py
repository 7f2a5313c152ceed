"""Copies of offloaded blocks to an accelerator: when they run, how many there are, and what they need. On the stand-in device."""

from __future__ import annotations

import copy
import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offloaded_models import IDS, LAYER, SIDE, stack, words

from slipstream import cpu_offload, disk_offload, infer_auto_device_map, layer_major
from slipstream.big_models.dispatch import dispatch_model
from slipstream.big_models.hooks.forward_hooks import get_hooks
from slipstream.big_models.layer_major import find_weight_stores
from slipstream.big_models.weight_store import store


@pytest.fixture
def device(ranks: Any) -> Any:
    """One process with the devices."""
    return ranks(1, device="standin")


def test_next_block_copied_while_one_runs(device: Any) -> None:
    """The copy of a block begins before the kernels of the block before it end, and ends before its own begin."""

    def run() -> tuple[list[int], list[bool], list[bool], set[int], bool]:
        widths = [SIDE + 8 * number for number in range(6)]  # so that the copies can be told from each other
        plain = torch.nn.Sequential(*(torch.nn.Linear(*pair, bias=False) for pair in itertools.pairwise(widths)))
        x = torch.ones(2, SIDE)
        wanted = plain(x).detach()
        model = cpu_offload(copy.deepcopy(plain), execution_device=0)
        here = x.to("standin:0")
        with torch.no_grad():
            model(here)  # from now on the order of the blocks is known
            torch.standin.synchronize()
            torch.standin.set_delay(copies=0.02, kernels=0.01)
            torch.standin.start_log()
            found = model(here)
            torch.standin.stop_log()
            torch.standin.set_delay(copies=0, kernels=0)
        log = torch.standin.log()
        sizes = [layer.weight.nbytes for layer in plain]
        copies = {sizes.index(entry.bytes): entry for entry in log if entry.kind == "to_device"}
        kernels = [entry for entry in log if entry.kind == "kernel" and entry.name == "aten::mm"]
        assert len(kernels) == len(plain)
        later = range(1, len(plain))
        overlaps = [copies[block].begin < kernels[block - 1].end for block in later]
        in_time = [copies[block].end <= kernels[block].begin for block in later]
        streams = {entry.stream for entry in copies.values()} & {entry.stream for entry in kernels}
        return list(copies), overlaps, in_time, streams, torch.equal(found.cpu(), wanted)

    order, overlaps, in_time, streams, equal = device.run(run)[0]
    # the first block is copied at the end of a pass, for the next one, by a thread that may be late: before, in or after the logged pass
    assert [block for block in order if block != 0] == [1, 2, 3, 4]
    assert overlaps == [True] * 4
    assert in_time == [True] * 4
    assert equal
    assert not streams


@pytest.mark.parametrize("kind", ["cpu", "disk", "limit", "direct"])
def test_results_with_late_copies(device: Any, tmp_path: Path, kind: str) -> None:
    """Blocks of all sizes, copied late: none is used too early, and no buffer is filled or given away too early."""

    def run() -> list[bool]:
        torch.manual_seed(0)
        sides = [8, 64, 16, 128, 8, 96, 32, 8]
        layers = [torch.nn.Linear(before, after) for before, after in zip(sides, sides[1:], strict=False)]
        plain, inputs = torch.nn.Sequential(*layers), [torch.randn(3, 8) for _ in range(3)]
        wanted = [plain(x).detach() for x in inputs]
        model = copy.deepcopy(plain)
        if kind == "cpu":
            cpu_offload(model, 1)
        else:  # within the limit two blocks at a time, read with direct I/O if memory is scarce
            disk_offload(model, tmp_path, execution_device=1, limit=None if kind == "disk" else 26_000)
        free = store.host_memory
        if kind == "direct":
            store.host_memory = lambda: SimpleNamespace(available=0)
        torch.standin.set_delay(copies=0.01)
        try:
            with torch.no_grad():
                equal = [torch.equal(model(x), value) for x, value in zip(inputs, wanted, strict=True)]
            return [*equal, any(found.reads_directly for found in find_weight_stores(model))]
        finally:
            torch.standin.set_delay(copies=0)
            store.host_memory = free

    assert device.run(run) == [[True] * 3 + [kind == "direct"]]


class Shown(torch.nn.Module):
    """A layer that computes nothing, so that the host does not wait: it returns its weight, or copies it back late."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((SIDE, SIDE), float(number)))

    def forward(self, back: bool) -> torch.Tensor:
        if not back:
            return self.weight.detach()
        for _ in range(4):
            host = torch.empty(SIDE, SIDE, pin_memory=True)
            host.copy_(self.weight.detach(), non_blocking=True)
        return host


@pytest.mark.parametrize("back", [False, True])
def test_buffers_not_reused_early(device: Any, back: bool) -> None:
    """A pinned buffer is filled again after the copy from it has ended; memory of the device is used again after all that reads it."""

    def run() -> list[float]:
        model = torch.nn.ModuleList(Shown(number) for number in range(8))
        cpu_offload(model, 0)
        torch.standin.set_delay(copies=0.02)
        try:
            with torch.no_grad():
                seen = [layer(back) for layer in model]
            torch.standin.synchronize()
        finally:
            torch.standin.set_delay(copies=0)
        return [float(weight.cpu().mean()) for weight in seen]

    assert device.run(run) == [[float(number) for number in range(8)]]


def settle(model: torch.nn.Module) -> None:
    """Wait until the block that comes next is on the device."""
    hooks = (hook for module in model.modules() for hook in get_hooks(module) if hook.weights_map is not None)
    for loader in {id(hook): hook.weights_map.dataset for hook in hooks}.values():
        for transfer in loader._transfers.values():
            for coming in transfer._coming.values():
                coming.result()
    torch.standin.synchronize()


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_each_weight_copied_once(device: Any, tmp_path: Path, kind: str) -> None:
    """A forward copies each weight once and nothing back, and the host waits for nothing but inputs and outputs of its own."""

    def run() -> tuple[Any, Any, int]:
        torch.standin.set_delay(copies=0)
        model = words(tied=False)
        model = cpu_offload(model, 0) if kind == "cpu" else disk_offload(model, tmp_path, execution_device=0)
        here, counted = IDS.to("standin:0"), []
        with torch.no_grad():
            model(here)
            for given in (here, IDS):
                settle(model)
                torch.standin.reset_counters()
                output = model(given)
                settle(model)
                counted.append(torch.standin.counters())
                assert output.device == given.device
        return counted[0], counted[1], sum(parameter.nbytes for parameter in words(tied=False).parameters())

    there, host, size = device.run(run)[0]
    weights = 2 + 4 * 4
    # `settle` synchronises once
    assert (there.copies_to_device, there.bytes_to_device, there.copies_to_host, there.synchronizations) == (weights, size, 0, 1)
    assert (host.copies_to_device, host.copies_to_host, host.synchronizations) == (weights + 1, 1, 3)


def test_layer_major_copies_once(device: Any, tmp_path: Path) -> None:
    """All calls of a layer-major run share one copy of each block; they run on the device and the stream of the caller."""

    def run() -> tuple[list[bool], int, set[tuple[int, int]], bool]:
        plain = words()
        inputs = [IDS, IDS + 1, IDS + 2]
        wanted = [plain(ids).detach() for ids in inputs]
        model = disk_offload(copy.deepcopy(plain), tmp_path, execution_device=1)
        used = set()

        def call(ids: torch.Tensor) -> torch.Tensor:
            used.add((torch.standin.current_device(), torch.standin.current_stream().stream_id))
            return model(ids)

        stream = torch.standin.Stream(device=2)
        with torch.no_grad(), torch.standin.stream(stream):
            layer_major(model, call, inputs)
            settle(model)
            torch.standin.reset_counters()
            found = layer_major(model, call, inputs)
            settle(model)
        copies = torch.standin.counters().copies_to_device
        return [torch.equal(*pair) for pair in zip(found, wanted, strict=True)], copies, used, (2, stream.stream_id) in used

    equal, copies, used, same_stream = device.run(run)[0]
    assert equal == [True] * 3
    assert copies == 2 + 4 * 4 + 3  # weights (the tied one in both its blocks), inputs
    assert len(used) == 1
    assert same_stream


def test_layer_major_random_numbers(device: Any) -> None:
    """Each call has its own random numbers on the device, whatever runs beside it; the caller's go on as before."""

    def run() -> tuple[bool, bool]:
        model = stack(4)
        model.insert(2, torch.nn.Dropout(0.5))
        model = cpu_offload(model.train(), 0)
        x = torch.ones(2, SIDE, device="standin:0")

        def outputs(lanes: int) -> list[torch.Tensor]:
            torch.manual_seed(3)
            with torch.no_grad():
                return layer_major(model, model, [x, x, x], lanes=lanes)

        alone, together = outputs(1), outputs(3)
        before = torch.standin.get_rng_state(0)
        outputs_differ = not torch.equal(alone[0], alone[1])
        with torch.no_grad():
            layer_major(model, model, [x, x])
        unchanged = torch.equal(before, torch.standin.get_rng_state(0))
        return all(map(torch.equal, alone, together)) and outputs_differ, unchanged

    assert device.run(run) == [(True, True)]


def test_no_room_for_next_block(device: Any) -> None:
    """A device with room for one block runs the model, block by block, and that is logged once."""

    def run() -> bool:
        plain, x = stack(), torch.ones(2, SIDE)
        wanted = plain(x).detach()
        model = cpu_offload(copy.deepcopy(plain), 3)
        torch.standin.set_capacity(LAYER + 4096, 3)
        try:
            with torch.no_grad():
                return all(torch.equal(model(x), wanted) for _ in range(3))
        finally:
            torch.standin.set_capacity(4 << 30, 3)

    (outcome,) = device.outcomes(run)
    assert outcome.value is True, outcome.traceback
    assert outcome.output.count("standin:3 has no room for") == 1


@pytest.mark.parametrize(("layers", "ahead"), [(2, False), (6, True)])
def test_plan_by_real_memory(device: Any, layers: int, ahead: bool) -> None:
    """A plan for what is free runs within it: blocks fit into the room that it leaves, and one is copied ahead if there is room for two."""

    def run() -> tuple[Any, ...]:
        plain, x = torch.nn.Sequential(*(stack(2) for _ in range(4))), torch.ones(1, SIDE)
        wanted = plain(x).detach()
        gc.collect()
        torch.standin.empty_cache()
        for number in range(4):
            torch.standin.set_capacity(4096 if number else layers * LAYER + 2048, number)
        try:
            plan = infer_auto_device_map(plain, activations={0: 2048})
            model = dispatch_model(copy.deepcopy(plain), plan)
            torch.standin.reset_peak_memory_stats(0)
            with torch.no_grad():
                equal = all(torch.equal(model(x), wanted) for _ in range(2))
            peak = torch.standin.max_memory_allocated(0)
            held = sum(parameter.nbytes for parameter in model.parameters() if parameter.device.type == "standin")
            return equal, held == plan.held[0], peak - held >= 2 * LAYER, plan.budget[0], peak
        finally:
            for number in range(4):
                torch.standin.set_capacity(4 << 30, number)

    (outcome,) = device.outcomes(run)
    equal, as_planned, copied_ahead, budget, peak = outcome.value
    assert equal
    assert as_planned
    assert copied_ahead is ahead
    assert budget == layers * LAYER + 2048
    assert peak <= budget
    assert "no room" not in outcome.output


def test_memory_under_autocast(device: Any) -> None:
    """Autocast keeps no converted copy of weights that have left the device."""

    def run() -> tuple[int, int, bool]:
        plain, x = stack(12), torch.ones(2, SIDE)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            wanted = plain(x)
        model, peaks = cpu_offload(plain, 0), []
        for dtype in (None, torch.bfloat16):
            torch.standin.reset_peak_memory_stats(0)
            with torch.no_grad(), torch.autocast("standin", dtype=dtype, enabled=dtype is not None):
                found = model(x)
            peaks.append(torch.standin.max_memory_allocated(0))
        return peaks[0], peaks[1], torch.equal(found, wanted)

    plain, converted, equal = device.run(run)[0]
    assert converted < plain + LAYER
    assert equal


def test_training_after_inference_mode(device: Any) -> None:
    """Weights that were copied in inference mode can be part of a graph afterwards."""

    def run() -> bool:
        plain = stack().requires_grad_(False)
        x, y = torch.ones(2, SIDE, requires_grad=True), torch.ones(2, SIDE, requires_grad=True)
        plain(x).sum().backward()
        model = cpu_offload(copy.deepcopy(plain), 0)
        with torch.inference_mode():
            model(torch.ones(2, SIDE))
        model(y).sum().backward()
        return torch.equal(x.grad, y.grad)

    assert device.run(run) == [True]


def test_full_device_and_again(device: Any) -> None:
    """A forward for which the device has no memory says so, and leaves the model as it was: with more memory it runs."""

    def run() -> tuple[str, list[int], bool]:
        plain, x = stack(), torch.ones(2, SIDE)
        wanted = plain(x).detach()
        model = cpu_offload(copy.deepcopy(plain), 3)
        gc.collect()
        torch.standin.empty_cache()
        torch.standin.set_capacity(LAYER // 2, 3)
        try:
            with torch.no_grad():
                model(x)
        except torch.OutOfMemoryError as error:
            said = str(error)
        finally:
            torch.standin.set_capacity(4 << 30, 3)
        active = [block.active for store in find_weight_stores(model) for block in store.blocks]
        with torch.no_grad():
            return said.partition(":")[0], active, torch.equal(model(x), wanted)

    assert device.run(run) == [("standin", [0] * 5, True)]


def test_threads_share_the_copies(device: Any) -> None:
    """Threads may run one offloaded model at the same time."""

    def run() -> bool:
        plain = stack(8)
        inputs = [torch.full((2, SIDE), float(number)) for number in range(8)]
        wanted = [plain(x).detach() for x in inputs]
        model = cpu_offload(copy.deepcopy(plain), 0)

        def call(number: int) -> bool:
            with torch.no_grad():
                return all(torch.equal(model(inputs[number]), wanted[number]) for _ in range(5))

        with ThreadPoolExecutor(4) as pool:
            return all(pool.map(call, range(8)))

    assert device.run(run) == [True]
