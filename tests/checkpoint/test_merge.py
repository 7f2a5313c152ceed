"""Weights in many files become one: the same tensors, in the memory of a piece, and nothing is removed before the one is verified."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from slipstream.big_models.load import load_checkpoint_in_model
from slipstream.checkpoint.manifest import MANIFEST, Manifest, ModelEntry
from slipstream.checkpoint.model_io import merge_weights, save_model
from slipstream.checkpoint.weights import split_state_dict, write_weights
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.checksum import digest
from slipstream.files.disk import Disk, FileEntry


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4).to(torch.bfloat16)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


class Counting(nn.Linear):
    def get_extra_state(self):
        return {"seen": 7}

    def set_extra_state(self, state) -> None:
        self.seen = state["seen"]


def equal(entry, two):
    entry, two = dict(entry), dict(two)
    return entry.keys() == two.keys() and all(torch.equal(entry[name], two[name]) for name in entry)


def checkpoint_of(model, folder):
    files = {}
    folder.mkdir()

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


_state = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.lists(st.integers(0, 4), max_size=2),
        st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.complex64]),
    ),
    max_size=10,
)


@settings(max_examples=40, deadline=None)
@given(_state, st.integers(1, 200), st.booleans())
def test_cut_and_merged_again_same(kinds, largest, safe):
    """Cut and merged again they are the same."""
    state = {name: torch.rand(shape).mul(9).to(dtype) for name, (shape, dtype) in kinds.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_model(state, f"{folder}/parts", max_shard_size=largest, safe_serialization=safe)
        path = merge_weights(f"{folder}/parts", f"{folder}/whole")
        assert equal(safetensors.torch.load_file(path), state)


@pytest.mark.parametrize("target", ["folder", "new/folder", "whole.safetensors", "new/whole.safetensors"])
def test_output_folder_or_file(tmp_path, target):
    """The output is a folder or a file."""
    (tmp_path / "folder").mkdir()
    model = nn.Linear(8, 8)
    save_model(model, tmp_path / "parts", max_shard_size=100)
    path = merge_weights(tmp_path / "parts", tmp_path / target)
    assert path == tmp_path / (target if target.endswith(".safetensors") else f"{target}/model.safetensors")
    assert equal(safetensors.torch.load_file(path), model.state_dict())
    assert sorted(os.listdir(path.parent)) == sorted({path.name, *(["folder", "parts"] if path.parent == tmp_path else [])})


@pytest.mark.parametrize("way", ["shards", "index", "torch", "checkpoint", "one file"])
def test_tied_and_aligned(tmp_path, way):
    """Tied weights stay tied and the elements aligned."""
    model = Tied()
    source = tmp_path / "parts"
    if way == "checkpoint":
        checkpoint_of(model, source)
    else:
        save_model(model, source, max_shard_size="1GB" if way == "one file" else 50, safe_serialization=way != "torch")
    path = merge_weights(source / "model.safetensors.index.json" if way == "index" else source, tmp_path / "whole")
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
        stored = set(file.keys())
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    first = [entry["dtype"] for name, entry in header.items() if name != "__metadata__"]
    assert first == sorted(first, reverse=True)  # F32 before BF16
    if way != "torch":  # files of torch.save that were cut hold both names where they are in one file only
        assert stored == set(model.state_dict()) - {"head.weight"}
        assert header["__metadata__"]["head.weight"] == "embed.weight"
    back = Tied()
    load_checkpoint_in_model(back, path, strict=True)
    assert equal(back.state_dict(), model.state_dict())


def test_what_no_tensor_comes_along(tmp_path):
    """What is no tensor comes along."""
    save_model(Counting(8, 8), tmp_path / "parts", max_shard_size=100)
    merge_weights(tmp_path / "parts", tmp_path / "whole")
    assert sorted(os.listdir(tmp_path / "whole")) == ["model.safetensors", "model_extra.json"]
    back = Counting(8, 8)
    load_checkpoint_in_model(back, tmp_path / "whole", strict=True)
    assert back.seen == 7


def test_format_of_torch_written_by_name(tmp_path):
    """The format of torch is written by name."""
    model = Tied()
    save_model(model, tmp_path / "parts", max_shard_size=50)
    path = merge_weights(tmp_path / "parts", tmp_path / "whole", safe_serialization=False)
    assert path.name == "pytorch_model.bin"
    assert equal(torch.load(path, weights_only=True), model.state_dict())


def test_progress_reaches_file_size(tmp_path):
    """Progress counts up to the size of the file."""
    save_model(nn.Linear(64, 64), tmp_path / "parts", max_shard_size=10_000)
    seen = []
    path = merge_weights(tmp_path / "parts", tmp_path / "whole", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


def test_what_merged_removed_and_rest_stays(tmp_path):
    """What was merged is removed and the rest stays."""
    model = nn.Linear(8, 8)
    save_model(model, tmp_path / "parts", max_shard_size=100)
    save_model(model, tmp_path / "others", max_shard_size=100)
    (tmp_path / "others" / "config.json").write_text("{}")
    merge_weights(tmp_path / "parts", tmp_path / "whole", remove=True)
    assert not (tmp_path / "parts").exists()
    path = merge_weights(tmp_path / "others", tmp_path / "others", remove=True)
    assert sorted(os.listdir(tmp_path / "others")) == ["config.json", "model.safetensors"]
    assert equal(safetensors.torch.load_file(path), model.state_dict())


def test_nothing_removed_if_not_verified(tmp_path):
    """Nothing is removed if the disk did not keep what was written."""
    class Forgetful(Disk):
        def sync_file(self, path):
            return FileEntry(0, "0" * 32)

    save_model(nn.Linear(8, 8), tmp_path / "parts", max_shard_size=100)
    before = sorted(os.listdir(tmp_path / "parts"))
    with pytest.raises(CheckpointError, match="Nothing was removed"):
        merge_weights(tmp_path / "parts", tmp_path / "whole", remove=True, disk=Forgetful())
    assert sorted(os.listdir(tmp_path / "parts")) == before


def test_full_disk_leaves_what(tmp_path):
    """A full disk leaves what was there."""
    class Full(Disk):
        def _pwrite(self, fd, data, offset):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save_model(nn.Linear(8, 8), tmp_path / "parts", max_shard_size=100)
    merge_weights(tmp_path / "parts", tmp_path / "whole")
    before = (tmp_path / "whole" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="The disk is full"):
        merge_weights(tmp_path / "parts", tmp_path / "whole", disk=Full())
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path / "whole") == ["model.safetensors"]


def test_tensor_in_two_files(tmp_path):
    """A tensor in two files of a checkpoint is refused."""
    folder = checkpoint_of(nn.Linear(8, 8), tmp_path / "saved")
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    (folder / names[1]).write_bytes((folder / names[0]).read_bytes())
    data = (folder / names[0]).read_bytes()
    entry = FileEntry(len(data), digest(data))
    model = ModelEntry("Linear", tuple(names), {})
    manifest = Manifest(
        stamp="1-0",
        step=1,
        created="now",
        written_by="a test",
        world=1,
        strategy="single",
        files=dict.fromkeys(names, entry),
        models=(model,),
    )
    (folder / MANIFEST).write_bytes(manifest.dump())
    with pytest.raises(CheckpointError, match="in two files"):
        merge_weights(folder, tmp_path / "whole")
    with pytest.raises(CheckpointError, match="in two files"):
        load_checkpoint_in_model(nn.Linear(8, 8), folder)


def test_shard_damaged_or_gone_named(tmp_path):
    """A shard that is damaged or gone is named."""
    save_model(nn.Linear(8, 8), tmp_path / "parts", max_shard_size=100)
    shard = tmp_path / "parts" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        merge_weights(tmp_path / "parts", tmp_path / "whole")
    shard.unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors is missing"):
        merge_weights(tmp_path / "parts", tmp_path / "whole")
    assert not (tmp_path / "whole").exists() or os.listdir(tmp_path / "whole") == []


def _sharded_state(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x02.")
    (folder / "__0_0.distcp").write_bytes(b"")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"folder": "absent"}, "There is nothing at"),
        ({"folder": None}, "folder=None"),
        ({"output": 5}, "output=5"),
        ({"folder": "s3://x/y"}, "remote"),
        ({"output": "parts/model-00001-of-00002.safetensors"}, "one of the files to merge"),
        ({"output": "notes.txt"}, "is a file that does not end in .safetensors"),
        ({"output": "new.bin"}, "does not fit safe_serialization=True"),
        ({"output": "saved"}, "is a checkpoint of save_state"),
        ({"folder": "saved", "remove": True}, "whose files are not removed"),
        ({"folder": "sharded"}, "sharded/.metadata is damaged"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(nn.Linear(8, 8), "parts", max_shard_size=100)
    checkpoint_of(nn.Linear(2, 2), tmp_path / "saved")
    Path("notes.txt").write_text("mine")
    Path("sharded").mkdir()
    _sharded_state(Path("sharded"))
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        merge_weights(**{"folder": "parts", "output": "whole", **arguments})
    assert said in str(caught.value)
    assert Path("notes.txt").read_text() == "mine"


def test_merging_takes_memory_of_piece(tmp_path):
    """Sixteen tensors of 16 MiB, the last two of them in one file."""
    tensors = {f"t{number}": torch.zeros(2**22) for number in range(16)}
    save_model(tensors, tmp_path / "parts", max_shard_size=2**25)
    program = (
        "import sys\n"
        "from slipstream.checkpoint.model_io import merge_weights\n"
        "merge_weights(sys.argv[2], sys.argv[3])\n"
        "def peak():\n"  # of this program alone: the other figure, ru_maxrss, begins with the peak of the process that started it
        "    return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "merge_weights(sys.argv[1], sys.argv[3])\n"
        "print(peak() - before)\n"
    )
    save_model({"t": torch.zeros(2**22)}, tmp_path / "one")
    command = [sys.executable, "-c", program, *(str(tmp_path / name) for name in ("parts", "one", "whole"))]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    assert int(done.stdout) < 32 * 1024  # of 256 MiB, in KiB
