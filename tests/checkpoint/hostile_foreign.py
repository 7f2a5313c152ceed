"""Folders that look like checkpoints of Accelerate and were made to do harm, and a program that reads them under watch.

`CASES` names an attack, builds it in a folder and says how it has to end. Run as a program with a folder of built cases, this reads each
of them and prints what happened: how it ended, what the interpreter was asked to do meanwhile (an audit hook sees every
file opened, module imported, process started), how long it took. Memory is limited while it reads, so that a bomb ends in an error.
"""

from __future__ import annotations

import io
import json
import os
import pickle  # noqa: TID251 - the attacks are pickles
import resource
import shutil
import signal
import socket
import struct
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate_layout as layout
import numpy
import torch

REFUSED, LEFT_OUT = "refused", "left out"
ROOM = 384 << 20
"""Bytes of memory that reading any of them may take on top; none of the files has more than a few."""


@dataclass(frozen=True)
class Case:
    """One attack: `build(folder, outside, marker)` adds it to a whole checkpoint; `outside` is a file, `marker` a path nobody may make."""

    build: Callable[[Path, Path, Path], None]
    ends: str
    names: str
    """What the message has to name."""


CASES: dict[str, Case] = {}


def attack(name: str, ends: str, names: str) -> Callable[[Callable[[Path, Path, Path], None]], Callable[[Path, Path, Path], None]]:
    def register(build: Callable[[Path, Path, Path], None]) -> Callable[[Path, Path, Path], None]:
        assert name not in CASES
        CASES[name] = Case(build, ends, names)
        return build

    return register


