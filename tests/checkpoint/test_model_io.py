"""Weights of a model and single objects in files: written whole or not at all, read by others, and read from whatever others wrote."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle  # noqa: TID251 - made by the tests, to be refused
import subprocess
import sys
import tempfile
import zipfile

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from slipstream.big_models.load import load_checkpoint_in_model
from slipstream.checkpoint.manifest import MANIFEST, Manifest, ModelEntry
from slipstream.checkpoint.model_io import clean_state_dict_for_safetensors, save_model
from slipstream.checkpoint.object_file import load, save
from slipstream.checkpoint.weights import split_state_dict, write_weights
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.atomic_files import AtomicFiles
from slipstream.files.checksum import digest
from slipstream.files.disk import Disk, FileEntry


class Net(nn.Module):
    def __init__(self, *, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tie:
            self.head.weight = self.embed.weight


class Counting(nn.Module):
    def __init__(self, seen: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen = seen

    def get_extra_state(self):
        return {"seen": self.seen, "mean": torch.ones(2)}

    def set_extra_state(self, state) -> None:
        self.seen = state["seen"]


class Broken(Disk):
    """Refuses one kind of operation from the n-th on."""

    def __init__(self, method: str, after: int = 0, code: int = errno.ENOSPC) -> None:
        self._method, self._after, self._code = method, after, code

    def _fail(self, method: str) -> None:
        if method == self._method:
            self._after -= 1
            if self._after < 0:
                raise OSError(self._code, os.strerror(self._code))

    def write(self, path, chunks, size):
        self._fail("write")
        return super().write(path, chunks, size)

    def rename(self, old, new):
        self._fail("rename")
        super().rename(old, new)

    def make_folder(self, path, mode=0o777):
        self._fail("make_folder")
        super().make_folder(path, mode)


def equal(entry, two):
    entry, two = dict(entry), dict(two)
    return entry.keys() == two.keys() and all(torch.equal(entry[name], two[name]) for name in entry)


def read_all(folder):
    """What the safetensors package reads, through the index if there is one."""
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return {name: tensor for file in names for name, tensor in safetensors.torch.load_file(folder / file).items()}


# -- save_model --------------------------------------------------------------------------------------------------------


def test_single_file_for_others(tmp_path):
    """One file that others read with tied weights once."""
    model = Net()
    save_model(model, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert os.listdir(folder) == ["model.safetensors"]
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    state = dict(model.state_dict())
    del state["head.weight"]
    assert equal(read_all(folder), state)


def test_shards_and_index(tmp_path):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    save_model(model, tmp_path, max_shard_size="300B")
    assert len(os.listdir(tmp_path)) == 5
    assert equal(read_all(tmp_path), model.state_dict())


def test_wrappers_no_part_of_names(tmp_path):
    """Wrappers are no part of the names."""
    model = nn.Linear(2, 2)
    save_model(nn.DataParallel(model), tmp_path)
    assert equal(read_all(tmp_path), model.state_dict())


def test_state_dict_will_do(tmp_path):
    """A state dict will do."""
    save_model({"a": torch.ones(2)}, tmp_path)
    assert read_all(tmp_path)["a"].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int16], ids=str)
def test_types_of_elements(tmp_path, dtype):
    state = {"w": torch.ones(3).to(dtype), "scalar": torch.ones(()).to(dtype), "empty": torch.empty(0, 2, dtype=dtype)}
    save_model(state, tmp_path)
    held = read_all(tmp_path)
    assert {name: (entry.dtype, entry.shape) for name, entry in held.items()} == {
        name: (entry.dtype, entry.shape) for name, entry in state.items()
    }


def test_odd_names_kept(tmp_path):
    """Odd names are kept."""
    state = {"a/b": torch.ones(1), "": torch.ones(1), "ключ \n": torch.ones(1), "..": torch.ones(1)}
    save_model(state, tmp_path)
    assert read_all(tmp_path).keys() == state.keys()


def test_what_no_tensor_kept_beside_weights(tmp_path):
    """What is no tensor is kept beside the weights."""
    save_model(Counting(7), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "model_extra.safetensors"]
    for given in (tmp_path, tmp_path / "model.safetensors"):
        model = Counting()
        load_checkpoint_in_model(model, given, strict=True)
        assert model.seen == 7
    save_model(nn.Linear(1, 1), tmp_path)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_stale_files_removed(tmp_path):
    """Files of an earlier save go and others stay."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model_card.md").write_text("mine")
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    for largest, count in [(300, 5), (100, 9), ("10GB", 1), (600, 3), (300, 5)]:
        save_model(model, tmp_path, max_shard_size=largest)
        assert len(os.listdir(tmp_path)) == count + 2
        assert equal(read_all(tmp_path), model.state_dict())


