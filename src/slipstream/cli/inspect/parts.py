"""Files of a checkpoint, read piece by piece and without torch: headers of tensors, trees of states, bytes of one tensor at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slipstream.checkpoint.format import ModelEntry
from slipstream.checkpoint.pieces import Place, gathered, places_in, whole
from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.inside import Folder
from slipstream.files.tensors import ITEM_SIZE, Entry, Layout, read_layout

__all__ = ["PIECE", "InPieces", "Stored", "TensorFile", "part_of", "resolved", "tensors_named", "weights_of"]

PIECE: Final = 4 << 20
"""Bytes that are read at once."""
_DEEPEST: Final = 256
_NAMING: Final = ("$tensor", "$array", "$numbers")


class TensorFile:
    """A safetensors file of which the header was read; tensors are read when they are asked for."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self._folder, self._name = folder, name
        with Folder(folder) as opened:
            fd = opened.open(name)
        try:
            self.layout: Layout = read_layout(lambda offset, count: os.pread(fd, count, offset), os.fstat(fd).st_size, str(self.path))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)

    def tree(self) -> Any:
        """What stands beside the tensors."""
        text = self.layout.metadata.get("tree")
        if text is None:
            raise CheckpointError(f"{self.path} holds tensors but no state: its metadata have no 'tree'")
        beside = self.layout.size - self.layout.data_start
        return strict_json.parse(text, str(self.path), deepest=_DEEPEST, beside=beside)

    def pieces(self, entry: Entry) -> Iterator[bytes]:
        """The bytes of a tensor, a few megabytes at a time."""
        with Folder(self._folder) as opened:
            fd = opened.open(self._name)
        try:
            place, end = self.layout.data_start + entry.start, self.layout.data_start + entry.end
            while place < end:
                piece = _exactly(fd, min(PIECE, end - place), place, self.path)
                yield piece
                place += len(piece)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class Stored:
    """One tensor, and the file that holds it."""

    file: TensorFile
    entry: Entry

    @property
    def size(self) -> int:
        return self.entry.end - self.entry.start

    def pieces(self) -> Iterator[bytes]:
        """Its bytes."""
        return self.file.pieces(self.entry)

    @property
    def files(self) -> list[str]:
        """The names of all files that hold something of it."""
        return [self.file.path.name]

    def described(self) -> str:
        """Type and shape."""
        return f"{self.entry.dtype} {list(self.entry.shape)}"


@dataclass(frozen=True)
class InPieces(Stored):
    """A tensor that was sharded over ranks: `entry` is that of the whole, `file` holds the first of its pieces."""

    held: tuple[tuple[TensorFile, Entry, Place], ...]

    @property
    def files(self) -> list[str]:
        return [file.path.name for file, _, _ in self.held]

    def pieces(self) -> Iterator[bytes]:
        """Its bytes, put together in memory."""
        import numpy  # only comparing needs it

        item = ITEM_SIZE[self.entry.dtype]
        made = numpy.zeros((*self.entry.shape, item), numpy.uint8)
        for file, entry, place in self.held:
            data = numpy.frombuffer(b"".join(file.pieces(entry)), numpy.uint8)
            made[place.box.slices()] = data.reshape((*place.box.shape, item))
        raw = memoryview(made.reshape(-1)) if made.size else memoryview(b"")  # type: ignore[arg-type]
        for start in range(0, len(raw), PIECE):
            yield bytes(raw[start : start + PIECE])


def part_of(folder: Path, name: str, pieces: Iterable[str] = ()) -> tuple[Any, dict[str, Stored]]:
    """The tree of a part, and its tensors by name; `pieces` are the files with pieces of some of them."""
    if name.endswith(".json"):
        with Folder(folder) as opened:
            data = opened.read(name, strict_json.LARGEST)
            return strict_json.parse(data, str(folder / name), deepest=_DEEPEST), _put_together(folder, pieces, {})
    file = TensorFile(folder, name)
    return file.tree(), _put_together(folder, pieces, {one.name: Stored(file, one) for one in file.layout.entries.values()})


def weights_of(folder: Path, model: ModelEntry) -> dict[str, Stored]:
    """The tensors of a model that are stored, by name."""
    found: dict[str, Stored] = {}
    for name in model.files:
        file = TensorFile(folder, name)
        for entry in file.layout.entries.values():
            if entry.name in found:
                raise CheckpointError(f"{file.path}: {entry.name[:100]!r} stands in {found[entry.name].file.path.name} too")
            found[entry.name] = Stored(file, entry)
    return _put_together(folder, model.pieces, found)


def _put_together(folder: Path, names: Iterable[str], found: dict[str, Stored]) -> dict[str, Stored]:
    """What was found, and the tensors whose pieces are in these files; an error where pieces are not the whole."""
    held: dict[str, list[tuple[TensorFile, Entry, Place]]] = {}
    for name in names:
        file = TensorFile(folder, name)
        for key, place in places_in(file.layout, str(file.path)).items():
            held.setdefault(key, []).append((file, file.layout.entries[key], place))
    for key, pieces in held.items():
        (file, entry, place), shown = pieces[0], key[:100]
        if key in found or len({(one.dtype, its.shape) for _, one, its in pieces}) > 1:
            raise CheckpointError(f"{file.path}: the pieces of {shown!r} are not of one tensor, or it is whole elsewhere")
        try:
            list(gathered((its.box for _, _, its in pieces), whole(place.shape)))
        except ValueError as error:
            raise CheckpointError(f"{file.path}: {shown!r} cannot be put together: {error}") from None
        size = math.prod(place.shape) * ITEM_SIZE[entry.dtype]
        found[key] = InPieces(file, Entry(key, entry.dtype, place.shape, 0, size), tuple(pieces))
    return found


def resolved(stored: Mapping[str, Stored], aliases: Mapping[str, str], where: str) -> dict[str, Stored]:
    """The same with names of tied weights, which are stored once."""
    found = dict(stored)
    for name, target in aliases.items():
        if target not in stored or name in stored:
            why = "is not stored" if target not in stored else "is stored as well"
            raise CheckpointError(f"{where}: {name[:100]!r} should be the same tensor as {target[:100]!r}, which {why}")
        found[name] = stored[target]
    return found


def tensors_named(tree: Any) -> Iterator[str]:
    """The names of all tensors that a tree refers to."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            for tag in _NAMING:
                if isinstance(name := node.get(tag), str):
                    yield name
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _exactly(fd: int, count: int, place: int, path: Path) -> bytes:
    pieces: list[bytes] = []
    while count:
        try:
            piece = os.pread(fd, count, place)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read at byte {place:,}: {error.strerror}") from error
        if not piece:
            raise CheckpointError(f"{path} ended at byte {place:,}: it was changed while it was read")
        pieces.append(piece)
        count, place = count - len(piece), place + len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