class Evil:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def whole(folder: Path) -> None:
    """A checkpoint without fault, to which an attack is added."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    states = {"optimizers": [optimizer.state_dict()] * 2, "schedulers": [{"last_epoch": 3, "base_lrs": [0.1]}], "objects": [{"n": 1}]}
    parts = {"scaler": {"scale": 2.0}, "loaders": [layout.loader_state(3)], "samplers": [(1, 2)], "world": 2, "step": 4}
    layout.write(folder, models=[{"weight": torch.ones(3)}] * 2, **states, **parts)


def archive(pickled: bytes, storages: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file as torch.save makes it, around a pickle of our own."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", compression) as made:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", **(storages or {}), "version": b"3\n"}.items():
            made.writestr(f"archive/{name}", data)
    return memory.getvalue()


def program(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    data = value.to_bytes(16, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def called(path: str, *arguments: bytes) -> bytes:
    module, _, name = path.rpartition(".")
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n(" + b"".join(arguments) + b"tR"


def storage(key: str = "0", count: int = 4, kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(count) + b"tQ"


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(shape: bytes, strides: bytes, offset: int = 0, stored: bytes | None = None) -> bytes:
    parts = (stored or storage(), number(offset), shape, strides, b"\x89", b"N")
    return program(called("torch._utils._rebuild_tensor_v2", *parts))


# -- pickles that do something, under every name that a reader looks at

TORCH_FILES = {
    "optimizer.bin": REFUSED,
    "optimizer_1.bin": REFUSED,
    "scheduler.bin": REFUSED,
    "scaler.pt": REFUSED,
    "pytorch_model.bin": REFUSED,
    "pytorch_model_1.bin": REFUSED,
    "sampler.bin": LEFT_OUT,
    "dl_state_dict.bin": LEFT_OUT,
    "random_states_0.pkl": LEFT_OUT,
    "random_states_1.pkl": LEFT_OUT,
    "custom_checkpoint_0.pkl": LEFT_OUT,
}


def _put(folder: Path, name: str, data: bytes) -> None:
    if name.startswith("pytorch_model"):
        (folder / name.replace("pytorch_model", "model").replace(".bin", ".safetensors")).unlink()
    (folder / name).write_bytes(data)


for _name, _ends in TORCH_FILES.items():

    @attack(f"pickle in {_name}", _ends, _name)
    def _(folder: Path, outside: Path, marker: Path, name: str = _name) -> None:
        _put(folder, name, b"")
        torch.save({"weight": torch.ones(2), "evil": Evil(marker)}, folder / name)

    @attack(f"bare pickle in {_name}", _ends, _name)
    def _(folder: Path, outside: Path, marker: Path, name: str = _name) -> None:
        _put(folder, name, pickle.dumps(Evil(marker)))

    @attack(f"old format in {_name}", _ends, _name)
    def _(folder: Path, outside: Path, marker: Path, name: str = _name) -> None:
        _put(folder, name, b"")
        torch.save({"evil": Evil(marker)}, folder / name, _use_new_zipfile_serialization=False)

    @attack(f"nothing in {_name}", _ends, _name)
    def _(folder: Path, outside: Path, marker: Path, name: str = _name) -> None:
        _put(folder, name, b"")


for _name in ("model.safetensors", "model_1.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json"):

    @attack(f"pickle in {_name}", REFUSED, _name)
    def _(folder: Path, outside: Path, marker: Path, name: str = _name) -> None:
        if "index" in name:
            (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps(Evil(marker)))


@attack("pickle in a shard", REFUSED, "pytorch_model-00001-of-00001.bin")
def _(folder: Path, outside: Path, marker: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Evil(marker)}, folder / "pytorch_model-00001-of-00001.bin")
    index(folder, {"weight": "pytorch_model-00001-of-00001.bin"}, "pytorch_model.bin")


@attack("pickle in a shard that is said to be safetensors", REFUSED, "model-00001-of-00001.bin")
def _(folder: Path, outside: Path, marker: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Evil(marker)}, folder / "model-00001-of-00001.bin")
    index(folder, {"weight": "model-00001-of-00001.bin"})


# -- ways to make a pickle do something


def _marked(how: Callable[[str], bytes]) -> Callable[[Path, Path, Path], None]:
    return lambda folder, outside, marker: (folder / "optimizer.bin").write_bytes(archive(how(str(marker)), {"data/0": bytes(16)})) and None


WAYS: dict[str, Callable[[str], bytes]] = {
    "a call": lambda marker: program(called("os.mkdir", text(marker))),
    "a call through eval": lambda marker: program(called("builtins.eval", text(f"__import__('os').mkdir({marker!r})"))),
    "a shell": lambda marker: program(called("os.system", text(f"mkdir {marker}"))),
    "a process": lambda marker: program(called("subprocess.Popen", b"(" + text("mkdir") + text(marker) + b"l")),
    "an old instance": lambda marker: program(b"(" + text(marker) + b"ios\nmkdir\n"),
    "an old object": lambda marker: program(b"(cos\nmkdir\n" + text(marker) + b"o"),
    "a new object": lambda marker: program(b"cos\nmkdir\n" + text(marker) + b"\x85\x81"),
    "a new object with keywords": lambda marker: program(b"cos\nmkdir\n" + text(marker) + b"\x85}\x92"),
    "a name from the stack": lambda marker: program(text("os") + text("mkdir") + b"\x93" + text(marker) + b"\x85R"),
    "a name with dots": lambda marker: program(text("torch") + text("serialization.os.mkdir") + b"\x93" + text(marker) + b"\x85R"),
    "a state": lambda marker: program(b"ctorch._utils\n_rebuild_tensor_v2\n)R" + called("os.mkdir", text(marker)) + b"b"),
    "a key": lambda marker: program(b"}" + called("os.mkdir", text(marker)) + b"Ns"),
    "an argument of a known call": lambda marker: program(called("collections.OrderedDict", called("os.mkdir", text(marker)))),
    "the metadata of weights": lambda marker: program(
        called("collections.OrderedDict") + b"}" + text("_metadata") + called("os.mkdir", text(marker)) + b"sb"
    ),
    "the hooks of a tensor": lambda marker: program(
        called("torch._utils._rebuild_tensor_v2", storage(), number(0), numbers(4), numbers(1), b"\x89", called("os.mkdir", text(marker)))
    ),
    "the kind of a storage": lambda marker: program(
        called(
            "torch._utils._rebuild_tensor_v2",
            b"(" + text("storage") + called("os.mkdir", text(marker)) + text("0") + text("cpu") + number(4) + b"tQ",
            *(number(0), numbers(4), numbers(1), b"\x89", b"N"),
        )
    ),
    "what makes defaults": lambda marker: program(called("collections.defaultdict", b"cos\nmkdir\n") + text(marker) + b"Ns"),
    "a result that is called": lambda marker: program(called("functools.partial", b"cos\nmkdir\n", text(marker)) + b")R"),
    "an array of objects": lambda marker: program(
        called("numpy._core.multiarray._reconstruct", b"cnumpy\nndarray\n", numbers(0), text("b")),
        *(b"(", number(1), numbers(1), called("numpy.dtype", text("O8")), b"\x89"),
        *(b"](", called("os.mkdir", text(marker)), b"etb"),
    ),
    "another file through torch": lambda marker: program(called("torch.load", text(marker))),
    "a file that is mapped": lambda marker: program(called("numpy.memmap", text(marker), text("uint8"), text("w+"), number(0), numbers(8))),
    "an extension": lambda marker: program(b"\x82\x01"),
    "a persistent text": lambda marker: program(b"P" + marker.encode() + b"\n"),
    "a buffer from outside": lambda marker: program(b"\x97"),
}
for _way, _how in WAYS.items():
    attack(f"way: {_way}", REFUSED, "optimizer.bin")(_marked(_how))


# -- memory and time

BOMBS: dict[str, bytes] = {
    "a tensor by its class": program(called("torch.Tensor", number(10**6), number(10**6))),
    "a storage by its class": program(called("torch.UntypedStorage", number(10**12))),
    "a typed storage by its class": program(called("torch.FloatStorage", number(10**11))),
    "bytes by their class": program(called("builtins.bytearray", number(10**12))),
    "a range in a list": program(called("builtins.list", called("builtins.range", number(10**10)))),
    "a shape with strides of zero": tensor(numbers(10**6, 10**6), numbers(0, 0)),
    "a shape of which nothing is there": tensor(numbers(10**10), numbers(1)),
    "a shape that overflows": tensor(numbers(2**32, 2**32, 2**32), numbers(0, 0, 0)),
    "a negative length": tensor(numbers(-1), numbers(1)),
    "a negative stride": tensor(numbers(2), numbers(-1), 3),
    "a negative offset": tensor(numbers(2), numbers(1), -2),
    "an offset behind the end": tensor(numbers(2), numbers(1), 3),
    "a stride behind the end": tensor(numbers(2), numbers(10**12)),
    "too many dimensions": tensor(numbers(*[1] * 100_000), numbers(*[1] * 100_000)),
    "a length that is a text": tensor(b"(" + text("4") + b"t", numbers(1)),
    "a storage that is not there": tensor(numbers(4), numbers(1), stored=storage("7")),
    "a storage elsewhere": tensor(numbers(4), numbers(1), stored=storage("../../../outside")),
    "a storage that is larger than said": tensor(numbers(2), numbers(1), stored=storage("0", 2)),
    "a storage that is smaller than said": tensor(numbers(4), numbers(1), stored=storage("0", 10**12)),
    "a storage of negative size": tensor(numbers(0), numbers(1), stored=storage("0", -4)),
    "a storage of no kind": tensor(numbers(4), numbers(1), stored=storage("0", 4, "WeirdStorage")),
    "a billion laughs": program(b"]q\0" + b"".join(b"0](" + (b"h" + bytes([at])) * 10 + b"eq" + bytes([at + 1]) for at in range(30))),
    "a billion laughs in mappings": program(
        b"}q\0",
        *(b"0}(" + b"".join(number(index) + b"h" + bytes([at]) for index in range(9)) + b"uq" + bytes([at + 1]) for at in range(30)),
    ),
    "tuples in tuples": program(b")" + b"\x85q\0" * 100_000),
    "lists in lists": program(b"]q\0" * 100_000 + b"a" * 99_999),
    "nested without a note": program(b")" + b"\x85" * 100_000),
    "something that contains itself": program(b"]q\x00h\x00a"),
    "more objects than bytes": program(b"](" + b"}" * 300_000 + b"e"),
    "keys with one hash": program(b"}(" + b"".join(number(place * (2**61 - 1)) + b"N" for place in range(1, 30_000)) + b"u"),
    "tuples as keys with one hash": program(b"}(" + b"".join(numbers(place * (2**61 - 1)) + b"N" for place in range(1, 30_000)) + b"u"),
    "a key that is nested": program(b"})" + b"\x85q\0" * 40 + b"Ns"),
    "a key that is nested without end": program(b"})" + b"\x85q\0" * 100_000 + b"Ns"),
    "a key that is a list": program(b"}]Ns"),
    "a key twice": program(b"}(" + (text("state") + b"N") * 2 + b"u"),
    "a number of many digits": program(b"L" + b"9" * 1_000_000 + b"L\n"),
    "a long number that is not there": program(b"\x8b" + struct.pack("<i", 2**31 - 1)),
    "a text that is not there": program(b"\x8d" + struct.pack("<Q", 2**62)),
    "bytes that are not there": program(b"\x8e" + struct.pack("<Q", 2**62)),
    "a frame that is not there": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "a note that nobody made": program(b"h\x05"),
    "no mark": program(b"NNNt"),
    "an empty stack": program(b"0"),
    "nothing at all": b"",
    "no end": b"\x80\x02}",
    "two values": program(b"NN"),
    "no pickle": b"\xff" * 100,
    "a device that there is not": program(called("torch.device", text("\0nonsense"))),
    "an array whose size lies": program(
        called("numpy._core.multiarray._reconstruct", b"cnumpy\nndarray\n", numbers(0), text("b")),
        *(b"(", number(1), numbers(10**6, 10**6), called("numpy.dtype", text("u1")), b"\x89"),
        *(called("_codecs.encode", text("x"), text("latin1")), b"tb"),
    ),
    "a text with another coding": program(called("_codecs.encode", text("x"), text("zlib"))),
    "a deque with a length that is none": program(called("collections.deque", b"]", number(2**80))),
}
for _bomb, _data in BOMBS.items():
    attack(f"bomb: {_bomb}", REFUSED, "optimizer.bin")(
        lambda folder, outside, marker, data=_data: (folder / "optimizer.bin").write_bytes(archive(data, {"data/0": bytes(16)})) and None
    )


# -- archives


@attack("archive: compressed", REFUSED, "optimizer.bin")
def _(folder: Path, outside: Path, marker: Path) -> None:
    pickled = tensor(numbers(25 << 20), numbers(1), stored=storage("0", 25 << 20))
    data = archive(pickled, {"data/0": bytes(100 << 20)}, zipfile.ZIP_DEFLATED)
    assert len(data) < 1 << 20
    (folder / "optimizer.bin").write_bytes(data)


def changed(change: Callable[[bytearray], Any]) -> Callable[[Path, Path, Path], None]:
    """The optimizer's file with something changed in it."""

    def build(folder: Path, outside: Path, marker: Path) -> None:
        data = bytearray(archive(tensor(numbers(4), numbers(1)), {"data/0": bytes(16)}))
        made = change(data)
        (folder / "optimizer.bin").write_bytes(data if made is None else made)

    return build