def test_torch_format_on_request(tmp_path, caplog):
    """The format of torch is written when it is asked for by name."""
    model = Net()
    save_model(model, tmp_path, safe_serialization=False)
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]
    assert equal(torch.load(tmp_path / "pytorch_model.bin", weights_only=True), model.state_dict())
    save_model(model, tmp_path, max_shard_size=100, safe_serialization=False)
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    held = {name: tensor for file in set(index["weight_map"].values()) for name, tensor in torch.load(tmp_path / file).items()}
    assert equal(held, model.state_dict())
    assert not (tmp_path / "pytorch_model.bin").exists()
    assert not caplog.text
    save_model(model, tmp_path)
    save_model(model, tmp_path, safe_serialization=False)
    assert "takes precedence when loading" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_shard_size": "big"}, "max_shard_size='big'"),
        ({"max_shard_size": 0}, "max_shard_size"),
        ({"save_directory": None}, "save_directory"),
        ({"save_directory": ""}, "save_directory"),
        ({"save_directory": b"x"}, "save_directory"),
        ({"save_directory": "s3://bucket/x"}, "remote"),
        ({"save_directory": "a\0b"}, "save_directory"),
        ({"model": 3}, "torch.nn.Module"),
    ],
)
def test_wrong_arguments_of_save_model(tmp_path, arguments, said):
    with pytest.raises(ConfigError, match=said):
        save_model(**{"model": nn.Linear(1, 1), "save_directory": tmp_path, **arguments})
    assert os.listdir(tmp_path) == []


