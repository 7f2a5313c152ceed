"""Whether a checkpoint is whole: every byte read and compared with its checksum, then every header, tree and alias.

Problems are sentences that begin with the path of the file; a whole checkpoint has none. Memory stays at a few megabytes whatever the
size of the files, apart from their headers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from slipstream.checkpoint.format import MANIFEST, FileEntry, RankFile
from slipstream.cli.inspect.folder import Look
from slipstream.cli.inspect.parts import PIECE, part_of, resolved, tensors_named, weights_of
from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.digest import Digest
from slipstream.files.inside import Folder
from slipstream.files.names import check_name

__all__ = ["Advance", "bytes_to_read", "problems"]

Advance = Callable[[int], object]
"""Is told of bytes that were read."""


def bytes_to_read(one: Look) -> int:
    """How much `problems` reads, for a progress bar; files of ranks count too."""
    total = one.size
    for path in one.ranks().values():
        total += path.lstat().st_size if not path.is_symlink() else 0
    return total


def problems(one: Look, advance: Advance) -> Iterator[str]:
    """What is wrong with a checkpoint, after every byte of it was read; `advance` is told how many at a time."""
    manifest = one.manifest
    assert manifest is not None
    damaged: set[str] = set()
    for name, entry in manifest.files.items():
        if why := _damage(one.folder, name, entry, advance):
            damaged.add(name)
            yield why
    late = one.ranks()
    for rank, path in sorted(late.items()):
        found = RankFile.of(path.name[path.name.index("rank_") :])
        assert found is not None
        if why := _damage(path.parent, path.name, FileEntry(-1, found.checksum), advance):
            yield why
        else:
            yield from _complaints(lambda path=path, rank=rank: _check_rank(path.parent, path.name, rank, manifest.stamp))  # type: ignore[misc]
    for rank, name in manifest.ranks.items():
        if name not in damaged:
            yield from _complaints(lambda name=name, rank=rank: _check_rank(one.folder, name, rank, manifest.stamp))  # type: ignore[misc]
    for name in (*manifest.optimizers, *manifest.objects, *([manifest.training] if manifest.training else [])):
        if not damaged & {name, *manifest.pieces.get(name, ())}:
            yield from _complaints(lambda name=name: _check_part(one.folder, name, manifest.pieces.get(name, ())))  # type: ignore[misc]
    for number, model in enumerate(manifest.models):
        if not damaged & {*model.files, *model.pieces, model.extra, model.index}:
            yield from _complaints(lambda number=number: _check_model(one, number))  # type: ignore[misc]


def _complaints(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except CheckpointError as error:
        yield str(error)


def _damage(folder: Path, name: str, entry: FileEntry, advance: Advance) -> str | None:
    """What is wrong with one file; an entry of a negative size says nothing about sizes."""
    path = folder / name
    try:
        with Folder(folder) as opened:
            fd = opened.open(name)
    except CheckpointError as error:
        advance(max(entry.size, 0))
        return str(error)
    try:
        there = os.fstat(fd).st_size
        if entry.size >= 0 and there != entry.size:
            advance(entry.size)
            return f"{path} has {there:,} bytes, and the manifest says {entry.size:,}"
        running, done = Digest(), 0
        while piece := os.pread(fd, PIECE, done):
            running.update(piece)
            done += len(piece)
            advance(len(piece))
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    finally:
        os.close(fd)
    if running.hexdigest() != entry.checksum:
        return f"{path} is damaged: its checksum is {running.hexdigest()}, and {entry.checksum[:40]} was written"
    return None


def _check_part(folder: Path, name: str, pieces: Iterable[str] = ()) -> None:
    tree, tensors = part_of(folder, name, pieces)
    missing = next((one for one in tensors_named(tree) if one not in tensors), None)
    if missing is not None:
        raise CheckpointError(f"{folder / name} refers to a tensor {missing[:100]!r} that is not in it")


def _check_rank(folder: Path, name: str, rank: int, stamp: str) -> None:
    _check_part(folder, name)
    tree, _ = part_of(folder, name)
    if not isinstance(tree, dict) or tree.get("rank") != rank or tree.get("stamp") != stamp:
        raise CheckpointError(f"{folder / name} does not belong to rank {rank} of this save")


def _check_model(one: Look, number: int) -> None:
    assert one.manifest is not None
    model = one.manifest.models[number]
    stored = weights_of(one.folder, model)
    resolved(stored, model.aliases, str(one.folder / MANIFEST))
    if model.extra is not None:
        _check_part(one.folder, model.extra)
    if model.index is None:
        return
    where = str(one.folder / model.index)
    with Folder(one.folder) as opened:
        index = strict_json.parse(opened.read(model.index, strict_json.LARGEST), where)
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict):
        raise CheckpointError(f"{where} has no weight_map")
    for name, file in listed.items():
        if check_name(file, where) not in model.files or name not in stored or stored[name].file.path.name != Path(file).name:
            raise CheckpointError(f"{where} says that {name[:100]!r} is in {file!r}, and it is not")
    if len(listed) != len(stored):
        raise CheckpointError(f"{where} lists {len(listed):,} tensors, and {len(stored):,} are stored")