def _field(place: int, form: str, value: int, signature: bytes = b"PK\1\2", last: bool = False) -> Callable[[bytearray], None]:
    """Sets a field of the first (or last) record with this signature."""

    def change(data: bytearray) -> None:
        at = data.rfind(signature) if last else data.find(signature)
        struct.pack_into(form, data, at + place, value)

    return change


def _both(entry: Callable[[bytearray], None], other: Callable[[bytearray], None]) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        entry(data)
        other(data)

    return change


def _doubled(data: bytearray) -> bytes:
    memory = io.BytesIO(bytes(data))
    with warnings.catch_warnings(), zipfile.ZipFile(memory, "a") as made:
        warnings.simplefilter("ignore")
        made.writestr("archive/data.pkl", program(b"N"))
    return memory.getvalue()


ARCHIVES: dict[str, Callable[[bytearray], Any]] = {
    "an entry larger than the file": _both(_field(20, "<I", 2**31), _field(24, "<I", 2**31)),
    "an entry of a size that is nowhere": _both(_field(20, "<I", 0xFFFFFFFF), _field(24, "<I", 0xFFFFFFFF)),
    "an entry behind the end": _field(42, "<I", 2**31),
    "an entry on top of another": _field(42, "<I", 0, last=True),
    "an entry said to be compressed": _field(10, "<H", 8),
    "an encrypted entry": _field(8, "<H", 1),
    "a wrong checksum": _field(16, "<I", 12345),
    "a name that differs from the table": lambda data: data.__setitem__(slice(30, 34), b"evil"),
    "an entry twice": _doubled,
    "more entries than there are": _both(_field(8, "<H", 5000, b"PK\5\6"), _field(10, "<H", 5000, b"PK\5\6")),
    "fewer entries than there are": _both(_field(8, "<H", 1, b"PK\5\6"), _field(10, "<H", 1, b"PK\5\6")),
    "a table behind the end": _field(16, "<I", 2**31, b"PK\5\6"),
    "a table of no size": _field(12, "<I", 0, b"PK\5\6"),
    "something before it": lambda data: b"MZ" + bytes(data),
    "something after it": lambda data: bytes(data) + b"more",
    "half of it": lambda data: bytes(data[: len(data) // 2]),
    "all but the last byte": lambda data: bytes(data[:-1]),
    "the first bytes alone": lambda data: bytes(data[:4]),
    "the end alone": lambda data: b"PK\5\6" + bytes(18),
    "a comment that hides another end": lambda data: bytes(data[:-2]) + b"\x16\x00" + b"PK\5\6" + bytes(18),
    "no pickle": lambda data: bytes(data).replace(b"data.pkl", b"data.xyz"),
    "another order of bytes": lambda data: archive(tensor(numbers(4), numbers(1)), {"data/0": bytes(16), "byteorder": b"big"}),
    "an entry that is not in the folder": lambda data: bytes(data).replace(b"archive/data/0", b"elsewhere/at/0"[:14]),
    "a name that is no text": lambda data: bytes(data).replace(b"archive/data/0", b"archive/\xff\xfe\xfd\xfc/0"),
}
for _kind, _change in ARCHIVES.items():
    attack(f"archive: {_kind}", REFUSED, "optimizer.bin")(changed(_change))


# -- files that are none, or somewhere else

PLACES = ("model.safetensors", *(name for name in TORCH_FILES if not name.startswith("pytorch_model")))


for _name in PLACES:

    @attack(f"link in place of {_name}", LEFT_OUT if _name in ("sampler.bin", "dl_state_dict.bin") else REFUSED, _name)
    def _(folder: Path, outside: Path, marker: Path, name: str = _name) -> None:
        (folder / name).rename(outside.parent / f"{marker.name}-{name}")
        (folder / name).symlink_to(outside.parent / f"{marker.name}-{name}")

    @attack(f"pipe in place of {_name}", LEFT_OUT if _name in ("sampler.bin", "dl_state_dict.bin") else REFUSED, _name)
    def _(folder: Path, outside: Path, marker: Path, name: str = _name) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)


@attack("link to a device", REFUSED, "optimizer.bin")
def _(folder: Path, outside: Path, marker: Path) -> None:
    (folder / "optimizer.bin").unlink()
    (folder / "optimizer.bin").symlink_to("/dev/zero")


@attack("link to nothing", REFUSED, "optimizer.bin")
def _(folder: Path, outside: Path, marker: Path) -> None:
    (folder / "optimizer.bin").unlink()
    (folder / "optimizer.bin").symlink_to("nothing")


@attack("link to itself", REFUSED, "optimizer.bin")
def _(folder: Path, outside: Path, marker: Path) -> None:
    (folder / "optimizer.bin").unlink()
    (folder / "optimizer.bin").symlink_to("optimizer.bin")


@attack("socket in place of a file", REFUSED, "scaler.pt")
def _(folder: Path, outside: Path, marker: Path) -> None:
    (folder / "scaler.pt").unlink()
    before = os.getcwd()
    os.chdir(folder)  # the path of a socket may have a hundred bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("scaler.pt")
    finally:
        os.chdir(before)


@attack("a hole of a terabyte", REFUSED, "random_states_0.pkl")
def _(folder: Path, outside: Path, marker: Path) -> None:
    with (folder / "random_states_0.pkl").open("r+b") as file:
        file.truncate(1 << 40)


# -- the index


def index(folder: Path, places: Any, stem: str = "model.safetensors") -> None:
    content = places if isinstance(places, str) else json.dumps({"metadata": {}, "weight_map": places})
    (folder / f"{stem}.index.json").write_text(content)


INDEXES: dict[str, Any] = {
    "a path above": {"weight": "../outside.safetensors"},
    "a path from the root": {"weight": "/etc/passwd"},
    "a path through a folder": {"weight": "a/../../outside.safetensors"},
    "a path of another system": {"weight": "..\\outside.safetensors"},
    "a drive": {"weight": "C:\\outside"},
    "a path with a zero": {"weight": "model\0.safetensors"},
    "an empty path": {"weight": ""},
    "a file that is not there": {"weight": "model-00001-of-00009.safetensors"},
    "itself": {"weight": "model.safetensors.index.json"},
    "a link": {"weight": "link.safetensors"},
    "a file in a linked folder": {"weight": "linked/outside.safetensors"},
    "a tensor that is not in the file": {"other": "part.safetensors"},
    "a number": {"weight": 5},
    "a list": {"weight": ["part.safetensors"]},
    "no mapping": "[]",
    "no weight_map": "{}",
    "an empty weight_map": {},
    "a weight_map twice": '{"weight_map": {"weight": "part.safetensors"}, "weight_map": {"weight": "../outside.safetensors"}}',
    "a tensor twice": '{"weight_map": {"weight": "part.safetensors", "weight": "../outside.safetensors"}}',
    "no number": '{"metadata": {"total_size": NaN}, "weight_map": {"weight": "part.safetensors"}}',
    "nested without end": "[" * 200_000,
    "half": '{"weight_map": {"weight": "part.safe',
}
for _kind, _places in INDEXES.items():

    @attack(f"index: {_kind}", REFUSED, "")
    def _(folder: Path, outside: Path, marker: Path, places: Any = _places) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "link.safetensors").symlink_to(outside)
        (folder / "linked").symlink_to(outside.parent)
        index(folder, places)


