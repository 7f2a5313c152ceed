"""Weights in mapped files: what is resident, what is asked for, and that values are those of the file, whatever is given back."""

from __future__ import annotations

import copy
import gc
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file

from slipstream.big_models.dispatch import dispatch_model
from slipstream.big_models.hooks.module_tensors import align_module_device, has_offloaded_params
from slipstream.big_models.hooks.weight_swap import is_placeholder
from slipstream.big_models.layer_major import find_weight_stores
from slipstream.big_models.weight_store import store as store_module
from slipstream.big_models.weight_store.store import PageBundle, WeightBlock, WeightStore, decide_residency, merge_spans
from slipstream.big_models.weight_store.transfer import BlockTransfer, DeviceBundle
from slipstream.big_models.weight_store.weights import OffloadedWeightsLoader, PrefixedDataset
from slipstream.devices.table import CPU
from slipstream.errors import CheckpointError, ConfigError, StateError
from slipstream.files.mapped_file import MappedFile, open_mapped_file

SIDE = 512  # a megabyte in float32: more than the kernel maps around a fault


def weights_of(blocks: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"blocks.{number}.weight": torch.randn(SIDE, SIDE, generator=generator) for number in range(blocks)}


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, torch.Tensor]:
    found = weights_of(6)
    save_file(found, tmp_path / "model.safetensors")
    return found


def loader_of(folder: Path, names: Any, limit: int | None = None) -> OffloadedWeightsLoader:
    return OffloadedWeightsLoader(index={name: {"safetensors_file": str(folder / "model.safetensors")} for name in names}, limit=limit)


def in_memory(block: WeightBlock) -> bool:
    """Whether the pages of a block are mapped into this process, as the kernel tells."""
    address = block.tensors[0].data_ptr()
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek((address // 4096 + SIDE * SIDE // 2048) * 8)  # the page in the middle
        return bool(int.from_bytes(pages.read(8), "little") >> 63)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 300))
@settings(max_examples=200, deadline=None)
def test_residency_within_limit(sizes: list[int], limit: int) -> None:
    """What stays and what passes is within the limit."""
    if max(sizes) > limit:
        with pytest.raises(ConfigError, match="to run"):
            decide_residency(sizes, limit)
        return
    found = decide_residency(sizes, limit)
    passing = [size for number, size in enumerate(sizes) if number not in found.kept]
    window = (1 + found.ahead) * max(passing, default=0)
    assert sum(size for number, size in enumerate(sizes) if number in found.kept) + window <= max(limit, 0)
    assert not passing or sum(sizes) > limit


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), max_size=12))
def test_merged_spans_cover_bytes(starts: list[tuple[int, int]]) -> None:
    """Joined spans cover the same bytes."""
    spans = [(start, start + length) for start, length in starts]
    found = list(merge_spans(spans, gap=1))
    assert {byte for start, end in spans for byte in range(start, end)} == {byte for start, end in found for byte in range(start, end)}
    assert found == sorted(found)
    assert all(entry[1] < other[0] for entry, other in zip(found, found[1:], strict=False))


