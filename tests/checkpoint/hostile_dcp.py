"""Folders that look like those of torch.distributed.checkpoint and were made to do harm, and a program that reads them under watch.

As in `hostile_foreign.py`: `CASES` names an attack and changes a good folder. Run as a program with a folder of built cases, this reads
all of each and prints how it ended and what the interpreter was asked to do meanwhile.
"""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 - the attacks are pickles
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_layout
import torch
from hostile_foreign import ROOM, Evil, Watch, archive, called, number, numbers, program, storage, tensor, text
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

Attack = Callable[[Path, Path, Path], None]
CASES: dict[str, Attack] = {}
"""`attack(folder, outside, marker)`: `outside` is a file, `marker` a path that nobody may make."""
DATA, TABLE = "__0_0.distcp", ".metadata"


def attack(name: str) -> Callable[[Attack], Attack]:
    def register(build: Attack) -> Attack:
        assert name not in CASES
        CASES[name] = build
        return build

    return register


def good(folder: Path) -> None:
    """A folder without fault: two tensors and a value."""
    dcp_layout.save({"model": {"w": torch.ones(4, 2), "b": torch.ones(4)}, "step": [1, 2]}, folder)


# -- tables of contents that do something, or are none

PICKLES: dict[str, Callable[[Path], bytes]] = {
    "a call": lambda marker: pickle.dumps(Evil(marker)),
    "a call inside": lambda marker: pickle.dumps({"state_dict_metadata": {"w": Evil(marker)}}),
    "an old call": lambda marker: b"(S'" + str(marker).encode() + b"'\nios\nmkdir\n.",
    "a call by a name on the stack": lambda marker: b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93(" + text(str(marker)) + b"tR.",
    "an extension": lambda marker: b"\x80\x02\x82\x01.",
    "no pickle": lambda marker: b"hello",
    "nothing": lambda marker: b"",
    "a list": lambda marker: pickle.dumps([]),
    "a number": lambda marker: pickle.dumps(3),
    "deep lists": lambda marker: b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
    "itself": lambda marker: b"\x80\x02]q\x00h\x00a.",
    "doubled lists": lambda marker: b"\x80\x02]q\x00" + b"".join(b"]q\x01h\x00ah\x00aq\x00" for _ in range(60)) + b".",
    "an archive": lambda marker: archive(pickle.dumps({})),
    "a storage": lambda marker: program(storage()),
    "only the class": lambda marker: program(called("torch.distributed.checkpoint.metadata.Metadata")),
    "a class with arguments": lambda marker: program(called("torch.distributed.checkpoint.metadata.Metadata", number(3))),
}
for _kind, _make in PICKLES.items():

    @attack(f"table: {_kind}")
    def _(folder: Path, outside: Path, marker: Path, make: Callable[[Path], bytes] = _make) -> None:
        (folder / TABLE).write_bytes(make(marker))


# -- tables of contents of the right classes that lie


def lie(name: str) -> Callable[[Callable[[Any, Path], object]], Callable[[Any, Path], object]]:
    """An attack that changes the table; it is given the table as torch has it."""

    def register(change: Callable[[Any, Path], object]) -> Callable[[Any, Path], object]:
        def build(folder: Path, outside: Path, marker: Path) -> None:
            table = pickle.loads((folder / TABLE).read_bytes())
            change(table, marker)
            (folder / TABLE).write_bytes(pickle.dumps(table))

        attack(f"lie: {name}")(build)
        return change

    return register


W = "model.w"
HUGE = 1 << 45


def first(table: Any) -> tuple[Any, Any]:
    return next((index, stored) for index, stored in table.storage_data.items() if index.fqn == W)


def wide(table: Any, sizes: tuple[int, ...]) -> None:
    described = table.state_dict_metadata[W]
    described.size = torch.Size(sizes)
    described.chunks[0].sizes = torch.Size(sizes)


lie("evil in storage_meta")(lambda table, marker: setattr(table.storage_meta, "checkpoint_id", Evil(marker)))
lie("evil in planner_data")(lambda table, marker: table.planner_data.update({W: (Evil(marker), "w")}))
lie("evil as a size")(lambda table, marker: setattr(table.state_dict_metadata[W], "size", Evil(marker)))
lie("evil as version")(lambda table, marker: setattr(table, "version", Evil(marker)))
lie("no table of tensors")(lambda table, marker: setattr(table, "state_dict_metadata", None))
lie("no storage")(lambda table, marker: setattr(table, "storage_data", None))
lie("a storage that is a list")(lambda table, marker: setattr(table, "storage_data", [1]))
lie("a tensor that is a value")(lambda table, marker: table.state_dict_metadata.update({W: BytesStorageMetadata()}))
lie("a tensor that is text")(lambda table, marker: table.state_dict_metadata.update({W: "w"}))
lie("a tensor nowhere stored")(lambda table, marker: table.storage_data.pop(first(table)[0]))
lie("stored and not described")(lambda table, marker: table.state_dict_metadata.pop(W))
lie("a huge tensor")(lambda table, marker: wide(table, (HUGE, 2)))
lie("a tensor beyond counting")(lambda table, marker: wide(table, (1 << 62, 1 << 62)))
lie("sizes behind a zero")(lambda table, marker: wide(table, (0, 1 << 62)))
lie("a negative size")(lambda table, marker: setattr(table.state_dict_metadata[W], "size", (-4, 2)))
lie("a size of text")(lambda table, marker: setattr(table.state_dict_metadata[W], "size", ("4", 2)))
lie("too many dims")(lambda table, marker: wide(table, (1,) * 200))
lie("a hole")(lambda table, marker: setattr(table.state_dict_metadata[W], "size", torch.Size((9, 2))))
lie("another shape")(lambda table, marker: wide(table, (2, 4)))
lie("a smaller shape")(lambda table, marker: wide(table, (2, 2)))
lie("no chunks")(lambda table, marker: setattr(table.state_dict_metadata[W], "chunks", []))
lie("chunks that are none")(lambda table, marker: setattr(table.state_dict_metadata[W], "chunks", [3]))
lie("a chunk twice")(lambda table, marker: table.state_dict_metadata[W].chunks.append(table.state_dict_metadata[W].chunks[0]))
lie("a chunk beyond its tensor")(lambda table, marker: setattr(table.state_dict_metadata[W].chunks[0], "sizes", torch.Size((5, 2))))
lie("another type")(lambda table, marker: setattr(table.state_dict_metadata[W].properties, "dtype", torch.int32))
lie("a quantized type")(lambda table, marker: setattr(table.state_dict_metadata[W].properties, "dtype", torch.qint8))
lie("a sparse tensor")(lambda table, marker: setattr(table.state_dict_metadata[W].properties, "layout", torch.sparse_coo))
lie("extensions")(lambda table, marker: setattr(first(table)[1], "transform_descriptors", ["stream.zstd"]))
lie("before the file")(lambda table, marker: setattr(first(table)[1], "offset", -1))
lie("behind the file")(lambda table, marker: setattr(first(table)[1], "offset", 1 << 50))
lie("longer than the file")(lambda table, marker: setattr(first(table)[1], "length", 1 << 50))
lie("no bytes")(lambda table, marker: setattr(first(table)[1], "length", 0))
lie("a place of text")(lambda table, marker: setattr(first(table)[1], "offset", "0"))
lie("a file of no name")(lambda table, marker: setattr(first(table)[1], "relative_path", ""))
lie("a file above")(lambda table, marker: setattr(first(table)[1], "relative_path", "../outside"))
lie("a file by an absolute path")(lambda table, marker: setattr(first(table)[1], "relative_path", "/etc/passwd"))
lie("a file that is not there")(lambda table, marker: setattr(first(table)[1], "relative_path", "__9_0.distcp"))
lie("the table as a file")(lambda table, marker: setattr(first(table)[1], "relative_path", TABLE))
lie("a file of bytes")(lambda table, marker: setattr(first(table)[1], "relative_path", b"__0_0.distcp"))
lie("a path to somewhere else")(lambda table, marker: table.planner_data.update({W: ("model", "b")}))
lie("a path of no parts")(lambda table, marker: table.planner_data.update({W: ()}))
lie("a path of numbers")(lambda table, marker: table.planner_data.update({W: (3.5, "w")}))
lie("paths that are a list")(lambda table, marker: setattr(table, "planner_data", [W]))


@lie("overlapping spans")
def _(table: Any, marker: Path) -> None:
    other = next(stored for index, stored in table.storage_data.items() if index.fqn == "model.b")
    other.offset, other.length = first(table)[1].offset + 1, first(table)[1].length


@lie("one span for two tensors")
def _(table: Any, marker: Path) -> None:
    other = next(stored for index, stored in table.storage_data.items() if index.fqn == "model.b")
    other.offset, other.length = first(table)[1].offset, first(table)[1].length


@lie("a place in a list of a billion")
def _(table: Any, marker: Path) -> None:
    name = f"model.{1 << 30}"
    index, stored = first(table)
    del table.storage_data[index]
    table.storage_data[MetadataIndex(name, index.offset)] = stored
    table.state_dict_metadata[name] = table.state_dict_metadata.pop(W)
    table.planner_data[name] = ("model", 1 << 30)


@lie("thousands of shards in one place")
def _(table: Any, marker: Path) -> None:
    index, stored = first(table)
    del table.storage_data[index]
    count = 10_000
    chunks = [ChunkStorageMetadata(torch.Size((place, 0)), torch.Size((1, 2))) for place in range(count)]
    table.state_dict_metadata[W] = TensorStorageMetadata(table.state_dict_metadata[W].properties, torch.Size((count, 2)), chunks)
    for place in range(count):
        table.storage_data[MetadataIndex(W, (place, 0))] = _StorageInfo(DATA, stored.offset, stored.length)


# -- files that are not what the table says


def file(name: str) -> Callable[[Callable[[bytearray, Path], object]], None]:
    """An attack that changes the file of data; the archive of the first tensor can be replaced by one of the same length."""

    def register(change: Callable[[bytearray, Path], object]) -> None:
        def build(folder: Path, outside: Path, marker: Path) -> None:
            data = bytearray((folder / DATA).read_bytes())
            change(data, marker)
            (folder / DATA).write_bytes(data)

        attack(f"file: {name}")(build)

    return register


def replace_tensor(made: Callable[[Path], bytes]) -> Attack:
    """The archive of a tensor becomes another one, and the table is right about it."""

    def build(folder: Path, outside: Path, marker: Path) -> None:
        table = pickle.loads((folder / TABLE).read_bytes())
        data = made(marker)
        (folder / "__0_1.distcp").write_bytes(data)
        stored = first(table)[1]
        stored.relative_path, stored.offset, stored.length = "__0_1.distcp", 0, len(data)
        (folder / TABLE).write_bytes(pickle.dumps(table))

    return build


def saved(value: Any) -> bytes:
    import io

    memory = io.BytesIO()
    torch.save(value, memory)
    return memory.getvalue()


@file("cut off")
def _(data: bytearray, marker: Path) -> None:
    del data[len(data) // 2 :]


@file("all zeros")
def _(data: bytearray, marker: Path) -> None:
    data[:] = bytes(len(data))


@file("a bit changed")
def _(data: bytearray, marker: Path) -> None:
    data[data.index(b"\x00\x00\x80\x3f" * 8)] ^= 1


attack("tensor: a class")(replace_tensor(lambda marker: saved({"w": Evil(marker)})))
attack("tensor: a mapping")(replace_tensor(lambda marker: saved({"w": torch.ones(4, 2)})))
attack("tensor: a list of itself")(replace_tensor(lambda marker: archive(b"\x80\x02]q\x00h\x00a.")))
attack("tensor: another type")(replace_tensor(lambda marker: saved(torch.ones(4, 2, dtype=torch.int32))))
attack("tensor: another shape")(replace_tensor(lambda marker: saved(torch.ones(2, 4))))
attack("tensor: repeated elements")(replace_tensor(lambda marker: saved(torch.ones(1).expand(4, 2))))
attack("tensor: beyond its storage")(
    replace_tensor(lambda marker: archive(tensor(numbers(1 << 40, 2), numbers(2, 1)), {"data/0": bytes(16)}))
)
attack("tensor: no archive")(replace_tensor(lambda marker: pickle.dumps(Evil(marker)) + bytes(64)))
attack("tensor: a safetensors file of a huge header")(replace_tensor(lambda marker: (1 << 60).to_bytes(8, "little") + bytes(64)))
attack("tensor: a safetensors file of other tensors")(
    replace_tensor(lambda marker: (64).to_bytes(8, "little") + b"{}".ljust(64))
)


@attack("value: a class")
def _(folder: Path, outside: Path, marker: Path) -> None:
    table = pickle.loads((folder / TABLE).read_bytes())
    data = saved([Evil(marker)])
    (folder / "__0_1.distcp").write_bytes(data)
    stored = next(stored for index, stored in table.storage_data.items() if index.fqn == "step")
    stored.relative_path, stored.offset, stored.length = "__0_1.distcp", 0, len(data)
    (folder / TABLE).write_bytes(pickle.dumps(table))


@attack("link in place of the data")
def _(folder: Path, outside: Path, marker: Path) -> None:
    shutil.copy(folder / DATA, outside.with_suffix(".copy"))
    (folder / DATA).unlink()
    (folder / DATA).symlink_to(outside.with_suffix(".copy"))


@attack("link in place of the table")
def _(folder: Path, outside: Path, marker: Path) -> None:
    shutil.copy(folder / TABLE, outside.with_suffix(".table"))
    (folder / TABLE).unlink()
    (folder / TABLE).symlink_to(outside.with_suffix(".table"))


@attack("a pipe in place of the data")
def _(folder: Path, outside: Path, marker: Path) -> None:
    (folder / DATA).unlink()
    os.mkfifo(folder / DATA)


@attack("a hole of a terabyte in place of the table")
def _(folder: Path, outside: Path, marker: Path) -> None:
    os.truncate(folder / TABLE, 1 << 40)


if dcp_layout.HAS_SHARDS:

    @attack("shards: offsets without end")
    def _(folder: Path, outside: Path, marker: Path) -> None:
        shutil.rmtree(folder)
        dcp_layout.save({"w": torch.ones(4)}, folder, kind="shards")
        path = next(folder.iterdir())
        data = path.read_bytes()
        assert b"[0]" in data
        path.write_bytes(data.replace(b"[0]", b"[-]"))


# -- building and reading


def build(root: Path) -> None:
    outside = root / "outside"
    outside.write_bytes(b"secret")
    good(root / "whole")
    for place, make in enumerate(CASES.values()):
        folder = root / str(place)
        shutil.copytree(root / "whole", folder)
        make(folder, outside, root / f"marker-{place}")


def read_everything(folder: Path) -> None:
    from slipstream.checkpoint.dcp_reader import open_dcp

    opened = open_dcp(folder)
    opened.state()
    weights = opened.weights()
    for name in weights.tensors:
        weights.tensors[name]
    for name in opened.tensors:
        opened.tensors[name]


def read_all(root: Path) -> dict[str, Any]:
    """How each case ends."""
    from slipstream.errors import CheckpointError

    read_everything(root / "whole")
    watch = Watch()
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    results = {}
    for place, name in enumerate(CASES):
        signal.alarm(20)  # ends this program: a case that hangs is found by its absence
        watch.folder, watch.heard = str(root / str(place)), []
        try:
            read_everything(root / str(place))
            ended, said = "read", ""
        except CheckpointError as error:
            ended, said = "refused", str(error)
        except BaseException as error:  # noqa: B036 - whatever else comes is a finding
            ended, said = type(error).__name__, str(error)
        watch.folder = None
        results[name] = {"ended": ended, "said": said, "heard": watch.heard}
    signal.alarm(0)
    return results


if __name__ == "__main__":
    print(json.dumps(read_all(Path(sys.argv[1]))))
