"""Checkpoints that were tampered with: over five hundred of them, each made from a small real one.

An attack changes a folder that is whole. Some leave the checksums alone, as damage does; others put every checksum right again
(`seal`), as somebody would who wants the readers behind the checksums to stumble. What has to come of it is said with each: the
checkpoint is refused with an error that names a file, or what was added is not looked at.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import socket
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import specimens
from slipstream.checkpoint.manifest import MANIFEST, RankFile
from slipstream.files.checksum import digest

Body = dict[str, Any]
Change = Callable[[Path], object]

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
PARTS = ("model_extra.json", "optimizer.safetensors", "training.json", "custom_checkpoint_0.safetensors", "rank_0.safetensors")
LISTED = (*SHARDS, INDEX, *PARTS, "notes/note.txt")
LATE = RankFile(1, specimens.stamp_of(2), "").name.split("..")[0]


@dataclass(frozen=True)
class Attack:
    """What is done to a checkpoint, and what has to come of it."""

    name: str
    change: Change
    names: str = MANIFEST
    """The file that the error has to name."""
    refused: bool = True
    """False: it is not looked at, and the checkpoint is read as if nothing had been done."""
    damages: bool = False
    """Whether checksums or sizes tell it: then the checkpoint before is taken where any will do."""


def make(folder: Path) -> None:
    """`checkpoint_1` and `checkpoint_2`, whole, and a secret beside them that nobody has to open."""
    for number in (1, 2):
        specimens.save(folder / f"checkpoint_{number}", number, shard=100, note=f"note {number}")
    (folder / "secret").write_text("secret")


def attacks(*, everything: bool = True) -> Iterator[Attack]:
    """All of them; or of those that are made for many files and fields alike, every fourth."""
    for make_some in (_mixed, _texts, _lists, _ranks, _sizes, _shards):
        yield from make_some()
    for make_some in (_damage, _kinds, _fields, _entries, _names, _layouts, _trees, _pickles):
        for number, attack in enumerate(make_some()):
            if everything or number % 5 == 0:
                yield attack


# -- tools --------------------------------------------------------------------------------------------------------------


def body_of(folder: Path) -> Body:
    found: Body = json.loads((folder / MANIFEST).read_bytes())
    return found


def seal(folder: Path, body: Body) -> None:
    """Writes a manifest whose own checksum is right."""
    blank = "0" * 32
    data = json.dumps({**body, "checksum": blank}, indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass")
    (folder / MANIFEST).write_bytes(data.replace(blank.encode(), digest(data).encode(), 1))


def seal_text(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """The same for a text that no library would write; it has to keep the place of the checksum."""
    body = body_of(folder)
    blank = b"0" * 32
    data = change((folder / MANIFEST).read_bytes().replace(body["checksum"].encode(), blank, 1))
    (folder / MANIFEST).write_bytes(data.replace(blank, digest(data).encode(), 1))


def put(folder: Path, name: str, data: bytes) -> None:
    """Replaces a file, and puts its size and checksum right."""
    (folder / name).write_bytes(data)
    body = body_of(folder)
    body["files"][name] = {"size": len(data), "checksum": digest(data)}
    seal(folder, body)


def edit(folder: Path, change: Callable[[Body], object]) -> None:
    """Changes the manifest, and puts its checksum right."""
    body = body_of(folder)
    change(body)
    seal(folder, body)


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(start: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> Body:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [start, end]}


def late_file(folder: Path) -> Path:
    """The file that the second rank added."""
    return next(path for path in folder.iterdir() if path.name.startswith("rank_1."))


def _file(name: str) -> Callable[[Path], Path]:
    return late_file if name == LATE else lambda folder: folder / name


# -- damage, with checksums as they were --------------------------------------------------------------------------------


def _damage() -> Iterator[Attack]:
    changes: dict[str, Callable[[bytes], bytes]] = {
        "emptied": lambda data: b"",
        "cut in half": lambda data: data[: len(data) // 2],
        "without its last byte": lambda data: data[:-1],
        "with a byte more": lambda data: data + b" ",
        "with a bit flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :],
        "of zeros": lambda data: bytes(len(data)),
        "of other bytes": lambda data: bytes(255 - byte for byte in data),
    }
    for name in (*LISTED, LATE, MANIFEST):
        where = _file(name)
        for words, change in changes.items():
            yield Attack(
                f"{name} {words}", lambda folder, where=where, change=change: _rewrite(where(folder), change), name, True, name != LATE
            )
        yield Attack(f"{name} removed", lambda folder, where=where: where(folder).unlink(), name, name != LATE, name != LATE)


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


# -- something else in place of a file ----------------------------------------------------------------------------------


def _kinds() -> Iterator[Attack]:
    for name in (*LISTED, LATE, MANIFEST):
        where = _file(name)
        for words, replace in _REPLACED.items():
            yield Attack(
                f"{words} in place of {name}",
                lambda folder, where=where, replace=replace: replace(where(folder), folder),
                name,
                True,
                name != LATE,
            )
    for words, target in (("a link to a folder outside", "../../checkpoint_1/notes"), ("a link to a folder inside", "other")):
        yield Attack(f"{words} in place of notes", partial(_link_folder, target=target), "notes/note.txt")
    yield Attack(
        "a link to another checkpoint's folder inside", lambda folder: (folder / "more").symlink_to("../checkpoint_1"), refused=False
    )


def _away(path: Path, folder: Path) -> Path:
    """Moves a file out of the checkpoint; where it is now."""
    moved = folder.parent / f"moved-{path.name}"
    shutil.copy(path, moved)
    path.unlink()
    return moved


def _inside(path: Path, folder: Path) -> str:
    shutil.copy(path, folder / "copied")
    path.unlink()
    return os.path.relpath(folder / "copied", path.parent)


def _bind(path: Path, folder: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket may have a hundred bytes only
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path, folder: Path) -> None:
    """One that never ends; where no devices may be made, a pipe."""
    path.unlink()
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        os.mkfifo(path)


_REPLACED: dict[str, Callable[[Path, Path], object]] = {
    "a link to the same bytes outside": lambda path, folder: path.symlink_to(_away(path, folder)),
    "a link with a relative path outside": lambda path, folder: path.symlink_to(os.path.relpath(_away(path, folder), path.parent)),
    "a link to the same bytes inside": lambda path, folder: path.symlink_to(_inside(path, folder)),
    "a link to nothing": lambda path, folder: (path.unlink(), path.symlink_to("nothing")),
    "a link to itself": lambda path, folder: (path.unlink(), path.symlink_to(path.name)),
    "a link to /proc": lambda path, folder: (path.unlink(), path.symlink_to("/proc/self/environ")),
    "a second name of a file outside": lambda path, folder: (path.unlink(), os.link(folder.parent / "secret", path)),
    "a pipe": lambda path, folder: (path.unlink(), os.mkfifo(path)),
    "a socket": _bind,
    "a device": _device,
    "a folder": lambda path, folder: (path.unlink(), path.mkdir()),
}


def _link_folder(folder: Path, target: str) -> None:
    (folder / "other").mkdir()
    shutil.copy(folder / "notes" / "note.txt", folder / "other" / "note.txt")
    shutil.rmtree(folder / "notes")
    (folder / "notes").symlink_to(target)


# -- files of other places ----------------------------------------------------------------------------------------------


def _mixed() -> Iterator[Attack]:
    for name in LISTED:
        if name not in (INDEX, "model_extra.json", "custom_checkpoint_0.safetensors"):  # the same in both
            yield Attack(
                f"{name} of another step", lambda folder, name=name: shutil.copy(folder.parent / "checkpoint_1" / name, folder / name), name
            )
    for entry, other in ((SHARDS[0], SHARDS[1]), ("optimizer.safetensors", "rank_0.safetensors"), ("model_extra.json", "training.json")):
        yield Attack(f"{entry} and {other} swapped", partial(_swap, name=entry, other=other), entry)
    yield Attack("the manifest of another step", lambda folder: shutil.copy(folder.parent / "checkpoint_1" / MANIFEST, folder), SHARDS[0])
    yield Attack("another step's manifest, files listed as they are", _grafted, "rank_0.safetensors")
    yield Attack("two shards listed in each other's place", partial(edit, change=_crossed), SHARDS[0])


def _swap(folder: Path, name: str, other: str) -> None:
    held = (folder / name).read_bytes()
    (folder / name).write_bytes((folder / other).read_bytes())
    (folder / other).write_bytes(held)


def _grafted(folder: Path) -> None:
    """Everything of another save but the random states, with checksums that fit."""
    own, other = body_of(folder), body_of(folder.parent / "checkpoint_1")
    for name in LISTED:
        if name != "rank_0.safetensors":
            shutil.copy(folder.parent / "checkpoint_1" / name, folder / name)
    other["files"]["rank_0.safetensors"] = own["files"]["rank_0.safetensors"]
    seal(folder, other)


def _crossed(body: Body) -> None:
    files = body["files"]
    files[SHARDS[0]], files[SHARDS[1]] = files[SHARDS[1]], files[SHARDS[0]]


# -- the text of the manifest -------------------------------------------------------------------------------------------


def _texts() -> Iterator[Attack]:
    raw: dict[str, bytes] = {
        "nothing but spaces": b" " * 100,
        "no JSON": b"MANIFEST",
        "a pickle": _PICKLE,
        "a list": b"[]",
        "a number": b"3",
        "an empty object": b"{}",
        "deep lists": b"[" * 100_000 + b"]" * 100_000,
        "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "deep lists that never end": b"[" * 5_000_000,
        "not UTF-8": b'{"format": "\xff\xfe"}',
        "UTF-16": '{"format": "slipstream-checkpoint"}'.encode("utf-16"),
        "bytes of zero": bytes(1000),
        "a number of a million digits": b'{"format":' + b"9" * 1_000_000 + b"}",
        "seventy million bytes": b'{"format":"' + b"x" * 70_000_000 + b'"}',
        "many small objects": b"[" + b"{}," * 4_200_000 + b"{}]",
        "many small numbers": b"[" + b"0.5," * 8_100_000 + b"1]",
        "fifty million bytes": b'{"format":"' + b"x" * 50_000_000 + b'"}',
    }
    for words, data in raw.items():
        yield Attack(f"manifest: {words}", lambda folder, data=data: (folder / MANIFEST).write_bytes(data), damages=True)
    sealed: dict[str, Callable[[bytes], bytes]] = {
        "step twice": lambda data: data.replace(b'"step": 2,', b'"step": 2, "step": 3,'),
        "a file twice": lambda data: data.replace(b'"files": {\n', b'"files": {"training.json": {"size": 1, "checksum": "x"},\n'),
        "step is NaN": lambda data: data.replace(b'"step": 2,', b'"step": NaN,'),
        "step is Infinity": lambda data: data.replace(b'"step": 2,', b'"step": Infinity,'),
        "metric is 1e999": lambda data: data.replace(b'"metric": null', b'"metric": 1e999'),
        "metric is -Infinity": lambda data: data.replace(b'"metric": null', b'"metric": -Infinity'),
        "half a character": lambda data: data.replace(b'"strategy": "ddp"', b'"strategy": "\\ud800"'),
        "half a character in a file's name": lambda data: data.replace(b'"notes/note.txt"', b'"notes/\\udc80note.txt"'),
        "a step of many digits": lambda data: data.replace(b'"step": 2,', b'"step": ' + b"2" * 4000 + b","),
        "a comment": lambda data: data.replace(b'"step": 2,', b'"step": 2, // two\n'),
        "something after its end": lambda data: data + b"{}",
        "a receipt of ten thousand levels": lambda data: data.replace(b'"seed": 7', b'"seed": ' + b"[" * 10_000 + b"]" * 10_000),
        "a receipt of forty million bytes": lambda data: data.replace(
            b'"seed": 7', b'"seed": "' + b"x" * 40_000_000 + b'", "step": 1, "step": 2'
        ),
        "a receipt of 99 levels": lambda data: data.replace(b'"seed": 7', b'"seed": ' + b"[" * 99 + b"]" * 99),
        "a mark of byte order": lambda data: b"\xef\xbb\xbf" + data,
    }
    for words, change in sealed.items():
        yield Attack(f"manifest: {words}", partial(seal_text, change=change), damages=True)
    yield Attack("manifest: not sealed", lambda folder: _rewrite(folder / MANIFEST, lambda data: data.replace(b'"step": 2', b'"step": 9')))
    yield Attack("manifest: a checksum of nothing", lambda folder: _raw_field(folder, "checksum", ""))
    yield Attack("manifest: a checksum that is a number", lambda folder: _raw_field(folder, "checksum", 7))


def _raw_field(folder: Path, name: str, value: Any) -> None:
    (folder / MANIFEST).write_bytes(json.dumps({**body_of(folder), name: value}, indent=1).encode())


# -- wrong types in every field, with a checksum that fits --------------------------------------------------------------

_VALUES: dict[str, Any] = {
    "nothing": None,
    "true": True,
    "a negative number": -1,
    "a fraction": 0.5,
    "a huge number": 2**70,
    "a text": "x",
    "a list": [],
    "a list of lists": [[]],
    "an object": {},
    "an object of objects": {"a": {}},
}
_NUMBERS, _TEXTS = ("true", "a negative number", "a fraction", "a huge number"), ("a text",)
_FITTING: dict[str, tuple[str, ...]] = {
    "stamp": _TEXTS,
    "created": _TEXTS,
    "written_by": _TEXTS,
    "strategy": _TEXTS,
    "metric": ("nothing", "a negative number", "a fraction", "a huge number"),
    "receipt": ("an object", "an object of objects"),
    "mesh": ("an object",),
    "models": ("a list",),
    "optimizers": ("a list",),
    "objects": ("a list",),
    "ranks": ("an object",),
}
"""Values that a field can have."""


def _fields() -> Iterator[Attack]:
    for field in ("format", "version", "stamp", "step", "created", "written_by", "world", "strategy", "mesh", "metric", "receipt", "models",
                  "optimizers", "training", "objects", "ranks", "files"):  # fmt: skip
        for words, value in _VALUES.items():
            if words not in _FITTING.get(field, ()) and not (field == "training" and value is None):
                yield Attack(
                    f"{field} is {words}", partial(edit, change=lambda body, field=field, value=value: body.update({field: value}))
                )
        named = "checkpoint_2" if field == "training" else MANIFEST
        yield Attack(f"{field} left out", partial(edit, change=lambda body, field=field: body.pop(field)), named, refused=field != "metric")
    yield Attack("no training", partial(edit, change=lambda body: body.update(training=None)), "checkpoint_2")
    for version in (0, 2, "1", 1.5, [1], 10**30):
        yield Attack(f"version {version!r}", partial(edit, change=lambda body, version=version: body.update(version=version)))
    fitting = {"kind": _TEXTS, "aliases": ("an object",), "files": ("a list",), "index": ("nothing",), "extra": ("nothing",), "number": ()}
    for field, fits in fitting.items():
        for words, value in _VALUES.items():
            if words not in fits:
                yield Attack(
                    f"models[0].{field} is {words}",
                    partial(edit, change=lambda body, field=field, value=value: body["models"][0].update({field: value})),
                )
    yield Attack("a run of no processes", partial(edit, change=lambda body: body.update(world=0)))
    yield Attack("a run of a billion processes", partial(edit, change=lambda body: body.update(world=10**9)))
    yield Attack("a metric beyond all floats", partial(edit, change=lambda body: body.update(metric=10**400)))
    yield Attack("a run of many processes", partial(edit, change=lambda body: body.update(world=2**59)))


def _entries() -> Iterator[Attack]:
    for field in ("size", "checksum"):
        for words, value in _VALUES.items():
            if not (field == "checksum" and words == "a text"):
                yield Attack(
                    f"{field} of a file is {words}",
                    partial(edit, change=lambda body, field=field, value=value: body["files"]["training.json"].update({field: value})),
                )
    for words, value in _VALUES.items():
        yield Attack(f"a file is {words}", partial(edit, change=lambda body, value=value: body["files"].update({"training.json": value})))
        yield Attack(f"a model is {words}", partial(edit, change=lambda body, value=value: body["models"].append(value)))
        if words != "a negative number":
            yield Attack(f"an axis of the mesh is {words}", partial(edit, change=lambda body, value=value: body["mesh"].update(dp=value)))
    yield Attack("an axis of the mesh is zero", partial(edit, change=lambda body: body["mesh"].update(dp=0)))


# -- names --------------------------------------------------------------------------------------------------------------

BAD_NAMES = (
    "../secret", "/etc/passwd", "notes/../../secret", "notes/../training.json", "./training.json", "notes//note.txt", "notes/", "/", ".",
    "..", "", "C:\\secret", "C:/secret", "notes\\note.txt", "training.json\x00", "training\n.json", "\x1b[2J",
    "a" * 300, "a/b/c/d/e/f/g/h/i/j",
    "\u2028x", MANIFEST, MANIFEST.lower(), "file:///etc/passwd", "//host/share", "~/secret", "/proc/self/fd/0", "/dev/zero", "/dev/stdin",
)  # fmt: skip


def _names() -> Iterator[Attack]:
    for name in BAD_NAMES:
        entry = {"size": 6, "checksum": digest(b"secret")}
        named = name if name == "~/secret" else MANIFEST  # a plain name after all: nobody expands it
        yield Attack(
            f"files names {name!r}", partial(edit, change=lambda body, name=name, entry=entry: body["files"].update({name: entry})), named
        )
    for name in ("../secret", "/etc/passwd", "secret", "", 3, None, ["a"]):
        for field in ("optimizers", "objects"):
            yield Attack(f"{field} names {name!r}", partial(edit, change=lambda body, field=field, name=name: body[field].append(name)))
        yield Attack(f"a model names {name!r}", partial(edit, change=lambda body, name=name: body["models"][0]["files"].append(name)))
        yield Attack(f"a rank names {name!r}", partial(edit, change=lambda body, name=name: body["ranks"].update({"1": name})))
        if name is not None:
            for field in ("extra", "index"):
                yield Attack(
                    f"{field} names {name!r}",
                    partial(edit, change=lambda body, field=field, name=name: body["models"][0].update({field: name})),
                )
            yield Attack(f"training names {name!r}", partial(edit, change=lambda body, name=name: body.update(training=name)))
    for rank in ("-1", "2", "01", "x", "", "0x0", "1e0", "²", "9" * 30, " 0"):
        yield Attack(f"a rank {rank!r}", partial(edit, change=lambda body, rank=rank: body["ranks"].update({rank: "rank_0.safetensors"})))
    for first, second in (
        ("training", "optimizers"),
        ("optimizers", "optimizers"),
        ("objects", "training"),
        ("files", "optimizers"),
        ("files", "files"),
    ):
        yield Attack(f"one file for {first} and {second}", partial(edit, change=partial(_twice, first=first, second=second)))
    yield Attack("one file for two ranks", partial(edit, change=lambda body: body["ranks"].update({"1": "rank_0.safetensors"})), "")
    yield Attack("two models of one number", partial(edit, change=lambda body: body["models"].append({**body["models"][0], "files": []})))


def _twice(body: Body, first: str, second: str) -> None:
    name = {"training": body["training"], "optimizers": body["optimizers"][0], "objects": body["objects"][0], "files": SHARDS[0]}[first]
    if second == "files":
        body["models"][0]["files"].append(name)
    elif second == "training":
        body["training"] = name
    else:
        body[second].append(name)


def _lists() -> Iterator[Attack]:
    """Parts that are listed as something else than what they are, and tied names."""
    for name in ("notes/note.txt", INDEX, "training.json"):
        yield Attack(
            f"{name} as an optimizer",
            partial(edit, change=lambda body, name=name: body.update(optimizers=[name], training="model_extra.json")),
            "",
        )
        yield Attack(
            f"{name} as weights", partial(edit, change=lambda body, name=name: body["models"][0].update(files=[name], index=None)), ""
        )
    yield Attack(
        "weights as training", partial(edit, change=lambda body: (body["models"].clear(), body.update(training=SHARDS[0]))), SHARDS[0]
    )
    for words, aliases in {
        "to itself": {"head.weight": "head.weight"},
        "in a circle": {"a": "b", "b": "a"},
        "to nothing": {"head.weight": "nothing"},
        "to a tied name": {"head.weight": "embed.weight", "tail.weight": "head.weight"},
        "instead of a stored one": {"small": "embed.weight"},
    }.items():
        yield Attack(f"a name tied {words}", partial(edit, change=lambda body, aliases=aliases: body["models"][0].update(aliases=aliases)))


# -- headers of tensors, with checksums that fit ------------------------------------------------------------------------


def layouts() -> dict[str, bytes]:
    """Files that say of themselves that they are safetensors, and lie."""
    eight = bytes(8)
    good = {"embed.weight": tensor()}
    twice = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    made = {
        "empty": b"",
        "seven bytes": b"1234567",
        "a length alone": struct.pack("<Q", 0),
        "a header longer than the file": safetensors(good, eight, length=10_000),
        "a header of 2^63 bytes": safetensors(good, eight, length=2**63),
        "a header of 2^64-1 bytes": safetensors(good, eight, length=2**64 - 1),
        "a header that ends early": safetensors(good, eight, length=10),
        "a header that reaches into the data": safetensors(good, b"       }", length=len(json.dumps(good)) + 8),
        "a list as header": safetensors([], eight),
        "a pickle as header": safetensors(_PICKLE, eight),
        "a deep header": safetensors(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", eight),
        "one name twice": safetensors(twice, eight),
        "NaN in a shape": safetensors(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', eight),
        "half a character as name": safetensors({"\ud800": tensor()}, eight),
        "trailing bytes": safetensors(good, bytes(16)),
        "too few bytes": safetensors(good, bytes(4)),
        "data without tensors": safetensors({}, eight),
        "overlapping tensors": safetensors({"a": tensor(0, 8), "b": tensor(4, 12)}, bytes(12)),
        "the same bytes twice": safetensors({"a": tensor(), "b": tensor()}, eight),
        "a hole": safetensors({"a": tensor(0, 8), "b": tensor(16, 24)}, bytes(24)),
        "a hole at the beginning": safetensors({"a": tensor(8, 16)}, bytes(16)),
        "an end before the beginning": safetensors({"a": {**tensor(), "data_offsets": [8, 0]}}, eight),
        "no description": safetensors({"a": {}}),
        "a description with more": safetensors({"a": {**tensor(), "code": "x"}}, eight),
        "a description that is a list": safetensors({"a": []}, eight),
        "metadata that are a list": safetensors({"__metadata__": [], **good}, eight),
        "metadata that are numbers": safetensors({"__metadata__": {"a": 1}, **good}, eight),
    }
    for words, shape in {
        "a negative size": [-2], "two negative sizes": [-1, -2], "a fraction": [2.0], "a text": ["2"], "true": [True, 2], "a list": [[2]],
        "2^62 of nothing in half": [0, 2**62], "2^63 elements": [2**63], "2^64+2 elements": [2**64 + 2], "2^62 of nothing": [2**62, 0],
        "sizes that overflow": [2**32, 2**32, 2], "sizes that overflow to nothing": [2**62, 2**62, 0],
        "a hundred dimensions": [1] * 99 + [2], "no list": 2, "nothing": None,
    }.items():  # fmt: skip
        inside = 0 if isinstance(shape, list) and 0 in shape else 8
        made[f"a shape with {words}"] = safetensors({"a": tensor(0, inside, shape)}, bytes(inside))
    for words, offsets in {
        "negative": [-8, 0], "of 2^63": [2**63, 2**63 + 8], "fractions": [0.0, 8.0], "texts": ["0", "8"], "three": [0, 4, 8], "none": [],
        "an object": {}, "nothing": None, "beyond the file": [0, 10**15],
    }.items():  # fmt: skip
        made[f"offsets: {words}"] = safetensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}, eight)
    for dtype in ("F31", "", "object", "O", None, 3, ["F32"], "f32"):
        made[f"elements of {dtype!r}"] = safetensors({"a": tensor(dtype=dtype)}, eight)
    return made


def _layouts() -> Iterator[Attack]:
    for words, data in layouts().items():
        for name in (SHARDS[0], "optimizer.safetensors", "rank_0.safetensors"):
            yield Attack(f"{name}: {words}", partial(put, name=name, data=data), name)
    many = {f"a{number}": tensor(0, 0, [0], "U8") for number in range(100_000)}
    yield Attack("more tensors than the file has bytes for", partial(put, name=SHARDS[0], data=safetensors(many)), SHARDS[0])
    yield Attack("a tensor in two shards", lambda folder: put(folder, SHARDS[1], (folder / SHARDS[0]).read_bytes()), SHARDS[1])
    yield Attack(
        "a state without a tree",
        partial(put, name="optimizer.safetensors", data=safetensors({"a": tensor()}, bytes(8))),
        "optimizer.safetensors",
    )


# -- trees, with checksums that fit -------------------------------------------------------------------------------------


def trees() -> dict[str, Any]:
    """Trees that no state was ever made into; those that are bytes are not even JSON of one meaning."""
    collide = [[k * (2**61 - 1), 0] for k in range(20_000)]
    made: dict[str, Any] = {
        "an unknown tag": {"$object": "os.system"},
        "a tag that calls": {"$call": ["os.system", "true"]},
        "two tags": {"$tuple": [], "$set": []},
        "a tag with a stranger": {"$tuple": [], "class": "os.system"},
        "a tensor that is not there": {"$tensor": "nothing"},
        "a tensor named by a number": {"$tensor": 3},
        "a tensor named by a list": {"$tensor": ["a"]},
        "a tensor named by a path": {"$tensor": "../../secret"},
        "a type without a shape": {"$tensor": "nothing", "dtype": "complex128"},
        "an array that is not there": {"$array": "nothing", "dtype": "<f4", "shape": [1]},
        "an array without a type": {"$array": "nothing"},
        "numbers that are not there": {"$numbers": "nothing"},
        "a tuple of a text": {"$tuple": "abc"},
        "a tuple of an object": {"$tuple": {"a": 1}},
        "pairs that are none": {"$dict": [[1, 2, 3]]},
        "pairs of texts": {"$dict": ["ab", "cd"]},
        "pairs that are an object": {"$dict": {"a": 1}},
        "a key twice": {"$dict": [[1, 2], [1, 3]]},
        "a key twice, as true": {"$dict": [[1, 2], [True, 3]]},
        "a key that is a list": {"$dict": [[[1], 2]]},
        "a key that is an object": {"$dict": [[{}, 2]]},
        "a set of lists": {"$set": [[1]]},
        "a set with one twice": {"$set": [1, 1]},
        "a set of a number": {"$set": 3},
        "a frozen set of an object": {"$frozenset": {"a": 1}},
        "an ordered one of numbers": {"$ordered": [1, 2]},
        "a count of lists": {"$counter": [[[1], 1]]},
        "values made by eval": {"$defaultdict": ["eval", []]},
        "values made by a path": {"$defaultdict": ["os.system", []]},
        "values made by a number": {"$defaultdict": [3, []]},
        "a default without pairs": {"$defaultdict": ["int"]},
        "a deque shorter than nothing": {"$deque": [-1, []]},
        "a deque of 2^70": {"$deque": [2**70, []]},
        "a deque too long": {"$deque": [1, [1, 2]]},
        "a deque of a number": {"$deque": [None, 5]},
        "a float that is a number": {"$float": 1},
        "a float that is code": {"$float": "__import__('os')"},
        "a float that is a list": {"$float": []},
        "a complex of texts": {"$complex": ["1", "2"]},
        "a complex of three": {"$complex": [1.0, 2.0, 3.0]},
        "bytes that are none": {"$bytes": "%%%"},
        "bytes of a number": {"$bytes": 3},
        "a bytearray of a number": {"$bytearray": 2**40},
        "an integer that is none": {"$int": "zz"},
        "an integer with spaces": {"$int": " 0x1"},
        "an integer of a number": {"$int": 3},
        "a text that is none": {"$str": "/////w=="},
        "an unknown type": {"$dtype": "float7"},
        "a type that is an attribute": {"$dtype": "__class__"},
        "a type that is a list": {"$dtype": []},
        "an unknown device": {"$device": "toaster:0"},
        "a device of a number": {"$device": 3},
        "a device with a huge number": {"$device": "cpu:99999999999999999999"},
        "a size that is negative": {"$size": [-1]},
        "a size of 2^70": {"$size": [2**70]},
        "a size of texts": {"$size": ["1"]},
        "a scalar of objects": {"$scalar": ["|O8", {"$bytes": base64.b64encode(bytes(8)).decode()}]},
        "a scalar of a record": {"$scalar": ["V8", {"$bytes": base64.b64encode(bytes(8)).decode()}]},
        "a scalar of a huge text": {"$scalar": ["<U999999", {"$bytes": ""}]},
        "a scalar of the wrong length": {"$scalar": ["<f8", {"$bytes": base64.b64encode(bytes(4)).decode()}]},
        "a scalar that overflows": {"$scalar": ["<i1", 1000]},
        "a scalar of a list": {"$scalar": [[], 1]},
        "a time of a strange unit": {"$scalar": ["<M8[99zz]", {"$bytes": base64.b64encode(bytes(8)).decode()}]},
        "a flood of equal hashes": {"$dict": collide},
        "a set with a flood of equal hashes": {"$set": [pair[0] for pair in collide]},
        "a flood of equal hashes in tuples": {"$dict": [[{"$tuple": [pair[0]]}, 0] for pair in collide]},
        "a flood of equal hashes of floats": {"$set": [k * float(2**61) * 2.0 ** (61 * j) for k in (1, 3) for j in range(14)] * 3},
    }
    for words, wrap in {
        "lists": lambda node: [node],
        "tuples": lambda node: {"$tuple": [node]},
        "keys": lambda node: {"$dict": [[1, node]]},
    }.items():
        for levels in (80, 300, 20_000):
            node: Any = "["  # stands for the innermost
            text = json.dumps(wrap(node))
            before, after = text.split('"["')
            made[f"{levels} levels of {words}"] = (before * levels + "1" + after * levels).encode()
    made["a dict of many small numbers"] = b'{"$dict":[' + b",".join(b"[%d,0.5]" % number for number in range(100_000)) + b"]}"
    made["a text of many characters"] = '["{}\N{GRINNING FACE}"]'.format("x" * 5_000_000).encode()
    made["a text of too many characters"] = '["{}\N{GRINNING FACE}"]'.format("x" * 20_000_000).encode()
    made["many small numbers"] = b"[" + b"0.5," * 5_000_000 + b"1]"
    made["many small texts"] = b"[" + b'"ab",' * 5_000_000 + b"1]"
    made["a key of the text twice"] = b'{"schedulers": [], "schedulers": []}'
    made["NaN"] = b'{"schedulers": NaN}'
    made["half a character"] = b'{"schedulers": "\\ud800"}'
    made["many small objects"] = b"[" + b"{}," * 4_200_000 + b"{}]"
    made["no JSON"] = b"import os"
    return made


FINE = ("80 levels of lists", "80 levels of tuples", "80 levels of keys", "a dict of many small numbers", "a text of many characters")
"""Trees that are no states of ours but values all the same: as a registered object they are read."""


def _trees() -> Iterator[Attack]:
    for words, tree in trees().items():
        text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
        inside = text if isinstance(tree, bytes) else json.dumps({"schedulers": [], "loaders": [], "optimizers": [], "x": tree}).encode()
        yield Attack(
            f"training: {words}", partial(put, name="training.json", data=inside), "checkpoint_2" if words in FINE else "training.json"
        )
        if len(text) < 10_000_000:
            file = safetensors({"__metadata__": {"tree": text.decode()}, "a": tensor()}, bytes(8))
            for name in ("custom_checkpoint_0.safetensors", "optimizer.safetensors", "rank_0.safetensors"):
                refused = words not in FINE or name == "rank_0.safetensors"
                yield Attack(f"{name}: {words}", partial(put, name=name, data=file), name, refused)


# -- files of ranks -----------------------------------------------------------------------------------------------------


def _ranks() -> Iterator[Attack]:
    def named(folder: Path, data: bytes, *, rank: int = 1, stamp: str | None = None, checksum: str | None = None) -> None:
        late_file(folder).unlink()
        name = RankFile(rank, body_of(folder)["stamp"] if stamp is None else stamp, digest(data) if checksum is None else checksum).name
        (folder / name).write_bytes(data)

    def state(**values: Any) -> bytes:
        tree = json.dumps({"rank": 1, "stamp": specimens.stamp_of(2), "random": {}, "gradients": None, **values})
        return safetensors({"__metadata__": {"tree": tree}})

    yield Attack("rank 1: a checksum that does not fit", lambda folder: named(folder, state(), checksum="0" * 32), LATE)
    yield Attack("rank 1: the state of rank 0", lambda folder: named(folder, state(rank=0)), LATE)
    yield Attack("rank 1: the state of another save", lambda folder: named(folder, state(stamp=specimens.stamp_of(1))), LATE)
    yield Attack("rank 1: no rank", lambda folder: named(folder, state(rank=None)), LATE)
    yield Attack("rank 1: a list", lambda folder: named(folder, safetensors({"__metadata__": {"tree": "[]"}})), LATE)
    yield Attack("rank 1: a pickle", lambda folder: named(folder, _PICKLE), LATE)
    yield Attack("rank 1: an empty file", lambda folder: named(folder, b""), LATE)
    yield Attack("rank 1: a file of another save", lambda folder: named(folder, state(), stamp=specimens.stamp_of(1)), refused=False)
    yield Attack("rank 99: a rank that the run had not", lambda folder: _more(folder, state(rank=99), 99), refused=False)
    yield Attack("rank 1: a second file that is a lie", lambda folder: _more(folder, state(rank=7), 1), LATE)
    yield Attack(
        "rank 0: listed as another's",
        partial(edit, change=lambda body: body.update(ranks={"1": "rank_0.safetensors"})),
        "rank_0.safetensors",
    )
    yield Attack(
        "the stamp of another save", partial(edit, change=lambda body: body.update(stamp=specimens.stamp_of(1))), "rank_0.safetensors"
    )
    yield Attack("a stamp that is a pattern", partial(edit, change=lambda body: body.update(stamp=".*")), "rank_0.safetensors")
    for words, replace in _REPLACED.items():
        if words.startswith("a link to the same") or words in ("a pipe", "a folder", "a device"):
            yield Attack(f"rank 1 beside the checkpoint: {words}", partial(_beside, replace=replace), LATE)


def _more(folder: Path, data: bytes, rank: int) -> None:
    (folder / RankFile(rank, body_of(folder)["stamp"], digest(data)).name).write_bytes(data)


def _beside(folder: Path, replace: Callable[[Path, Path], object]) -> None:
    found = late_file(folder)
    moved = folder.parent / f".{folder.name}.{found.name}"
    found.rename(moved)
    replace(moved, folder)


# -- pickles and archives, under every name that a reader may look at ---------------------------------------------------

CANARY = "/tmp/slipstream-was-here"
_PICKLE = b"cos\nsystem\n(S'touch " + CANARY.encode() + b"'\ntR."

PICKLED_NAMES = (
    "pytorch_model.bin", "pytorch_model_1.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scaler.pt", "sampler.bin",
    "dl_state_dict.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", "model.pt", "model.pkl", "training.pkl", "rank_0.pkl",
    "__init__.py", "sitecustomize.py", "conftest.py", "torch.py", "numpy.py", "model.safetensors",
    "model_1.safetensors", "optimizer_1.safetensors", "rank_7.safetensors",
    "custom_checkpoint_1.json", "latest", "pytorch_model.bin.index.json", "data.pkl", ".metadata",
)  # fmt: skip


def archive(inside: bytes) -> bytes:
    """What `torch.save` would have written, with a pickle of our own."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as made:
        made.writestr("archive/data.pkl", inside)
        made.writestr("archive/version", "3\n")
    return held.getvalue()