def test_tensors_are_file_pages(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """Tensors are the files own pages."""
    first, second = loader_of(tmp_path, stored), loader_of(tmp_path, stored)
    name = next(iter(stored))
    assert torch.equal(first[name], stored[name])
    first[name].zero_()  # a private mapping: neither the file nor others see it
    assert torch.equal(second[name], stored[name])
    assert first[name].data_ptr() == first[name].data_ptr() != second[name].data_ptr()  # asked twice, and copied never


def test_limit_releases_blocks(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """With a limit blocks pass and their memory is given back."""
    size = SIDE * SIDE * 4
    weights = loader_of(tmp_path, stored, limit=4 * size)
    bundles = [weights.bundle([name], "cpu") for name in stored]
    assert weights.store.kept == {0}
    for _ in range(3):
        for name, bundle in zip(stored, bundles, strict=True):
            assert torch.equal(bundle.take()[0], stored[name])
            bundle.give_back()
            assert sum(in_memory(block) for block in weights.store.blocks) <= 4
    assert in_memory(weights.store.blocks[0])
    assert not in_memory(weights.store.blocks[2])


def test_without_a_limit_everything_stays(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """Without a limit everything stays."""
    weights = loader_of(tmp_path, stored)
    bundles = [weights.bundle([name], "cpu") for name in stored]
    for bundle in bundles:
        bundle.take()
        bundle.give_back()
    assert all(in_memory(block) for block in weights.store.blocks)
    weights.store.release()
    assert not any(in_memory(block) for block in weights.store.blocks)


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "host_memory", lambda: SimpleNamespace(available=0))


@pytest.mark.usefixtures("no_cache")
def test_direct_reads(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """What no cache can hold is read past it into few buffers."""
    weights = loader_of(tmp_path, stored, limit=4 * SIDE * SIDE * 4)
    bundles = [weights.bundle([name], "cpu") for name in stored]
    assert weights.store.reads_directly
    places = set()
    for _ in range(4):
        for name, bundle in zip(stored, bundles, strict=True):
            taken = bundle.take()[0]
            assert torch.equal(taken, stored[name])
            places.add(taken.untyped_storage().data_ptr())
            del taken
            bundle.give_back()
    assert len(places) == 1 + 3  # the mapping of what stays, and three buffers


@pytest.mark.usefixtures("no_cache")
def test_held_buffer_not_reused(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """A buffer that somebody holds is not used again."""
    weights = loader_of(tmp_path, stored, limit=3 * SIDE * SIDE * 4)
    bundles = [weights.bundle([name], "cpu") for name in stored]
    held = []
    for _ in range(2):
        for bundle in bundles:
            held.append(bundle.take()[0][3:5])  # such as an output that is a view of a weight
            bundle.give_back()
    for number, (name, view) in enumerate(zip([*stored, *stored], held, strict=True)):
        assert torch.equal(view, stored[name][3:5]), number


@pytest.mark.usefixtures("no_cache")
def test_reading_ahead_survives_a_fork(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """Reading ahead survives a fork."""
    weights = loader_of(tmp_path, stored, limit=3 * SIDE * SIDE * 4)
    bundles = [weights.bundle([name], "cpu") for name in stored]

    def run() -> bool:
        same = True
        for name, bundle in zip(stored, bundles, strict=True):
            same &= torch.equal(bundle.take()[0], stored[name])
            bundle.give_back()
        return same

    assert run()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # torch's own threads do not survive a fork either
        os._exit(0 if run() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_order_is_learned(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """The order is learned."""
    weights = loader_of(tmp_path, stored)
    for name in stored:
        weights.bundle([name], "cpu")
    store, blocks = weights.store, weights.store.blocks
    order = [0, 3, 1, 5, 2, 4]
    for _ in range(2):
        for number in order:
            store.enter(blocks[number])
            store.leave(blocks[number])
    store.enter(blocks[0])
    store.enter(blocks[3])
    assert store.following(blocks[3]) is blocks[1]


def test_reverse_order_expected(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """Backwards the one before is expected."""
    weights = loader_of(tmp_path, stored)
    for name in stored:
        weights.bundle([name], "cpu")
    store, blocks = weights.store, weights.store.blocks
    for number in (0, 1, 2, 3, 4, 5, 4):
        store.enter(blocks[number])
        store.leave(blocks[number])
    assert store.following(blocks[4]) is blocks[3]


def test_changed_file_is_error(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """A file that changes under a model is an error and no crash."""
    weights = loader_of(tmp_path, stored)
    bundles = [weights.bundle([name], "cpu") for name in stored]
    bundles[0].take()
    bundles[0].give_back()
    os.truncate(tmp_path / "model.safetensors", 10)
    bundles[1].take()  # within the pass nothing is looked at
    with pytest.raises(CheckpointError, match="changed while weights in it are in use"):
        bundles[0].take()


def test_changed_file_single_block(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """A change is seen by a model of one block."""
    bundle = loader_of(tmp_path, stored).bundle(list(stored), "cpu")
    bundle.take()
    bundle.give_back()
    os.truncate(tmp_path / "model.safetensors", 10)
    with pytest.raises(CheckpointError, match="changed while weights in it are in use"):
        bundle.take()


def test_descriptors_closed(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """Descriptors are closed with the last tensor."""
    def opened() -> int:
        links = [Path("/proc/self/fd", entry) for entry in os.listdir("/proc/self/fd")]
        return sum(os.readlink(link).startswith(str(tmp_path)) for link in links if link.is_symlink())

    weights = loader_of(tmp_path, stored)
    bundle = weights.bundle(list(stored), "cpu")
    tensor = bundle.take()[0]
    bundle.give_back()
    del weights, bundle
    gc.collect()
    assert torch.equal(tensor, next(iter(stored.values())))
    assert opened() == 1  # of the mapping itself
    del tensor
    gc.collect()
    assert opened() == 0


def test_pipes_are_not_opened(tmp_path: Path) -> None:
    """Pipes are not opened."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError):
        open_mapped_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd"])
def test_index_confined_to_folder(tmp_path: Path, stored: dict[str, torch.Tensor], name: str) -> None:
    """An index in a folder leads nowhere else."""
    folder = tmp_path / "offload"
    folder.mkdir()
    save_file(stored, tmp_path / "secret.safetensors")
    (folder / "index.json").write_text(f'{{"blocks.0.weight": {{"safetensors_file": "{name}"}}}}')
    weights = OffloadedWeightsLoader(save_folder=folder)
    with pytest.raises(CheckpointError):
        weights["blocks.0.weight"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"safetensors_file": 7}, "not a path"),
        ({"safetensors_file": "model.safetensors", "weight_name": "nothing"}, "no tensor 'nothing'"),
        ({"safetensors_file": "model.safetensors", "dtype": "float99"}, "not a torch dtype"),
        ({"dtype": "float32", "shape": [-1]}, "a dtype such as .* and a shape"),
        ({"dtype": "float32", "shape": [1000000]}, "has 4 bytes"),
    ],
)
def test_wrong_index_entries(tmp_path: Path, stored: dict[str, torch.Tensor], entry: Any, said: str) -> None:
    """Wrong entries of an index say what is wrong."""
    (tmp_path / "x.dat").write_bytes(b"1234")
    weights = OffloadedWeightsLoader(save_folder=tmp_path, index={"x": entry})
    with pytest.raises(CheckpointError, match=said):
        weights["x"]


def test_loader_sources(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    """A map has what is in memory in dumps and in safetensors."""
    (tmp_path / "bias.dat").write_bytes(bytes(torch.tensor([1.0, 2.0]).numpy()))
    index: dict[str, Any] = {name: {"safetensors_file": "model.safetensors"} for name in stored}
    index["bias"] = {"dtype": "float32", "shape": [2]}
    index["half"] = {"safetensors_file": "model.safetensors", "weight_name": "blocks.1.weight", "dtype": "float16"}
    weights = OffloadedWeightsLoader({"scale": torch.ones(3)}, tmp_path, index)
    assert weights["bias"].tolist() == [1.0, 2.0]
    assert weights["scale"].tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(weights["half"], stored["blocks.1.weight"].half())
    assert set(weights) == {*stored, "bias", "half", "scale"}
    assert len(weights) == len(stored) + 3
    below = PrefixedDataset(weights, "blocks.")
    assert list(below) == [f"{number}.weight" for number in range(6)]
    assert len(below) == 6
    taken = PrefixedDataset(weights, "blocks.1.").bundle(["weight"], "cpu").take()
    assert torch.equal(taken[0], stored["blocks.1.weight"])
    assert torch.equal(weights.bundle(["half"], "cpu").take()[0], stored["blocks.1.weight"].half())
    assert copy.deepcopy(below).dataset is weights


def test_plain_mapping_without_bundles() -> None:
    """A plain mapping with a prefix has no bundles."""
    assert not hasattr(PrefixedDataset({"a.b": 1}, "a."), "bundle")


def test_loader_needs_source() -> None:
    """Nothing to load from is an error."""
    with pytest.raises(ConfigError, match="from somewhere"):
        OffloadedWeightsLoader()


def test_copies_without_streams(
    tmp_path: Path, stored: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """Without streams blocks are copied when needed and that is logged."""
    weights = loader_of(tmp_path, stored)
    bundle = weights.bundle(["blocks.0.weight"], "cpu")
    assert isinstance(bundle, PageBundle)
    transfer = BlockTransfer(torch.device("cpu"), replace(CPU, module=SimpleNamespace))
    assert "no streams" in caplog.text
    assert torch.equal(DeviceBundle(weights.store, bundle.block, transfer).take()[0], stored["blocks.0.weight"])


def test_empty_store() -> None:
    """An empty store has nothing to keep."""
    assert WeightStore().kept == frozenset()


def test_close_once(tmp_path: Path) -> None:
    """A closed file is not closed twice."""
    (tmp_path / "empty").write_bytes(b"")
    file = MappedFile(os.open(tmp_path / "empty", os.O_RDONLY), "empty")
    assert file.size == 0
    assert file.buffer == b""


def test_backward_recalls_pages(tmp_path: Path) -> None:
    """A backward brings pages back and stays within the limit."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(SIDE, SIDE, bias=False).requires_grad_(False) for _ in range(6)]
    plain = torch.nn.Sequential(*layers)
    x = torch.randn(2, SIDE, requires_grad=True)
    plain(x).square().sum().backward()
    wanted = x.grad
    size = SIDE * SIDE * 4
    model = dispatch_model(plain, {"": "disk"}, offload_dir=tmp_path, limit=4 * size)
    (store,) = find_weight_stores(model)
    most = []

    def look(_: torch.Tensor) -> None:
        most.append(sum(in_memory(block) for block in store.blocks))

    x.grad, y = None, x
    for layer in model:
        y = layer(y)
        y.register_hook(look)
    y.square().sum().backward()
    assert wanted is not None
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)
    assert max(most) <= 4
    assert len(most) == 6


def test_align_leaf_of_block(tmp_path: Path) -> None:
    """A leaf of an offloaded block can be looked at."""
    block = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    model = torch.nn.ModuleDict({"block": block})
    weight = block[0].weight.detach().clone()
    dispatch_model(model, {"block": "disk"}, offload_dir=tmp_path)
    assert has_offloaded_params(block[0])
    assert block[0].weight.is_meta
    with align_module_device(block[0]):
        assert torch.equal(block[0].weight, weight)
    assert block[0].weight.is_meta
    again = copy.deepcopy(model)
    assert torch.equal(again["block"](torch.ones(1, 2)), model["block"](torch.ones(1, 2)))


def test_writes_into_block_lost(tmp_path: Path) -> None:
    """What is written into a block is lost as a whole."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100, bias=False) for _ in range(4)))
    wanted = [layer.weight.detach().clone() for layer in model]
    dispatch_model(model, {str(number): "disk" for number in range(4)}, offload_dir=tmp_path, limit="100KB")
    for layer in model:
        with align_module_device(layer), torch.no_grad():
            layer.weight.zero_()
    found = model.state_dict()
    assert all(torch.equal(found[f"{number}.weight"], weight) for number, weight in enumerate(wanted))


def test_functional_call(tmp_path: Path) -> None:
    """Functional calls leave the model as it was."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    x = torch.ones(1, 2)
    wanted = model(x)
    dispatch_model(model, {"0": "disk", "1": "disk"}, offload_dir=tmp_path)
    ones = {name: torch.ones(parameter.shape) for name, parameter in model.named_parameters()}
    assert torch.func.functional_call(model, ones, (x,)).tolist() == [[7.0, 7.0]]
    assert torch.equal(model(x), wanted)


class Tied(torch.nn.Module):
    """Uses the weight of a child itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.body(self.words(ids)), self.words.weight)


def test_weights_used_outside_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights that are used outside of their block are right and that is logged."""
    torch.manual_seed(0)
    model, ids = Tied(), torch.tensor([1, 3])
    wanted = model(ids)
    dispatch_model(model, {"words": "disk", "body": "disk"}, offload_dir=tmp_path)
    for _ in range(2):
        assert torch.equal(model(ids), wanted)
    assert caplog.text.count("words.weight was used outside of its offloaded block") == 1


def test_placeholder_has_no_values(tmp_path: Path) -> None:
    """A weight that is offloaded has no values of its own."""
    block = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    model = torch.nn.ModuleDict({"body": block})
    real = block[0].weight.detach().clone()
    dispatch_model(model, {"body": "disk"}, offload_dir=tmp_path, preload_module_classes=["Sequential"])
    weight, x = block[0].weight, torch.ones(1, 2)
    assert torch.equal(block[0](x), x @ real.T)
    assert torch.equal(x @ weight, x @ real)
    assert torch.equal(torch.cat([weight, weight, x]), torch.cat([real, real, x]))
    with pytest.raises(StateError, match="made of an offloaded weight is offloaded"):
        x @ weight.T
    with pytest.raises(StateError, match=r"body.0.weight is offloaded, and was written to"), torch.no_grad():
        weight.copy_(real)
    with pytest.raises(StateError, match="was written to"), torch.no_grad():
        weight.data += weight @ weight  # nothing but placeholders: torch alone would compute the shape and forget the sum
    assert (weight.shape, weight.is_meta, weight.dtype, weight.numel()) == (torch.Size([2, 2]), True, torch.float32, 4)
    assert isinstance(weight, torch.nn.Parameter)
    assert is_placeholder(copy.deepcopy(model)["body"][0].weight)
