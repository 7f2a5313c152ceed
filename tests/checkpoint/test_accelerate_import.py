"""Checkpoints of Accelerate: everything comes over, nothing in them is run."""

from __future__ import annotations

import json
import mmap
import random
import shutil
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import accelerate_layout as layout
import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file

from slipstream.checkpoint.accelerate_import import is_accelerate_checkpoint, read_accelerate_checkpoint
from slipstream.checkpoint.pickle_reader import read_values
from slipstream.devices import rng
from slipstream.errors import CheckpointError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def read(path: Path) -> Any:
    values = read_values(memoryview(bytearray(path.read_bytes())), str(path))
    assert not values.unknown
    return values.value


def same(value: Any, other: Any) -> None:
    """Equal in every way in which torch.load's result could differ."""
    assert type(value) is type(other)
    if isinstance(value, torch.Tensor):
        assert (value.dtype, value.shape, value.stride(), value.requires_grad) == (
            other.dtype,
            other.shape,
            other.stride(),
            other.requires_grad,
        )
        bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (value, other) if tensor.numel()]
        assert not bits or torch.equal(*bits)
    elif isinstance(value, (numpy.ndarray, numpy.generic)):
        assert (value.dtype, value.shape, value.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(value, dict):
        assert list(value) == list(other)
        for key in value:
            same(value[key], other[key])
        assert getattr(value, "_metadata", None) == getattr(other, "_metadata", None)
        assert getattr(value, "default_factory", None) is getattr(other, "default_factory", None)
    elif isinstance(value, (list, tuple, deque)):
        assert (len(value), getattr(value, "maxlen", None)) == (len(other), getattr(other, "maxlen", None))
        for left, right in zip(value, other, strict=True):
            same(left, right)
    else:
        assert repr(value) == repr(other)


# -- the whole checkpoint


class Run:
    """A small training run with everything that has a state."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def train(self, steps: int) -> list[torch.Tensor]:
        losses = []
        for _ in range(steps):
            scale = random.random() + float(numpy.random.rand())
            loss = self.model(torch.randn(6, 4) * scale).square().sum()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            losses.append(loss.detach())
        return losses


@pytest.mark.parametrize("safe", [True, False])
def test_resume_exactly(tmp_path: Path, safe: bool) -> None:
    """A run goes on as if it had never stopped."""
    straight = Run()
    straight.train(5)
    states = {"optimizers": [straight.optimizer.state_dict()], "schedulers": [straight.scheduler.state_dict()]}
    layout.write(tmp_path, models=[straight.model.state_dict()], safe=safe, **states, scaler=straight.scaler.state_dict(), step=5)
    expected = straight.train(7)

    found = read_accelerate_checkpoint(tmp_path)
    resumed = Run()
    resumed.model.load_state_dict(found.models[0])
    resumed.optimizer.load_state_dict(found.optimizers[0])
    resumed.scheduler.load_state_dict(found.schedulers[0])
    assert found.scaler is not None
    resumed.scaler.load_state_dict(found.scaler)
    assert rng.restore(found.ranks[0]) == ()
    same(resumed.train(7), expected)
    same(dict(resumed.model.state_dict()), dict(straight.model.state_dict()))
    assert (found.step, found.world, found.objects) == (5, 1, {})


def test_several_of_everything_keep_numbers(tmp_path: Path) -> None:
    """Several of everything keep their numbers."""
    models = [{"weight": torch.full((2,), float(number))} for number in range(3)]
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=float(number + 1)).state_dict() for number in range(2)]
    layout.write(tmp_path, models=models, optimizers=optimizers, objects=[{"n": 0}, {"n": 1}], samplers=[(4, 7), (5, 8)], world=3, step=9)
    (tmp_path / "sampler.bin").unlink()  # a loader without such a sampler has none
    found = read_accelerate_checkpoint(tmp_path)
    assert [model["weight"][0].item() for model in found.models] == [0, 1, 2]
    assert [state["param_groups"][0]["lr"] for state in found.optimizers] == [1, 2]
    assert found.objects == {0: {"n": 0}, 1: {"n": 1}}
    assert "sampler_1.bin" in " ".join(found.warnings)
    assert (sorted(found.ranks), found.world, found.step) == ([0, 1, 2], 3, 9)


def test_damaged_random_states_left_out(tmp_path: Path) -> None:
    """A damaged file of random states is left out, with a warning."""
    layout.write(tmp_path, world=4, step=6)
    (tmp_path / "random_states_3.pkl").write_bytes(b"damaged")
    found = read_accelerate_checkpoint(tmp_path)
    assert (list(found.ranks), found.world, found.step) == ([0, 1, 2], 4, 6)
    assert any("random_states_3.pkl" in line and "rank 3 were left out" in line for line in found.warnings)


@pytest.mark.parametrize("safe", [True, False])
def test_weights_in_several_files_those_of(tmp_path: Path, safe: bool) -> None:
    """Weights in several files are those of one."""
    weights = {f"layer.{number}": torch.randn(3) for number in range(4)}
    suffix, stem = (".safetensors", "model") if safe else (".bin", "pytorch_model")
    layout.write(tmp_path)
    places = {}
    for part in range(2):
        name = f"{stem}-0000{part + 1}-of-00002{suffix}"
        here = dict(list(weights.items())[part::2])
        save_file(here, tmp_path / name) if safe else torch.save(here, tmp_path / name)
        places.update(dict.fromkeys(here, name))
    (tmp_path / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": places}))
    found = read_accelerate_checkpoint(tmp_path).models
    assert len(found) == 1
    assert found[0].keys() == weights.keys()
    assert all(torch.equal(found[0][name], weights[name]) for name in weights)


def test_safetensors_before_pickled_weights(tmp_path: Path) -> None:
    """Safetensors win over pickled weights and it is said."""
    layout.write(tmp_path, models=[{"weight": torch.ones(1)}])
    layout.write(tmp_path, models=[{"weight": torch.zeros(1)}], safe=False)
    found = read_accelerate_checkpoint(tmp_path)
    assert found.models[0]["weight"].item() == 1
    assert any("pytorch_model.bin was not read" in line for line in found.warnings)


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("parts", [{"samplers": [(3, 7)]}, {"loaders": [layout.loader_state(3)]}])
def test_samplers_and_loaders_not_read(tmp_path: Path, parts: dict[str, Any], allowed: bool) -> None:
    """States of samplers and loaders are not opened, even if pickle is allowed; the files and the remedy are said."""
    layout.write(tmp_path, **parts)
    name = "sampler.bin" if "samplers" in parts else "dl_state_dict.bin"
    (tmp_path / name).write_bytes(b"damaged")
    said = read_accelerate_checkpoint(tmp_path, allow_pickle=allowed).warnings
    assert any(name in line and "skip_first_batches" in line for line in said)


def test_what_library_never_noted_said(tmp_path: Path) -> None:
    """What the library never noted is said."""
    (tmp_path / "run").mkdir()
    torch.save({"n": 1}, tmp_path / "run" / "custom_checkpoint_0.pkl")
    said = " ".join(read_accelerate_checkpoint(tmp_path / "run").warnings)
    assert "no position in the data" in said
    assert "no weights" in said
    assert "no random_states_0.pkl" in said


def test_random_states_of_devices(tmp_path: Path) -> None:
    """Random states of devices are kept for known ones and said for others."""
    layout.write(tmp_path)
    rows = [torch.arange(16, dtype=torch.uint8)] * 2
    more = {"torch_cuda_manual_seed": rows, "torch_abc_manual_seed": rows, "xm_seed": 5}
    torch.save({**layout.random_states(2), **more}, tmp_path / "random_states_0.pkl")
    found = read_accelerate_checkpoint(tmp_path)
    same(found.ranks[0]["cuda"], rows)
    assert set(found.ranks[0]) == {"python", "numpy", "torch", "cuda"}
    assert sum("no counterpart here" in line for line in found.warnings) == 2


# -- what is no data


class Marked:
    """Unpickling it leaves a mark."""

    made = 0

    def __init__(self) -> None:
        self.value = 3

    def __setstate__(self, state: dict[str, Any]) -> None:
        Marked.made += 1
        self.__dict__.update(state)


def test_other_classes_need_allow_pickle(tmp_path: Path) -> None:
    """Objects of other classes are left out unless pickle is allowed."""
    layout.write(tmp_path, objects=[{"n": 1}, {"inner": [Marked()]}])
    Marked.made = 0
    found = read_accelerate_checkpoint(tmp_path)
    assert (found.objects, found.unread, Marked.made) == ({0: {"n": 1}}, {1}, 0)
    assert any("custom_checkpoint_1.pkl" in line and "Marked" in line and "allow_pickle=True" in line for line in found.warnings)
    allowed = read_accelerate_checkpoint(tmp_path, allow_pickle=True)
    assert (allowed.objects[1]["inner"][0].value, allowed.unread, Marked.made) == (3, set(), 1)


@pytest.mark.parametrize("part", ["optimizers", "schedulers"])
def test_state_needing_pickle_refused(tmp_path: Path, part: str) -> None:
    """A state that cannot do without pickle is refused by name."""
    state = {**torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).state_dict(), "helper": Marked()}
    layout.write(tmp_path, **{part: [state]})
    with pytest.raises(CheckpointError, match=rf"{part[:-1]}\.bin contains more than data: .*Marked.*allow_pickle=True"):
        read_accelerate_checkpoint(tmp_path)
    found = getattr(read_accelerate_checkpoint(tmp_path, allow_pickle=True), part)
    assert found[0]["helper"].value == 3


def test_files_before_torch_1_6(tmp_path: Path) -> None:
    """Files of before torch 1.6 need pickle."""
    layout.write(tmp_path)
    torch.save({"n": torch.ones(2)}, tmp_path / "custom_checkpoint_0.pkl", _use_new_zipfile_serialization=False)
    found = read_accelerate_checkpoint(tmp_path)
    assert (found.objects, found.unread) == ({}, {0})
    same(read_accelerate_checkpoint(tmp_path, allow_pickle=True).objects[0], {"n": torch.ones(2)})


# -- folders that are something else


def test_folder_without_checkpoint(tmp_path: Path) -> None:
    """A folder that is no checkpoint says what was expected and what is there."""
    (tmp_path / "notes.txt").write_text("hello")
    assert not is_accelerate_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)MANIFEST\.json.*random_states_0\.pkl.*but notes\.txt"):
        read_accelerate_checkpoint(tmp_path)
    assert not is_accelerate_checkpoint(tmp_path / "absent")


def test_weights_alone_no_checkpoint(tmp_path: Path) -> None:
    """Weights alone are no checkpoint."""
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert not is_accelerate_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="load_checkpoint_in_model"):
        read_accelerate_checkpoint(tmp_path)


def test_checkpoint_of_ours_not_foreign(tmp_path: Path) -> None:
    """A checkpoint of ours is not foreign."""
    layout.write(tmp_path)
    assert is_accelerate_checkpoint(tmp_path)
    (tmp_path / "MANIFEST.json").write_text("{}")
    assert not is_accelerate_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is a checkpoint of Slipstream"):
        read_accelerate_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("pytorch_model_fsdp_0_rank0.bin", "FSDP"),
        ("optimizer_0_rank1.bin", "FSDP"),
        ("pytorch_model/mp_rank_00_model_states.pt", "DeepSpeed"),
        ("zero_to_fp32.py", "DeepSpeed"),
    ],
)
def test_sharded_layouts_refused(tmp_path: Path, name: str, what: str) -> None:
    """Sharded layouts are refused by name with what to do."""
    layout.write(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    assert is_accelerate_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=rf"(?s){what}.*Merge the weights"):
        read_accelerate_checkpoint(tmp_path)


@pytest.mark.parametrize("missing", ["optimizer.bin", "model_1.safetensors"])
def test_gap_in_numbers_error(tmp_path: Path, missing: str) -> None:
    """A gap in the numbers is an error."""
    states = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).state_dict()] * 3
    layout.write(tmp_path, models=[{"weight": torch.ones(1)}] * 3, optimizers=states)
    (tmp_path / missing).unlink()
    with pytest.raises(CheckpointError, match="a part is missing"):
        read_accelerate_checkpoint(tmp_path)


# -- the reader of torch's files against torch itself

simple_keys = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
keys = st.one_of(simple_keys, st.tuples(simple_keys, simple_keys))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.sampled_from([torch.Size([2, 3]), torch.device("cpu"), torch.float16, numpy.float32(1.5), numpy.int64(-3), numpy.bool_(True)]),
    st.builds(lambda n: torch.arange(float(n)), st.integers(0, 4)),
    st.builds(lambda n: numpy.arange(6, dtype=numpy.int16).reshape(2, 3)[:, :n], st.integers(0, 3)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda found: defaultdict(list, found)),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
        st.sets(st.integers(), max_size=3),
        st.frozensets(st.text(max_size=3), max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(tree=trees, protocol=st.sampled_from([2, 2, 3, 4]))
def test_values_those_torch_reads(tmp_path_factory: pytest.TempPathFactory, tree: Any, protocol: int) -> None:
    """Values are those that torch reads."""
    path = tmp_path_factory.getbasetemp() / "tree.bin"
    torch.save(tree, path, pickle_protocol=protocol)
    same(read(path), torch.load(path, weights_only=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_kind(tmp_path: Path, dtype: torch.dtype) -> None:
    """Tensors of every kind are those that torch reads."""
    bits = torch.randint(0, 2, (12 * dtype.itemsize,), dtype=torch.uint8)
    base = bits.view(dtype).reshape(3, 4)
    many = [base, base.t(), base[1:, ::2], base[2], base[1, 1], base[:0], torch.empty(0, 3, dtype=dtype), base.clone()]
    torch.save(many, tmp_path / "many.bin")
    found = read(tmp_path / "many.bin")
    same(found, torch.load(tmp_path / "many.bin", weights_only=False))
    assert len({entry.untyped_storage().data_ptr() for entry in found[:5]}) == 1  # what shared memory shares it again


def tagged(tensor: torch.Tensor) -> torch.Tensor:
    """With an attribute, as some libraries mark their parameters."""
    tensor.tag = 3  # type: ignore[attr-defined]
    return tensor


def test_parameters_gradients_and_versions_come_over(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(3)
    parts = [
        model.state_dict(),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
        tagged(torch.ones(2, dtype=torch.uint16)),
        tagged(torch.nn.Parameter(torch.ones(2))),
    ]
    torch.save(parts, tmp_path / "parts.bin")
    same(read(tmp_path / "parts.bin"), torch.load(tmp_path / "parts.bin", weights_only=False))


def test_tensors_bytes_read(tmp_path: Path) -> None:
    """Tensors are the bytes that were read."""
    torch.save({"weight": torch.randn(100_000)}, tmp_path / "one.bin")
    content = (tmp_path / "one.bin").read_bytes()
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    found = read_values(memoryview(memory), "one.bin").value["weight"]
    assert first <= found.data_ptr() < first + len(content)


def test_file_without_checksums_read(tmp_path: Path) -> None:
    """A file without checksums is read."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(3)}, tmp_path / "one.bin")
    finally:
        torch.serialization.set_crc32_options(before)
    same(read(tmp_path / "one.bin"), {"weight": torch.ones(3)})


def test_archive_with_wide_numbers_read(tmp_path: Path) -> None:
    """As files of more than four gigabytes have them."""
    torch.save({"weight": torch.ones(3)}, tmp_path / "one.bin")
    with zipfile.ZipFile(tmp_path / "one.bin") as old, zipfile.ZipFile(tmp_path / "wide.bin", "w") as new:
        for entry in old.infolist():
            with new.open(entry.filename, "w", force_zip64=True) as file:
                file.write(old.read(entry))
    same(read(tmp_path / "wide.bin"), {"weight": torch.ones(3)})


@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_flipped_bit(tmp_path_factory: pytest.TempPathFactory, place: float, bit: int) -> None:
    """A flipped bit is found or does not matter."""
    path = tmp_path_factory.getbasetemp() / "flipped.bin"
    value = {"weight": torch.arange(20.0), "numbers": [1, 2.5, "text"]}
    torch.save(value, path)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    try:
        found = read_values(memoryview(data), "flipped.bin").value
    except CheckpointError as error:
        found = str(error)
    if isinstance(found, str):
        assert "flipped.bin" in found
    else:
        same(found, value)


def test_file_cut_off_anywhere_refused(tmp_path: Path) -> None:
    """A file cut off anywhere is refused."""
    torch.save({"weight": torch.arange(20.0)}, tmp_path / "whole.bin")
    data = (tmp_path / "whole.bin").read_bytes()
    for length in range(len(data)):
        with pytest.raises(CheckpointError, match="whole.bin"):
            read_values(memoryview(bytearray(data[:length])), "whole.bin")


def test_nothing_in_folder_changed(tmp_path: Path) -> None:
    """Nothing in the folder is changed."""
    layout.write(tmp_path / "run", models=[{"weight": torch.ones(2)}], objects=[{"n": 1}], samplers=[(1, 2)])
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    read_accelerate_checkpoint(tmp_path / "run", allow_pickle=True)
    for path in (tmp_path / "copy").iterdir():
        assert (tmp_path / "run" / path.name).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "run").iterdir())) == len(list((tmp_path / "copy").iterdir()))


def test_numbered_run_continues(tmp_path: Path) -> None:
    """A numbered run goes on here and its own checkpoints come first then."""
    from slipstream import Accelerator
    from slipstream.utils import ProjectConfiguration

    def begin() -> tuple[Any, torch.nn.Module]:
        project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
        accelerator = Accelerator(project_config=project)
        return accelerator, accelerator.prepare(torch.nn.Linear(1, 1))

    folder = tmp_path / "checkpoints" / "checkpoint_4"
    layout.write(folder, models=[{"weight": torch.full((1, 1), 7.0), "bias": torch.zeros(1)}], step=3)
    accelerator, model = begin()
    assert accelerator.load_state() == str(folder)
    assert model.weight.item() == 7.0
    assert accelerator.save_state() == str(tmp_path / "checkpoints" / "checkpoint_5")
    assert begin()[0].load_state() == str(tmp_path / "checkpoints" / "checkpoint_5")