def bomb(size: int = 32 << 20) -> bytes:
    """A small archive of a large file."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", bytes(size))
    return held.getvalue()


def _pickles() -> Iterator[Attack]:
    contents = {"a pickle": _PICKLE, "an archive with a pickle": archive(_PICKLE), "an archive that swells": bomb()}
    for words, data in contents.items():
        for name in (*SHARDS, *PARTS):
            yield Attack(f"{words} as {name}", partial(put, name=name, data=data), name)
    for name in PICKLED_NAMES:
        yield Attack(f"a pickle beside the rest: {name}", lambda folder, name=name: (folder / name).write_bytes(_PICKLE), refused=False)
        if name not in ("latest", "__init__.py"):
            yield Attack(f"a pickle listed as an object: {name}", partial(_listed_object, name=name), name)
    yield Attack("a pickle as a file of a hook", partial(put, name="notes/note.txt", data=_PICKLE), refused=False)


def _listed_object(folder: Path, name: str) -> None:
    put(folder, name, archive(_PICKLE) if name.endswith("t") else _PICKLE)
    edit(folder, lambda body: body["objects"].append(name))


# -- tensors in shards --------------------------------------------------------------------------------------------------

SHARD_FILES = ("model-rank-00001-of-00002.safetensors", "model-rank-00002-of-00002.safetensors")


def in_shards(folder: Path) -> None:
    """The same checkpoint with its first tensor in two shards, as two ranks would have saved it."""
    (length,) = struct.unpack("<Q", (folder / SHARDS[0]).read_bytes()[:8])
    data = (folder / SHARDS[0]).read_bytes()[8 + length :]
    body = body_of(folder)
    for name in (SHARDS[0], INDEX):
        (folder / name).unlink()
        del body["files"][name]
    body["models"][0].update(files=[SHARDS[1]], index=None, pieces=list(SHARD_FILES))
    seal(folder, body)
    for number, name in enumerate(SHARD_FILES):
        put_shard(folder, name, shard([3 * number, 0], [3, 4], data[48 * number : 48 * (number + 1)]))


def shard(offsets: Any, shape: list[int], data: bytes, *, whole: Any = (6, 4), dtype: str = "F32", name: str = "embed.weight") -> bytes:
    """A file with one shard of a tensor, whatever is said of it."""
    said = json.dumps({name: {"saved_offsets": offsets, "global_shape": list(whole) if isinstance(whole, tuple) else whole}})
    return safetensors({"__metadata__": {"DCP_SHARDING_INFO": said}, "embed.weight": tensor(0, len(data), shape, dtype)}, data)


def put_shard(folder: Path, name: str, data: bytes, sums: bytes | None = None) -> None:
    """Replaces a file of shards and the sums of its blocks; both fit, unless other sums are given."""
    put(folder, name, data)
    put(folder, name.replace(".safetensors", ".blocks"), bytes.fromhex(digest(data)) if sums is None else sums)


def _shards() -> Iterator[Attack]:
    row, all_of_it = bytes(48), bytes(96)
    changed: dict[str, tuple[bytes, bytes | None]] = {
        "overlapping the other": (shard([2, 0], [3, 4], row), None),
        "the same as the other": (shard([0, 0], [3, 4], row), None),
        "with a hole before it": (shard([4, 0], [2, 4], bytes(32)), None),
        "all of it": (shard([0, 0], [6, 4], all_of_it), None),
        "beyond the tensor": (shard([4, 0], [3, 4], row), None),
        "far beyond the tensor": (shard([2**62, 0], [3, 4], row), None),
        "of a larger tensor": (shard([3, 0], [3, 4], row, whole=(60, 4)), None),
        "of a tensor of 2^62 elements": (shard([3, 0], [3, 4], row, whole=(2**62, 4)), None),
        "of a tensor of 2^62 nothings": (shard([0, 0], [0, 4], b"", whole=(0, 2**62)), None),
        "of another type": (shard([3, 0], [3, 4], row, dtype="I32"), None),
        "of fewer dims": (shard([3], [3, 4], row), None),
        "with a negative beginning": (shard([-3, 0], [3, 4], row), None),
        "with a fraction": (shard([3.0, 0], [3, 4], row), None),
        "with true": (shard([True, 0], [3, 4], row), None),
        "with no beginning": (shard(None, [3, 4], row), None),
        "with a text for a shape": (shard([3, 0], [3, 4], row, whole="6x4"), None),
        "said of another tensor": (shard([3, 0], [3, 4], row, name="other"), None),
        "without a word": (safetensors({"embed.weight": tensor(0, 48, [3, 4])}, row), None),
        "that is a pickle": (_PICKLE, None),
        "with sums of something else": (shard([3, 0], [3, 4], row), bytes(16)),
        "with no sums": (shard([3, 0], [3, 4], row), b""),
        "with too many sums": (shard([3, 0], [3, 4], row), bytes(32)),
        "with half a sum": (shard([3, 0], [3, 4], row), bytes(8)),
    }
    for words, (data, sums) in changed.items():
        yield Attack(
            f"a shard {words}",
            lambda folder, data=data, sums=sums: (in_shards(folder), put_shard(folder, SHARD_FILES[1], data, sums)),
            "checkpoint_2",
        )
    for words, replace in _REPLACED.items():
        yield Attack(
            f"{words} in place of a shard",
            lambda folder, replace=replace: (in_shards(folder), replace(folder / SHARD_FILES[1], folder)),
            SHARD_FILES[1],
        )
    blocks = SHARD_FILES[1].replace(".safetensors", ".blocks")
    models: dict[str, Callable[[Body], object]] = {
        "no list": lambda body: body["models"][0].update(pieces="x"),
        "a number": lambda body: body["models"][0].update(pieces=[3]),
        "one twice": lambda body: body["models"][0].update(pieces=[SHARD_FILES[0], SHARD_FILES[0]]),
        "one that is weights too": lambda body: body["models"][0]["files"].append(SHARD_FILES[1]),
        "sums that are a shard": lambda body: body["models"][0]["pieces"].append(blocks),
        "outside": lambda body: body["models"][0]["pieces"].append("../secret"),
        "without sums": lambda body: body["files"].pop(blocks),
        "of a part that is none": lambda body: body.update(pieces={"nothing": []}),
        "of a list": lambda body: body.update(pieces=[]),
        "of a part, no list": lambda body: body.update(pieces={"optimizer.safetensors": 3}),
    }
    for words, change in models.items():
        yield Attack(f"pieces: {words}", lambda folder, change=change: (in_shards(folder), edit(folder, change)))
    yield Attack(
        "pieces: one is left out",
        lambda folder: (in_shards(folder), edit(folder, lambda body: body["models"][0]["pieces"].pop())),
        "checkpoint_2",
    )
    yield Attack(
        "a shard with a bit flipped",
        lambda folder: (in_shards(folder), _rewrite(folder / SHARD_FILES[1], lambda data: data[:-1] + b"\x01")),
        SHARD_FILES[1],
    )
    yield Attack("in shards, and nothing else", in_shards, refused=False)


# -- sizes --------------------------------------------------------------------------------------------------------------


def _sizes() -> Iterator[Attack]:
    for size in (0, 1, 2**31, 2**40, 2**60, 2**60 + 1, 2**63, 2**64):
        for name in (SHARDS[0], "training.json", "notes/note.txt"):
            named = name if size <= 2**60 else MANIFEST
            yield Attack(
                f"{name} of {size} bytes",
                partial(edit, change=lambda body, name=name, size=size: body["files"][name].update(size=size)),
                named,
            )
    for name in (SHARDS[0], "training.json", "notes/note.txt"):
        yield Attack(f"{name}: holes of a petabyte, said so", partial(_hole, name=name, size=2**50), name)
        yield Attack(f"{name}: holes of a petabyte, not said", lambda folder, name=name: os.truncate(folder / name, 2**43), name)
    yield Attack("a manifest with holes of a petabyte", lambda folder: os.truncate(folder / MANIFEST, 2**43))
    yield Attack("a late file with holes of a petabyte", lambda folder: os.truncate(late_file(folder), 2**43), LATE)
    yield Attack("thousands of files that are not there", partial(edit, change=_many_files), "file-0")


def _hole(folder: Path, name: str, size: int) -> None:
    size = min(size, 2**43)  # ext4 has files of 16 terabytes at most
    os.truncate(folder / name, size)
    edit(folder, lambda body: body["files"][name].update(size=size))


def _many_files(body: Body) -> None:
    body["files"].update({f"file-{number}": {"size": 1, "checksum": "0" * 32} for number in range(4_000)})