def test_file_or_checkpoint_as_target(tmp_path):
    """A file is no directory and a checkpoint is not written over."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        save_model(nn.Linear(1, 1), tmp_path / "file")
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(ConfigError, match="must not be changed"):
        save_model(nn.Linear(1, 1), tmp_path)


def test_lazy_modules_cannot_saved_yet(tmp_path):
    """Lazy modules cannot be saved yet."""
    with pytest.raises(CheckpointError, match="Run one forward"):
        save_model(nn.LazyLinear(2), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("method", ["write", "rename"])
def test_failing_disk_while_saving(tmp_path, method, after):
    """Never a mixture of two saves that could be read as one."""
    old = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    new = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    save_model(old, tmp_path, max_shard_size=300)
    try:
        save_model(new, tmp_path, max_shard_size=300, disk=Broken(method, after))
    except CheckpointError as error:
        assert "The disk is full" in str(error)  # noqa: PT017 - some of these come through
    assert not [name for name in os.listdir(tmp_path) if "saving" in name]
    if (tmp_path / "model.safetensors.index.json").exists():
        held = read_all(tmp_path)
        assert equal(held, old.state_dict()) or equal(held, new.state_dict())
    else:
        assert method == "rename"
    if method == "write" and after < 5:
        assert equal(read_all(tmp_path), old.state_dict())


def test_file_replaced_in_step(tmp_path):
    """One file is replaced in one step."""
    save_model(nn.Linear(2, 2), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="could not be put into their places"):
        save_model(nn.Linear(2, 2), tmp_path, disk=Broken("rename"))
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_folder_cannot_made_named(tmp_path):
    """A folder that cannot be made is named."""
    with pytest.raises(CheckpointError, match="new.*read-only"):
        save_model(nn.Linear(2, 2), tmp_path / "new", disk=Broken("make_folder", code=errno.EROFS))


def test_placing_keeps_nothing_if_left_early(tmp_path):
    """Placing keeps nothing if it is left early."""
    with AtomicFiles(tmp_path, Disk()) as files:
        files.add("a", [b"x"], 1)
    assert os.listdir(tmp_path) == []


def test_state_dicts_for_safetensors_package(tmp_path, caplog):
    """State dicts for the safetensors package."""
    clean = clean_state_dict_for_safetensors(Net().state_dict() | {"turned": torch.ones(2, 3).t(), "step": 3})
    assert clean.pop("step") == 3
    assert "head.weight (is embed.weight)" in caplog.text
    safetensors.torch.save_file(clean, tmp_path / "x.safetensors")
    assert "turned" in clean


# -- load_checkpoint_in_model ------------------------------------------------------------------------------------------


def _as_safe(model, folder):
    save_model(model, folder)
    return folder


def _as_shards(model, folder):
    save_model(model, folder, max_shard_size=50)
    return folder


def _as_index(model, folder):
    save_model(model, folder, max_shard_size=50)
    return folder / "model.safetensors.index.json"


def _as_torch(model, folder):
    save_model(model, folder, safe_serialization=False)
    return folder


def _as_torch_shards(model, folder):
    save_model(model, folder, max_shard_size=50, safe_serialization=False)
    return str(folder)


def _as_file(model, folder):
    folder.mkdir()
    safetensors.torch.save_model(model, str(folder / "anything.safetensors"))
    return folder / "anything.safetensors"


def _as_file_of_torch(model, folder):
    folder.mkdir()
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, folder / "last.ckpt")
    return folder / "last.ckpt"


def _as_old_file_of_torch(model, folder):
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return folder


def _as_file_of_parameters(model, folder):
    folder.mkdir()
    torch.save(model.state_dict(keep_vars=True), folder / "pytorch_model.bin")
    return folder


def _as_link(model, folder):
    save_model(model, folder)
    (folder / "link.safetensors").symlink_to(folder / "model.safetensors")
    return folder / "link.safetensors"


def _as_hub(model, folder):
    snapshot = folder / "models--me--net" / "snapshots" / "abc"
    blobs = folder / "models--me--net" / "blobs"
    blobs.mkdir(parents=True)
    save_model(model, snapshot, max_shard_size=50)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    return snapshot


def _as_checkpoint(model, folder):
    folder.mkdir()
    files = {}

    def add(name, encode):
        chunks, size = encode()
        data = b"".join(bytes(chunk) for chunk in chunks)
        (folder / name).write_bytes(data)
        files[name] = FileEntry(size, digest(data))

    weights = split_state_dict(model.state_dict(), "the weights")
    names, index = write_weights(add, "model", weights.tensors, weights.aliases, 50)
    entry = ModelEntry(type(model).__name__, tuple(names), weights.aliases, index)
    manifest = Manifest(stamp="1-0", step=1, created="now", written_by="a test", world=1, strategy="single", files=files, models=(entry,))
    (folder / MANIFEST).write_bytes(manifest.dump())
    return folder


_WAYS = [
    _as_safe,
    _as_shards,
    _as_index,
    _as_torch,
    _as_torch_shards,
    _as_file,
    _as_file_of_torch,
    _as_old_file_of_torch,
    _as_file_of_parameters,
    _as_link,
    _as_hub,
    _as_checkpoint,
]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("way", _WAYS)
def test_load_from_every_layout(tmp_path, way, tie):
    """Weights come back from everything they lie in."""
    source = Net(tie=tie)
    path = way(source, tmp_path / "saved")
    model = Net(tie=tie)
    weight = model.embed.weight
    assert load_checkpoint_in_model(model, path, strict=True)
    assert equal(model.state_dict(), source.state_dict())
    assert model.embed.weight is weight
    assert (model.head.weight is weight) is tie


@pytest.mark.parametrize("way", [_as_shards, _as_torch, _as_checkpoint])
def test_tied_weights_into_untied_model(tmp_path, way):
    """Tied weights go to both places of a model that is not tied."""
    source, model = Net(), Net(tie=False)
    load_checkpoint_in_model(model, way(source, tmp_path / "saved"), strict=True)
    assert equal(model.state_dict(), source.state_dict())


def test_conflicting_values_in_two_files(tmp_path, caplog):
    """Two values for one weight in different files are noticed."""
    source = Net(tie=False)
    save_model(source, tmp_path, max_shard_size=50)
    model = Net()
    load_checkpoint_in_model(model, tmp_path)
    assert "embed.weight and head.weight are tied" in caplog.text
    assert torch.equal(model.head.weight, source.embed.weight)


def test_model_on_meta_device_gets_memory(tmp_path):
    """A model on the meta device gets memory."""
    source = Net()
    save_model(source, tmp_path, max_shard_size=50)
    with torch.device("meta"):
        model = Net()
    load_checkpoint_in_model(model, tmp_path, dtype="bfloat16", keep_in_fp32_modules=["norm"])
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.dtype == torch.bfloat16
    assert model.norm.running_mean.dtype == torch.float32
    assert torch.equal(model.embed.weight, source.embed.weight.bfloat16())


def test_weights_independent_of_file(tmp_path):
    """Weights do not depend on the file afterwards."""
    source = nn.Linear(64, 64)
    save_model(source, tmp_path)
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    load_checkpoint_in_model(model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert torch.equal(model.weight, source.weight)


def test_partial_load_and_strict(tmp_path, caplog):
    """A partial load says what is missing and strict refuses it."""
    save_model({"weight": torch.ones(2, 2), "scale": torch.ones(1)}, tmp_path)
    model = nn.Linear(2, 2)
    before = model.bias.detach().clone()
    with pytest.raises(CheckpointError, match=r"(?s)bias.*scale.*strict=False"):
        load_checkpoint_in_model(model, tmp_path, strict=True)
    assert not torch.equal(model.weight, torch.ones(2, 2))
    report = load_checkpoint_in_model(model, tmp_path)
    assert (report.missing, report.unexpected) == (("bias",), ("scale",))
    assert "fits the model Linear in part" in caplog.text
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert torch.equal(model.bias, before)


def test_misfit_found_before_loading(tmp_path):
    """A shape in the last file is noticed before the first is loaded."""
    save_model({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2), "1.weight": torch.ones(3, 3)}, tmp_path, max_shard_size=16)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"1\.weight \(\[3, 3\] in the file, \[2, 2\] in the model\)"):
        load_checkpoint_in_model(model, tmp_path)
    assert equal(model.state_dict(), before)


def test_wrapped_model_and_wrapped_file(tmp_path, caplog):
    """A wrapped model is loaded and a wrapped file too."""
    source = nn.Linear(2, 2)
    save_model(source, tmp_path / "plain")
    model = nn.Linear(2, 2)
    load_checkpoint_in_model(nn.DataParallel(model), tmp_path / "plain", strict=True)
    assert equal(model.state_dict(), source.state_dict())
    assert not caplog.text
    torch.save(nn.DataParallel(source).state_dict(), tmp_path / "old.bin")
    model = nn.Linear(2, 2)
    load_checkpoint_in_model(model, tmp_path / "old.bin", strict=True)
    assert "the prefix of a wrapper" in caplog.text
    assert equal(model.state_dict(), source.state_dict())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device_map": "auto"}, "device_map='auto' is not a dict"),
        ({"device_map": {"": "disk"}}, "give offload_folder"),
        ({"offload_8bit_bnb": True}, "offload_8bit_bnb"),
        ({"full_state_dict": False}, "full_state_dict"),
        ({"broadcast_from_rank0": True}, "broadcast_from_rank0"),
        ({"dtype": "int64"}, "dtype='int64'"),
        ({"dtype": "save"}, "dtype='save'"),
        ({"dtype": 3}, "dtype=3"),
        ({"keep_in_fp32_modules": ["norm"]}, "keep_in_fp32_modules"),
        ({"keep_in_fp32_modules": "norm", "dtype": "float16"}, "keep_in_fp32_modules"),
        ({"model": "model"}, "torch.nn.Module"),
        ({"checkpoint": 5}, "checkpoint=5"),
    ],
)
def test_wrong_arguments_of_load_checkpoint(tmp_path, arguments, said):
    """Wrong arguments of load checkpoint in model."""
    with pytest.raises(ConfigError) as caught:
        load_checkpoint_in_model(**{"model": nn.Linear(1, 1), "checkpoint": tmp_path, **arguments})
    assert said in str(caught.value)


class _Trap:
    """Would leave a trace if it were made."""

    def __reduce__(self):
        return (os.mkdir, (_TRACE,))


_TRACE = os.path.join(tempfile.gettempdir(), f"slipstream-trap-{os.getpid()}")


def _nothing(folder):
    return folder / "absent"


def _empty(folder):
    return folder


def _several(folder):
    for name in "ab":
        safetensors.torch.save_file({"weight": torch.ones(1, 1)}, folder / f"{name}.safetensors")
    return folder


def _outside(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "../../etc/passwd"}}))
    return folder


def _outside_by_link(folder):
    inner = folder / "inner"
    inner.mkdir()
    safetensors.torch.save_file({"weight": torch.ones(1, 1)}, folder / "x.safetensors")
    (inner / "part.safetensors").symlink_to(folder / "x.safetensors")
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "part.safetensors"}}))
    return inner


def _absent_file(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "part.safetensors"}}))
    return folder


def _absent_tensor(folder):
    safetensors.torch.save_file({"bias": torch.ones(1)}, folder / "part.safetensors")
    return _absent_file(folder)


def _no_map(folder):
    (folder / "model.safetensors.index.json").write_text("[]")
    return folder


def _map_of_numbers(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"weight": 3}}')
    return folder


def _script(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "run.py"}}')
    return folder


def _trap(folder):
    torch.save({"weight": _Trap()}, folder / "pytorch_model.bin")
    return folder


def _bare_trap(folder):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": _Trap()}))
    return folder


def _old_trap(folder):
    torch.save({"weight": _Trap()}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return folder


def _old_cut_short(folder):
    path = folder / "pytorch_model.bin"
    torch.save({"weight": torch.ones(100)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-50])
    return folder


def _junk(folder):
    (folder / "pytorch_model.bin").write_bytes(b"\x80junk" * 20)
    return folder


def _a_list(folder):
    torch.save([torch.ones(1)], folder / "pytorch_model.bin")
    return folder


def _cut_short(folder):
    data = safetensors.torch.save({"weight": torch.ones(1, 1), "bias": torch.ones(1)})
    (folder / "model.safetensors").write_bytes(data[:-2])
    return folder


def _no_bytes(folder):
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def _pipe(folder):
    os.mkfifo(folder / "model.safetensors")
    return folder / "model.safetensors"


def _flipped(folder):
    path = _as_checkpoint(nn.Linear(1, 1), folder / "saved")
    file = sorted(path.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return path


def _without_models(folder):
    manifest = Manifest(stamp="1-0", step=1, created="now", written_by="a test", world=1, strategy="single")
    (folder / MANIFEST).write_bytes(manifest.dump())
    return folder


_ATTACKS = {
    _nothing: "There is nothing at",
    _empty: "has no weights under a usual name",
    _several: "a.safetensors, b.safetensors",
    _outside: "model.safetensors.index.json",
    _outside_by_link: "part.safetensors",
    _absent_file: "part.safetensors is missing",
    _absent_tensor: "lists 'weight' in part.safetensors",
    _no_map: "is not an index of weights",
    _map_of_numbers: "model.safetensors.index.json",
    _script: "run.py",
    _trap: "is not run",
    _bare_trap: "pytorch_model.bin",
    _old_trap: "is not run",
    _old_cut_short: "pytorch_model.bin",
    _junk: "pytorch_model.bin",
    _a_list: "a mapping of names to tensors",
    _cut_short: "model.safetensors",
    _no_bytes: "model.safetensors",
    _pipe: "only regular files are read",
    _flipped: "is damaged",
    _without_models: "without a model",
}


@pytest.mark.parametrize("attack", _ATTACKS)
def test_untrusted_files_refused(tmp_path, attack):
    """What cannot be trusted is refused by name and changes nothing."""
    model = nn.Linear(1, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = attack(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint_in_model(model, path)
    assert _ATTACKS[attack] in str(caught.value)
    assert equal(model.state_dict(), before)
    assert not os.path.exists(_TRACE)


def test_loading_needs_no_memory_but_model(tmp_path):
    """Sixteen shards of 16 MiB: at most one of them is in memory besides the model."""
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(16)])
    save_model(model, tmp_path, max_shard_size=2**24)
    program = (
        "import sys, torch\n"
        "from slipstream.big_models.load import load_checkpoint_in_model\n"
        "from torch import nn\n"
        "load_checkpoint_in_model(nn.Linear(1, 1), sys.argv[1])\n"  # everything is imported, the headers have been read once
        "model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(16)])\n"
        "def peak():\n"  # of this program alone: the other figure, ru_maxrss, begins with the peak of the process that started it
        "    return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "load_checkpoint_in_model(model, sys.argv[1], strict=True)\n"
        "print(peak() - before)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, env=environment, check=True)
    assert int(done.stdout) < 48 * 1024  # of 256 MiB, in KiB


# -- save and load -----------------------------------------------------------------------------------------------------

_STATE = {"step": 3, "betas": (0.9, 0.95), "mean": torch.arange(3.0), "names": {"a", "b"}, 5: b"bytes"}


@pytest.mark.parametrize("name", ["state.safetensors", "state.pt", "state", "state.json"])
@pytest.mark.parametrize("value", [_STATE, {"step": 3}, torch.ones(2), [1, 2], None], ids=lambda value: type(value).__name__)
def test_object_comes_back_whatever_file_called(tmp_path, name, value):
    """An object comes back whatever its file is called."""
    save(value, tmp_path / name)
    back = load(tmp_path / name)
    assert type(back) is type(value)
    if isinstance(value, dict) and "mean" in value:
        assert torch.equal(back.pop("mean"), value["mean"])
        value = {key: entry for key, entry in value.items() if key != "mean"}
    assert torch.equal(back, value) if isinstance(value, torch.Tensor) else back == value
    assert os.listdir(tmp_path) == [name]


def test_torch_suffix_warns(tmp_path, caplog):
    """A name that promises the format of torch is warned of."""
    save(_STATE, tmp_path / "state.pt", safe_serialization=True)
    save(_STATE, tmp_path / "state.safetensors")
    assert not caplog.text
    save(_STATE, tmp_path / "state.pt")
    assert "torch.load does not" in caplog.text


def test_object_in_torch_format(tmp_path):
    """The format of torch is written by name and read."""
    save(_STATE, tmp_path / "state.pt", safe_serialization=False)
    assert torch.load(tmp_path / "state.pt", weights_only=False)["step"] == 3
    assert load(tmp_path / "state.pt")["betas"] == (0.9, 0.95)
    assert load(tmp_path / "state.pt", map_location="cpu", weights_only=True)["mean"].tolist() == [0, 1, 2]


def test_files_of_other_writers(tmp_path):
    """Files of the safetensors package and old files of torch are read."""
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    assert load(tmp_path / "w.safetensors")["w"].tolist() == [1, 1]
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert load(tmp_path / "old.pt")["w"].tolist() == [1, 1]


def test_nothing_runs_unless_asked(tmp_path, monkeypatch):
    """Nothing in a file is run unless it is asked for."""
    class Harmless:
        def __reduce__(self):
            return (os.getcwd, ())

    torch.save({"w": Harmless()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="weights_only=False"):
        load(tmp_path / "x.pt")
    assert load(tmp_path / "x.pt", weights_only=False)["w"] == os.getcwd()


def test_open_files_written_and_read():
    """Open files are written and read."""
    for safe in (None, True, False):
        file = io.BytesIO()
        save(_STATE, file, safe_serialization=safe)
        file.seek(0)
        assert load(file)["mean"].tolist() == [0, 1, 2]


def test_compressed_archives_refused(tmp_path):
    """What is compressed is not unpacked by torch either."""
    torch.save({"w": torch.zeros(1_000_000)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in plain.namelist():
            packed.writestr(entry, plain.read(entry))
    for options in ({}, {"map_location": "cpu"}, {"encoding": "latin1"}):
        with pytest.raises(CheckpointError, match="is compressed"):
            load(tmp_path / "packed.pt", **options)


def test_expanded_tensor_refused(tmp_path):
    """An expanded tensor is refused with what to save instead."""
    torch.save({"w": torch.ones(1).expand(3)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"save tensor\.contiguous\(\) instead"):
        load(tmp_path / "x.pt")


def test_hostile_names_in_messages(tmp_path, caplog):
    """Names in a file move no cursor and fill no screen."""
    safetensors.torch.save_file({"\x1b[2J\nfake": torch.ones(1), "a" * 100_000: torch.ones(1)}, tmp_path / "x.safetensors")
    load_checkpoint_in_model(torch.nn.Linear(1, 1), tmp_path / "x.safetensors")
    assert "\x1b" not in caplog.text
    assert "\nfake" not in caplog.text
    assert len(caplog.text) < 2000


def test_nested_weights_are_named(tmp_path):
    """Weights one level down are not taken for none."""
    torch.save({"model": torch.nn.Linear(1, 1).state_dict(), "epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"load_state_dict\(loaded\['model'\]\)"):
        load_checkpoint_in_model(torch.nn.Linear(1, 1), tmp_path / "x.pt")


def test_only_regular_files_replaced(tmp_path):
    """What is no regular file is not replaced by one."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        for safe in (True, False):
            with pytest.raises(ConfigError, match="a pipe"):
                save({"step": 1}, tmp_path / name, safe_serialization=safe)
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="a pipe"):
        save_model(torch.nn.Linear(1, 1), tmp_path)
    assert all((tmp_path / name).is_fifo() for name in ("pipe", "link", "model.safetensors"))
    assert len(os.listdir(tmp_path)) == 3