# -- safetensors


def safetensors(header: Any, data: bytes = bytes(12), length: int | None = None) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def entry(shape: Any = (3,), offsets: Any = (0, 12), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS: dict[str, bytes] = {
    "a header longer than the file": safetensors({"weight": entry()}, length=2**63),
    "a header a little too long": safetensors({"weight": entry()}, length=500),
    "a shape that is larger than its bytes": safetensors({"weight": entry([10**9])}),
    "a shape that overflows": safetensors({"weight": entry([2**32, 2**32, 2**32])}),
    "a negative length": safetensors({"weight": entry([-3])}),
    "offsets behind the end": safetensors({"weight": entry([300], [0, 1200])}),
    "offsets in the wrong order": safetensors({"weight": entry([3], [12, 0])}),
    "two tensors in one place": safetensors({"weight": entry(), "other": entry()}),
    "a hole": safetensors({"weight": entry([1], [0, 4]), "other": entry([1], [8, 12])}),
    "bytes that belong to nothing": safetensors({"weight": entry([2], [0, 8])}),
    "a name twice": safetensors(b'{"weight":' + json.dumps(entry()).encode() + b',"weight":' + json.dumps(entry()).encode() + b"}"),
    "a type that there is not": safetensors({"weight": entry(dtype="F31")}),
    "a type that is a number": safetensors({"weight": entry(dtype=32)}),
    "an entry that is none": safetensors({"weight": 5}),
    "a header that is no mapping": safetensors([entry()]),
    "a header that is no text": safetensors(b"\xff\xfe{}"),
    "a header nested without end": safetensors(b"[" * 100_000),
    "a file of seven bytes": b"1234567",
}
for _kind, _content in SAFETENSORS.items():
    attack(f"safetensors: {_kind}", REFUSED, "model.safetensors")(
        lambda folder, outside, marker, content=_content: (folder / "model.safetensors").write_bytes(content) and None
    )


# -- values that a state cannot have

WORDS = numpy.ones(624, numpy.uint32)
GROUP = {"lr": 0.1, "params": [0]}
STATES: dict[str, tuple[str, Any]] = {
    "an optimizer that is a list": ("optimizer.bin", [1]),
    "an optimizer without groups": ("optimizer.bin", {"state": {}}),
    "an optimizer whose groups are a mapping": ("optimizer.bin", {"state": {}, "param_groups": {"params": [0]}}),
    "an optimizer with a group without parameters": ("optimizer.bin", {"state": {}, "param_groups": [{"lr": 0.1}]}),
    "an optimizer with a parameter twice": ("optimizer.bin", {"state": {}, "param_groups": [GROUP, GROUP]}),
    "an optimizer by names and numbers": ("optimizer.bin", {"state": {}, "param_groups": [{"params": ["layer.weight", 0]}]}),
    "an optimizer with the state of a name": ("optimizer.bin", {"state": {"other": {}}, "param_groups": [{"params": ["layer.weight"]}]}),
    "an optimizer with a state of nothing": ("optimizer.bin", {"state": {7: {}}, "param_groups": [GROUP]}),
    "an optimizer with a state that is none": ("optimizer.bin", {"state": {0: 3}, "param_groups": [GROUP]}),
    "a scheduler that is a number": ("scheduler.bin", 3),
    "a scaler without end": ("scaler.pt", {"scale": float("inf")}),
    "a scaler that is no number": ("scaler.pt", {"scale": float("nan")}),
    "a scaler that is a text": ("scaler.pt", {"scale": "2.0"}),
    "a negative scaler": ("scaler.pt", {"scale": -1.0}),
    "random states that are a list": ("random_states_0.pkl", [1]),
    "a negative step": ("random_states_0.pkl", {**layout.random_states(), "step": -1}),
    "a step that is no number": ("random_states_0.pkl", {**layout.random_states(), "step": float("nan")}),
    "a step without end": ("random_states_0.pkl", {**layout.random_states(), "step": 10**30}),
    "Python's state of another length": ("random_states_0.pkl", {"random_state": (3, (1, 2, 3), None)}),
    "Python's state with a large word": ("random_states_0.pkl", {"random_state": (3, (2**40,) * 624 + (0,), None)}),
    "Python's state with a false place": ("random_states_0.pkl", {"random_state": (3, (1,) * 624 + (9999,), None)}),
    "numpy's state of another length": ("random_states_0.pkl", {"numpy_random_seed": ("MT19937", WORDS[:3], 0, 0, 0.0)}),
    "numpy's state of a greater length": ("random_states_0.pkl", {"numpy_random_seed": ("MT19937", WORDS.repeat(2), 700, 0, 0.0)}),
    "numpy's state with a false place": ("random_states_0.pkl", {"numpy_random_seed": ("MT19937", WORDS, 10**9, 0, 0.0)}),
    "numpy's state with a negative place": ("random_states_0.pkl", {"numpy_random_seed": ("MT19937", WORDS, -10, 0, 0.0)}),
    "numpy's state of another generator": ("random_states_0.pkl", {"numpy_random_seed": ("PCG64", WORDS, 1, 0, 0.0)}),
    "torch's state of another length": ("random_states_0.pkl", {"torch_manual_seed": torch.zeros(5, dtype=torch.uint8)}),
    "torch's state of zeros": ("random_states_0.pkl", {"torch_manual_seed": torch.full((5056,), 255, dtype=torch.uint8)}),
    "torch's state of floats": ("random_states_0.pkl", {"torch_manual_seed": torch.zeros(5056)}),
    "a device's state that is a text": ("random_states_0.pkl", {"torch_cuda_manual_seed": ["x"]}),
}
for _kind, (_name, _value) in STATES.items():
    attack(f"state: {_kind}", REFUSED, _name)(
        lambda folder, outside, marker, name=_name, value=_value: torch.save(value, folder / name)
    )

OMITTED: dict[str, tuple[str, Any]] = {
    "a sampler that is a number": ("sampler.bin", 5),
    "a sampler without an epoch": ("sampler.bin", {"initial_seed": 3}),
    "a sampler with a negative seed": ("sampler.bin", {"epoch": 1, "initial_seed": -3}),
    "a loader at a negative place": ("dl_state_dict.bin", {"_num_yielded": -3}),
    "a loader at no place": ("dl_state_dict.bin", {"_num_yielded": None}),
    "a loader that is a list": ("dl_state_dict.bin", [3]),
}
for _kind, (_name, _value) in OMITTED.items():
    attack(f"state: {_kind}", LEFT_OUT, _name)(
        lambda folder, outside, marker, name=_name, value=_value: torch.save(value, folder / name)
    )


# -- building and reading


def build(root: Path) -> None:
    """All cases, each in a folder of its number."""
    outside = root / "outside.safetensors"
    outside.write_bytes(safetensors({"weight": entry()}))
    whole(root / "whole")
    for place, case in enumerate(CASES.values()):
        folder = root / str(place)
        shutil.copytree(root / "whole", folder)
        case.build(folder, outside, root / f"marker-{place}")


class Watch:
    """Hears what the interpreter is asked to do, and keeps what a reader has no business with."""

    QUIET = ("mmap.__new__", "ctypes.", "os.scandir", "os.listdir", "sys._getframe", "gc.", "builtins.id", "object.__getattr__", "sys.exc")

    def __init__(self) -> None:
        self.folder: str | None = None
        self.heard: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or event.startswith(self.QUIET):
            return
        if event == "open" and (type(arguments[0]) is int or str(arguments[0]).startswith(self.folder)):  # a number: it is open already
            return
        self.heard.append(f"{event} {arguments!r:.200}")


def read_all(root: Path) -> dict[str, Any]:
    """How each case ends."""
    from slipstream.checkpoint.accelerate_import import read_accelerate_checkpoint
    from slipstream.errors import CheckpointError

    read_accelerate_checkpoint(root / "whole")  # everything is imported then
    watch = Watch()
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    results = {}
    for place, (name, case) in enumerate(CASES.items()):
        signal.alarm(20)  # ends this program: a case that hangs is found by its absence
        began = time.perf_counter()
        watch.folder, watch.heard = str(root / str(place)), []
        try:
            found = read_accelerate_checkpoint(root / str(place))
            ended, said = "read", " ".join(found.warnings)
        except CheckpointError as error:
            ended, said = REFUSED, str(error)
        except BaseException as error:  # noqa: B036 - whatever else comes is a finding
            ended, said = f"{type(error).__name__}", str(error)
        watch.folder = None
        ended = LEFT_OUT if ended == "read" and case.names in said else ended
        results[name] = {"ended": ended, "said": said, "heard": watch.heard, "seconds": time.perf_counter() - began}
    signal.alarm(0)
    return {"cases": results, "control": _control(root, watch)}


def _control(root: Path, watch: Watch) -> list[str]:
    """That the watch hears: a pickle that is obeyed."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    watch.folder, watch.heard = "/nowhere", []
    pickle.loads(pickle.dumps(Evil(root / "marker-control")))
    watch.folder = None
    return watch.heard


if __name__ == "__main__":
    print(json.dumps(read_all(Path(sys.argv[1]))))
