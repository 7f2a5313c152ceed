"""Models over several accelerators, the CPU and the disk: values, places, memory, and what is refused. On the stand-in device."""

from __future__ import annotations

import copy
import functools
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded_models import BLOCK, IDS, SPREAD, Words, words

from slipstream import Accelerator, cpu_offload_with_hook, dispatch_model, load_checkpoint_and_dispatch, load_checkpoint_in_model
from slipstream.big_models.device_map.plan import get_max_memory
from slipstream.big_models.empty_weights import init_empty_weights
from slipstream.big_models.hooks.attachment import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_layerwise_casting_hooks,
)
from slipstream.big_models.hooks.module_tensors import align_module_device, get_state_dict_offloaded_model
from slipstream.big_models.weight_store.offload_folder import offload_state_dict
from slipstream.big_models.weight_store.weights import OffloadedWeightsLoader
from slipstream.checkpoint.model_io import save_model
from slipstream.errors import StateError
from slipstream.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules

MIXED = {**SPREAD, "blocks.1": "cpu", "blocks.2": "disk"}


@pytest.fixture
def device(ranks: Any) -> Any:
    """One process with the devices."""
    return ranks(1, device="standin")


@pytest.mark.parametrize("start", ["cpu", "standin:1"])
@pytest.mark.parametrize("placed", [SPREAD, MIXED], ids=["devices", "all kinds"])
def test_outputs_and_places(device: Any, tmp_path: Path, start: str, placed: dict[str, Any]) -> None:
    """Outputs are those of the CPU, on the device of the input; weights and buffers are where the map says; hooks leave nothing behind."""

    def run() -> tuple[Any, ...]:
        plain = words()
        wanted = plain(IDS).detach()
        model = dispatch_model(copy.deepcopy(plain).to(start), placed, offload_dir=tmp_path)
        outputs = [model(IDS.to(place)) for place in ("cpu", "standin:0", "standin:3")]
        places = {name: str(tensor.device) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        state = get_state_dict_offloaded_model(model)
        same_state = all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
        tied = model.head.weight is model.embed.weight
        remove_hook_from_submodules(model)
        left = [name for name, module in model.named_modules() if "forward" in vars(module) or hasattr(module, "_hf_hook")]
        moved = model.to("standin:2")(IDS.to("standin:2")).detach() if placed is SPREAD else None
        where = [str(output.device) for output in outputs]
        return [torch.equal(output.cpu(), wanted) for output in outputs], where, places, same_state, tied, left, moved

    equal, where, places, same_state, tied, left, moved = device.run(run)[0]
    assert equal == [True] * 3
    assert where == ["cpu", "standin:0", "standin:3"]
    for name, place in places.items():
        target = placed[".".join(name.split(".")[:2]) if name.startswith("blocks") else name.split(".")[0]]
        offloaded = target in ("cpu", "disk")
        if name.endswith("scale"):  # buffers stay on the device that runs the block
            assert place == f"standin:{0 if offloaded else target}"
        else:
            assert place == ("meta" if offloaded else f"standin:{target}"), name
    assert same_state
    assert tied
    assert left == []
    assert placed is MIXED or torch.equal(moved, words()(IDS))


def test_dispatched_again(device: Any, tmp_path: Path) -> None:
    """A dispatched model can be dispatched differently, and leaves no memory on devices that it no longer uses."""

    def run() -> tuple[Any, ...]:
        plain = words()
        wanted = plain(IDS).detach()
        model = dispatch_model(copy.deepcopy(plain), MIXED, offload_dir=tmp_path)
        model(IDS)
        model = dispatch_model(model, {"": 2})
        first = model(IDS.to("standin:2"))
        gc.collect()
        left = [torch.standin.memory_allocated(number) for number in (0, 1, 3)]
        model = dispatch_model(model, SPREAD)
        return torch.equal(first.cpu(), wanted), left, torch.equal(model(IDS), wanted), model.head.weight is model.embed.weight

    assert device.run(run) == [(True, [0, 0, 0], True, True)]


def test_training_over_devices(device: Any) -> None:
    """Several devices train a model as the CPU does, bit for bit; gradients and states of the optimizer are beside their weights."""

    def run() -> tuple[bool, bool]:
        torch.manual_seed(0)
        plain, beside = words(), []
        model = dispatch_model(copy.deepcopy(plain), SPREAD)
        for trained in (plain, model):
            optimizer = torch.optim.Adam(trained.parameters(), lr=1e-2)
            for _ in range(3):
                trained(IDS).square().mean().backward()
                beside += [parameter.grad.device == parameter.device for parameter in trained.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            beside += [optimizer.state[parameter]["exp_avg"].device == parameter.device for parameter in trained.parameters()]
        return all(torch.equal(a, b.cpu()) for a, b in zip(plain.parameters(), model.parameters(), strict=True)), all(beside)

    assert device.run(run) == [(True, True)]


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_adapter_on_offloaded_model(device: Any, tmp_path: Path, kind: str) -> None:
    """An adapter on the device is trained through offloaded, frozen weights."""

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.adapter = words().requires_grad_(False), torch.nn.Linear(64, 64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.adapter(self.model.embed(ids))
            for block in self.model.blocks:
                x = block(x)
            return self.model.head(x)

    def run() -> tuple[str, bool, list[Any]]:
        plain = Adapted()
        model = dispatch_model(copy.deepcopy(plain), {"model": kind, "adapter": 1}, main_device=1, offload_dir=tmp_path)
        for trained in (plain, model):
            optimizer = torch.optim.SGD(trained.adapter.parameters(), lr=0.1)
            for _ in range(3):
                trained(IDS).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        weight, gradients = model.adapter.weight, [parameter.grad for parameter in model.model.parameters()]
        return str(weight.device), torch.equal(weight.cpu(), plain.adapter.weight), [found for found in gradients if found is not None]

    assert device.run(run) == [("standin:1", True, [])]


def test_tied_weight_on_two_devices(device: Any) -> None:
    """A map that puts one weight on two devices works, and says that they are two weights from now on."""

    def run() -> bool:
        plain = words()
        model = dispatch_model(copy.deepcopy(plain), {**SPREAD, "head": 3})
        return torch.equal(model(IDS), plain(IDS))

    (outcome,) = device.outcomes(run)
    assert outcome.value is True, outcome.traceback
    assert "embed.weight on standin:0 and head.weight on standin:3. Each has a copy of its own" in outcome.output


class _Masked(torch.nn.Module):
    """Blocks that get a mask by keyword, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(_MaskedBlock() for _ in range(3))

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, mask=mask, cache=cache)
        return x


class _MaskedBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        cache.append(x)
        return torch.tanh(self.linear(x)) * mask


def test_keyword_inputs(device: Any) -> None:
    """Inputs by keyword come to the device of each block as those by position do; those in `skip_keys` stay what they are."""

    def run() -> tuple[bool, list[str]]:
        plain, mask, cache = _Masked(), torch.tensor([1.0, 0.0, 1.0, 1.0]), list[torch.Tensor]()
        model = dispatch_model(copy.deepcopy(plain), {"blocks.0": 0, "blocks.1": 2, "blocks.2": "cpu"}, skip_keys="cache")
        found = model(torch.ones(2, 4), mask=mask, cache=cache)
        return torch.equal(found, plain(torch.ones(2, 4), mask=mask, cache=[])), [str(tensor.device) for tensor in cache]

    assert device.run(run) == [(True, ["standin:0", "standin:2", "standin:0"])]


def test_moving_is_refused(device: Any) -> None:
    """A model over several devices is not moved away from its hooks; it may be converted, and what stays in place is not refused."""

    def run() -> tuple[list[str], Any, bool]:
        model = dispatch_model(words(), SPREAD)
        refused = []
        empty = functools.partial(model.to_empty, device="standin:1")
        for move in (functools.partial(model.to, "standin:1"), model.cpu, model.standin, empty):
            try:
                move()
            except StateError as error:
                refused.append(str(error))
        model.half()
        kinds = {(str(parameter.device), parameter.dtype) for parameter in model.parameters()}
        half = model(IDS).dtype
        remove_hook_from_submodules(model)
        return refused, (sorted(place for place, _ in kinds), half), {p.device.index for p in model.to("standin:1").parameters()} == {1}

    refused, converted, moved = device.run(run)[0]
    assert len(refused) == 4
    assert all("Words is dispatched over standin:0, standin:1, standin:2, standin:3" in text for text in refused)
    assert converted == ([f"standin:{number}" for number in range(4)], torch.float16)
    assert moved


def test_loading_to_devices(device: Any, tmp_path: Path) -> None:
    """A load copies each weight once, to its device, and needs no more memory there than the weights take."""

    def run() -> tuple[Any, ...]:
        plain = words()
        wanted = plain(IDS).detach()
        save_model(plain, tmp_path)
        with init_empty_weights():
            model = Words()
        gc.collect()
        torch.standin.empty_cache()
        for number in range(4):
            torch.standin.reset_peak_memory_stats(number)
        torch.standin.reset_counters()
        model = load_checkpoint_and_dispatch(model, tmp_path, SPREAD)
        counted = torch.standin.counters()
        peaks = [torch.standin.max_memory_allocated(number) for number in range(4)]
        held = [torch.standin.memory_allocated(number) for number in range(4)]
        return torch.equal(model.eval()(IDS), wanted), counted, peaks == held, held, model.head.weight is model.embed.weight

    equal, counted, tight, held, tied = device.run(run)[0]
    size = sum(tensor.nbytes for tensor in words().state_dict().values()) - words().head.weight.nbytes
    assert equal
    assert tied
    assert tight
    assert (counted.copies_to_device, counted.bytes_to_device, counted.copies_to_host) == (1 + 4 * 5, size, 0)
    assert [bytes_held // BLOCK for bytes_held in held] == [1, 1, 1, 1]


def test_loading_again_in_place(device: Any, tmp_path: Path) -> None:
    """Weights on a device get new values in their memory: a device that is full can be loaded again, and others keep their references."""

    def run() -> tuple[bool, int, bool]:
        plain = words()
        save_model(plain, tmp_path)
        model = Words().to("standin:1").eval()
        weight, before = model.blocks[0].up.weight, torch.standin.memory_allocated(1)
        torch.standin.reset_peak_memory_stats(1)
        load_checkpoint_in_model(model, tmp_path, {"": 1})
        more = torch.standin.max_memory_allocated(1) - before
        return torch.equal(model(IDS.to("standin:1")).cpu(), plain(IDS)), more, weight is model.blocks[0].up.weight

    assert device.run(run) == [(True, 0, True)]


def test_full_device_is_named(device: Any, tmp_path: Path) -> None:
    """A device that is full while weights are loaded is named with what to do; the model is as before, and its memory is free again."""

    def run() -> tuple[str, set[str], list[int]]:
        save_model(words(), tmp_path)
        with init_empty_weights():
            model = Words()
        gc.collect()
        torch.standin.empty_cache()
        torch.standin.set_capacity(2 * BLOCK, 1)
        try:
            load_checkpoint_and_dispatch(model, tmp_path, {"embed": 0, "blocks": 1, "head": 0})
        except torch.OutOfMemoryError as error:
            text = str(error)
        finally:
            torch.standin.set_capacity(4 << 30, 1)
        return text, {parameter.device.type for parameter in model.parameters()}, [torch.standin.memory_allocated(n) for n in (0, 1)]

    text, places, left = device.run(run)[0]
    assert text.startswith("standin:1 has no room for blocks.")
    assert '"cpu" or "disk"; or give device_map="auto"' in text
    assert places == {"meta"}
    assert left == [0, 0]


def test_free_memory_counts_cached(device: Any) -> None:
    """What torch keeps for reuse counts as free on a device; what a tensor has does not."""

    def run() -> tuple[int, int, int]:
        gc.collect()
        torch.standin.empty_cache()
        before = get_max_memory()[0]
        tensor = torch.ones(1 << 20, device="standin:0")
        used = get_max_memory()[0]
        del tensor
        return before, used, get_max_memory()[0]

    before, used, after = device.run(run)[0]
    assert before - used == 4 << 20
    assert after == before


def test_models_in_turn(device: Any) -> None:
    """Models that share a device in turn: each is there as a whole while it runs, and sends the one before it back."""

    def run() -> tuple[Any, ...]:
        plain = words()
        wanted = plain(IDS).detach()
        first, handle = cpu_offload_with_hook(copy.deepcopy(plain))  # the default device: the first accelerator
        second, other = cpu_offload_with_hook(copy.deepcopy(plain), "standin", prev_module_hook=handle)
        found = [first(IDS)]
        places = [(str(first.head.weight.device), str(second.head.weight.device))]
        found.append(second(IDS))
        places.append((str(first.head.weight.device), str(second.head.weight.device)))
        torch.standin.reset_counters()
        found.append(second(IDS))
        copies = torch.standin.counters().copies_to_device
        other.offload()
        places.append((str(first.head.weight.device), str(second.head.weight.device)))
        tied = second.head.weight is second.embed.weight
        handle.remove()
        other.remove()
        equal, where = [torch.equal(output.cpu(), wanted) for output in found], {str(output.device) for output in found}
        return equal, where, places, copies, tied, torch.equal(second(IDS), wanted)

    equal, where, places, copies, tied, plain_again = device.run(run)[0]
    assert equal == [True] * 3
    assert where == {"standin:0"}
    assert places == [("standin:0", "cpu"), ("cpu", "standin:0"), ("cpu", "cpu")]
    assert copies == 1  # the input
    assert tied
    assert plain_again


def test_aligned_on_another_device(device: Any, tmp_path: Path) -> None:
    """A layer of an offloaded block can be looked at on any device; that is no change of its weights."""

    def run() -> list[tuple[str, bool]]:
        plain = words()
        model = dispatch_model(copy.deepcopy(plain), MIXED, offload_dir=tmp_path)
        found = []
        for place in (None, "standin:3", "cpu"):
            with align_module_device(model.blocks[2].up, place):
                weight = model.blocks[2].up.weight
                found.append((str(weight.device), torch.equal(weight.cpu(), plain.blocks[2].up.weight)))
        found.append((str(model.blocks[2].up.weight.device), torch.equal(model(IDS), plain(IDS))))
        return found

    (outcome,) = device.outcomes(run)
    assert outcome.value == [("standin:0", True), ("standin:3", True), ("cpu", True), ("meta", True)], outcome.traceback
    assert "written to" not in outcome.output


def test_family_without_number(device: Any) -> None:
    """A family without a number is the current device, in maps and in hooks, as torch has it."""

    def run() -> list[str]:
        torch.standin.set_device(2)
        mapped = dispatch_model(words(), {"": "standin"})
        hooked = add_hook_to_module(words(), AlignDevicesHook("standin", place_submodules=True))
        moved, _ = cpu_offload_with_hook(words(), "standin")
        moved(IDS)
        return [str(parameter.device) for model in (mapped, hooked, moved) for parameter in [model.head.weight]]

    assert device.run(run) == [["standin:2"] * 3]


def test_quantised_on_devices(device: Any) -> None:
    """Weights of 8 bits are made on their devices, and compute there what they compute on the CPU."""

    def run() -> tuple[Any, ...]:
        from slipstream.big_models.quantization_config import TorchaoQuantizationConfig
        from slipstream.big_models.quantize import load_and_quantize_model

        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 7)).eval()
        x = torch.randn(3, 64)
        there = load_and_quantize_model(copy.deepcopy(plain), TorchaoQuantizationConfig(8), device_map={"0": 1, "1": 1, "2": 2, "3": 1})
        alone = load_and_quantize_model(copy.deepcopy(plain), TorchaoQuantizationConfig(8))
        host = load_and_quantize_model(plain, TorchaoQuantizationConfig(8), device_map={"": "cpu"})
        with torch.no_grad():
            wanted = host(x)
            equal = torch.equal(there(x), wanted), torch.equal(alone(x.to("standin:0")).cpu(), wanted)
        places = [str(layer.weight.device) for layer in (there[2], alone[2])]
        return equal, [type(layer.weight).__name__ for layer in (there[0], alone[0])], places

    assert device.run(run) == [((True, True), ["Int8Tensor"] * 2, ["standin:2", "standin:0"])]


def test_visible_devices(standin: str) -> None:
    """Budgets, estimates and maps know the devices that a process sees, by their numbers in it, and no others."""
    code = """
import os, torch
from slipstream import dispatch_model
from slipstream.big_models.estimate.report import measure_free_memory
from slipstream.utils import get_max_memory
print([key for key in get_max_memory()], get_max_memory()[1], list(measure_free_memory(os.environ)))
print({str(parameter.device) for parameter in dispatch_model(torch.nn.Linear(2, 2), {"": 1}).parameters()})
try:
    dispatch_model(torch.nn.Linear(2, 2), {"": 2})
except ValueError as error:
    print(error)
"""
    variables = {**os.environ, "SLIPSTREAM_DEVICE": standin, "STANDIN_VISIBLE_DEVICES": "0,3", "SLIPSTREAM_STANDIN_MEMORY": "100000"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [
        "[0, 1, 'cpu'] 100000 ['standin:0', 'standin:1', 'cpu']",
        "{'standin:1'}",
        "device_map[''] is 2, and this machine has no such device. Write one of those that it has: 0, 1, 'cpu', 'disk'.",
    ], done.stderr


def test_loading_takes_no_host_memory(device: Any, tmp_path: Path) -> None:
    """A load to devices copies from the pages of the file: no weight is in memory of the host, not even for a moment."""

    def run() -> int:
        from torch._C._profiler import _EventType
        from torch.profiler import ProfilerActivity, profile

        save_model(words(), tmp_path)
        with init_empty_weights():
            model = Words()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            load_checkpoint_and_dispatch(model, tmp_path, SPREAD)
        waiting = list(recorded.profiler.kineto_results.experimental_event_tree())
        sizes = [0]
        while waiting:
            event = waiting.pop()
            waiting += event.children
            if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
                sizes.append(event.extra_fields.alloc_size)
        return max(sizes)

    assert device.run(run)[0] < 4096  # the smallest weight matrix has 8192 bytes


def test_hooks_on_every_layer(device: Any) -> None:
    """Hooks that others attach, over a mapping: on each module, and on named blocks with their devices."""

    def run() -> list[tuple[bool, str]]:
        plain = words()
        wanted, found = plain(IDS).detach(), []
        layers, blocks, lone = (copy.deepcopy(plain) for _ in range(3))
        attach_align_device_hook(layers, execution_device="standin:1", offload=True)
        devices = {"embed": 0, "blocks": 2, "head": 0}
        offloaded = {"embed": False, "blocks": True, "head": False}
        attach_align_device_hook_on_blocks(blocks, devices, offloaded, weights_map=blocks.state_dict(), offload_buffers=True)
        add_hook_to_module(lone, AlignDevicesHook(3, offload=True, io_same_device=True, place_submodules=True))
        with torch.no_grad():
            for model in (layers, blocks, lone):
                output = model(IDS)
                found.append((torch.equal(output.cpu(), wanted), f"{output.device} {model.blocks[0].up.weight.device}"))
        return found

    assert device.run(run) == [[(True, "standin:1 meta"), (True, "cpu meta"), (True, "cpu meta")]]


def test_layerwise_casting(device: Any) -> None:
    """Weights are kept in 8 bits and computed with in 32 on the device, as on the CPU, and without a wait."""

    def run() -> tuple[bool, set[Any], int]:
        host = words(tied=False)
        there, given = copy.deepcopy(host).to("standin:1"), IDS.to("standin:1")
        for model in (host, there):
            attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, skip_modules_classes=(torch.nn.Embedding,))
        torch.standin.reset_counters()
        output = there(given)
        waits = torch.standin.counters().synchronizations
        layers = {(str(layer.weight.device), layer.weight.dtype) for block in there.blocks for layer in (block.up, block.down)}
        return torch.equal(output.cpu(), host(IDS)), layers, waits

    assert device.run(run) == [(True, {("standin:1", torch.float8_e4m3fn)}, 0)]


def test_offload_folder_from_device(device: Any, tmp_path: Path) -> None:
    """Weights on a device can be written to an offload folder, and come back from it."""

    def run() -> bool:
        plain = words()
        offload_state_dict(tmp_path, copy.deepcopy(plain).to("standin:2").state_dict())
        weights = OffloadedWeightsLoader(save_folder=tmp_path)
        return all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())

    assert device.run(run) == [True]


def test_prepared_with_device_map(device: Any, tmp_path: Path) -> None:
    """A model that `prepare` dispatches trains what is on the device through what is offloaded, and its checkpoint has all weights."""

    def run() -> tuple[Any, ...]:
        plain = words(tied=False)
        plain.blocks.requires_grad_(False)
        accelerator = Accelerator()
        placed = {"embed": 0, "blocks.0": "cpu", "blocks.1": "disk", "blocks.2": 1, "blocks.3": 1, "head": 0}
        model = accelerator.prepare(copy.deepcopy(plain), device_map=placed, offload_folder=tmp_path / "weights")
        optimizers = [torch.optim.SGD([m.embed.weight, m.head.weight], lr=0.1) for m in (plain, model)]
        optimizers[1] = accelerator.prepare(optimizers[1])
        for _ in range(3):
            plain(IDS).square().mean().backward()
            accelerator.backward(model(IDS.to(accelerator.device)).square().mean())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_model(model, tmp_path / "saved")
        other = Words(tied=False).eval()
        load_checkpoint_in_model(other, tmp_path / "saved")
        equal = all(torch.equal(value, other.state_dict()[name]) for name, value in plain.state_dict().items())
        return equal, accelerator.verify_device_map(model), str(model.embed.weight.device), str(model.blocks[2].scale.device)

    assert device.run(run) == [(True, True, "standin:0", "standin:1")]