def test_link_target_is_replaced(tmp_path):
    """A link stays one and what it leads to is replaced."""
    (tmp_path / "elsewhere").mkdir()
    save({"step": 1}, tmp_path / "elsewhere/state.json")
    (tmp_path / "state.json").symlink_to("elsewhere/state.json")
    save({"step": 2}, tmp_path / "state.json")
    assert (tmp_path / "state.json").is_symlink()
    assert load(tmp_path / "elsewhere/state.json") == {"step": 2}


def test_file_url_path(tmp_path):
    """A file URL is a path."""
    save({"step": 1}, f"file://{tmp_path}/state.json")
    assert load(f"file://{tmp_path}/state.json") == load(tmp_path / "state.json") == {"step": 1}
    with pytest.raises(ConfigError, match="remote URL"):
        save({"step": 1}, "memory://state.json")


def test_tensors_go_to_device_asked_for(tmp_path):
    """Tensors go to the device that is asked for."""
    save({"w": torch.ones(2), "again": torch.ones(2)}, tmp_path / "x.safetensors")
    assert load(tmp_path / "x.safetensors", map_location="meta")["w"].is_meta


def test_save_fails_leaves_file(tmp_path):
    """A save that fails leaves the file that was there."""
    save({"step": 1}, tmp_path / "x.json")
    for method in ("write", "rename"):
        with pytest.raises(CheckpointError, match="The disk is full"):
            save({"step": 2}, tmp_path / "x.json", disk=Broken(method))
    with pytest.raises(CheckpointError, match="a function"):
        save({"step": print}, tmp_path / "x.json")
    assert load(tmp_path / "x.json") == {"step": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_wrong_arguments_of_save_and_load(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        save(1, tmp_path)
    with pytest.raises(ConfigError, match="f=None"):
        save(1, None)
    with pytest.raises(ConfigError, match="safe_serialization"):
        save(1, tmp_path / "x", safe_serialization="no")
    save(1, tmp_path / "x")
    with pytest.raises(ConfigError, match="mmap: only for files of torch.save"):
        load(tmp_path / "x", mmap=True)
    with pytest.raises(ConfigError, match="weights_only"):
        load(tmp_path / "x", weights_only=3)
    with pytest.raises(ConfigError, match="map_location"):
        load(tmp_path / "x", map_location=lambda storage, place: storage)
    with pytest.raises(CheckpointError, match="There is no file"):
        load(tmp_path / "absent")
    for content, said in ((b"\x00\x01junk", "neither safetensors"), (b"", "is empty"), (b"{", "not JSON")):
        (tmp_path / "junk").write_bytes(content)
        with pytest.raises(CheckpointError, match=f"junk {said}|junk is {said}"):
            load(tmp_path / "junk")
    save({"w": torch.ones(1)}, tmp_path / "x.pt", safe_serialization=False)
    with pytest.raises(ConfigError, match="mmap=True is not supported"):
        load(tmp_path / "x.pt", mmap=True)
    for name in ("x", "x.pt"):
        with pytest.raises(ConfigError, match="map_location='nowhere' cannot be used here"):
            load(tmp_path / name, map_location="nowhere")
    with pytest.raises(ConfigError, match="is a text file"):
        save(1, io.StringIO())
    with pytest.raises(ConfigError, match="is a text file"):
        load(io.StringIO("1"))


def _save_on_every_rank(folder):
    from slipstream import PartialState

    state = PartialState()
    save({"rank": state.process_index}, f"{folder}/one.json")
    save({"rank": state.process_index}, f"{folder}/each.json", save_on_each_node=True)
    state.wait_for_everyone()
    return load(f"{folder}/one.json"), load(f"{folder}/each.json")


def test_main_process_alone_writes(tmp_path, ranks):
    """The main process alone writes."""
    assert ranks(2).run(_save_on_every_rank, str(tmp_path)) == [({"rank": 0}, {"rank": 0})] * 2
