"""Inspect checkpoints without torch: list those in a folder or at a URL, read their tensors and states, and verify them.

`survey_folder` reads names, manifests and sizes. It takes no lock and changes nothing, so it does not disturb a run that is saving.
`LazyTensorFile` reads headers first and the bytes of one tensor at a time. `find_problems` reads every byte and yields sentences that
begin with the path of the file; it needs a few megabytes of memory. A checkpoint at a URL is read from a temporary copy. The commands are
in `cli/checkpoint.py`.
"""

from __future__ import annotations

import math
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from slipstream.checkpoint.commit import find_recoverable, is_alive, lock_path, names_with_leftovers, read_lock_owner
from slipstream.checkpoint.manifest import LATEST, MANIFEST, Manifest, ModelEntry, RankFile, rank_files, read_manifest
from slipstream.checkpoint.shard_layout import ShardPosition, cover_box, read_positions, whole_box
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files import strict_json
from slipstream.files.checksum import Digest
from slipstream.files.disk import FileEntry
from slipstream.files.object_store import is_url, local_path, redact
from slipstream.files.paths import ConfinedFolder, check_name
from slipstream.files.safetensors_layout import ITEM_SIZE, SafetensorsLayout, TensorEntry, read_layout

__all__ = [
    "Advance", "CheckpointSummary", "FolderSurvey", "LazyTensorFile", "Leftover", "READ_SIZE", "StoredTensor",
    "bytes_to_read", "check_folder", "find_problems", "find_single_checkpoint", "open_readable", "read_model_tensors",
    "read_state_part", "resolve_aliases", "size_problems", "split_duplicates", "summarize_checkpoint", "survey_folder", "survey_location",
    "tensor_names",
]


_LEFT: Final = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|was|removing|rank|writing)-[0-9a-f]{8}(-[0-9a-f]{16})?", re.DOTALL)
_RANK: Final = re.compile(r"\.(?P<name>.+)\.(?P<file>rank_\d{1,9}\..+)", re.DOTALL | re.ASCII)
_LOCK: Final = re.compile(r"\.(?P<name>.+)\.lock", re.DOTALL)
_DIGITS: Final = re.compile(r"(\d{1,300})", re.ASCII)
_LONGEST_NOTE: Final = 4096
_MEANING: Final = {
    "saving": "the stage of a save that did not finish",
    "was": "a checkpoint that was replaced",
    "removing": "a checkpoint that is being removed",
    "rank": "a rank's own file, not finished",
    "writing": "a small file, not finished",
    "file": "a rank's own file without a checkpoint",
}


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint folder with its manifest, or the reason why it has none."""

    folder: Path
    """Where it is read."""
    name: str
    manifest: Manifest | None = None
    why: str = ""
    note: str = ""
    url: str | None = None
    """Where to copy it from before its files can be read."""

    @property
    def size(self) -> int:
        """The total size of its files, by the manifest."""
        return 0 if self.manifest is None else sum(entry.size for entry in self.manifest.files.values())

    def ranks(self) -> dict[int, Path]:
        """Return the files that ranks added after the commit."""
        return {} if self.manifest is None or self.url is not None else rank_files(self.folder, self.manifest.stamp)


@dataclass(frozen=True)
class Leftover:
    """A hidden file or folder of a save of the checkpoint `of`."""

    name: str
    of: str
    what: str
    size: int
    alive: str = ""
    """The process that is saving, if one is."""


@dataclass(frozen=True)
class FolderSurvey:
    """The checkpoints and leftovers in one folder."""

    given: str
    folder: Path
    checkpoints: list[CheckpointSummary] = field(default_factory=list)
    others: list[CheckpointSummary] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    latest: str | None = None
    single: bool = False
    """Whether the folder is a checkpoint itself."""

    @property
    def lost_latest(self) -> bool:
        """Whether `latest` names a checkpoint that does not exist."""
        return self.latest is not None and self.latest not in {checkpoint.name for checkpoint in self.checkpoints}


def check_folder(given: str) -> Path:
    """Return the folder that an argument names; raise a `ConfigError` if there is none."""
    path = Path(os.path.abspath(os.path.expanduser(given)))
    try:
        os.scandir(path).close()
    except FileNotFoundError:
        if (found := find_recoverable(path)) is not None:  # the moment between two renames of a save
            return found
        raise ConfigError(f"There is no folder {given}.\n{_suggest_nearby(path)}") from None
    except NotADirectoryError:
        inside = path.name == MANIFEST or path.suffix in (".safetensors", ".json")
        hint = f"Give the folder that it is in: {os.path.dirname(given) or '.'}" if inside else "Give a folder that save_state made."
        raise ConfigError(f"{given} is a file, and a checkpoint is a folder.\n{hint}") from None
    except OSError as error:
        raise ConfigError(f"{given} cannot be read: {error.strerror}.\nLook at the permissions of the folder.") from None
    return path


def summarize_checkpoint(folder: Path, name: str | None = None, note: str = "") -> CheckpointSummary:
    """Return the summary of a checkpoint folder."""
    shown = folder.name if name is None else name
    try:
        return CheckpointSummary(folder, shown, read_manifest(folder), note=note)
    except CheckpointError as error:
        return CheckpointSummary(folder, shown, why=str(error), note=note)


def survey_folder(given: str, folder: Path) -> FolderSurvey:
    """Return the content of a folder of checkpoints, or the single checkpoint that the folder is."""
    itself = summarize_checkpoint(folder)
    if itself.manifest is not None or os.path.lexists(folder / MANIFEST):
        found = [itself] if itself.manifest is not None else []
        return FolderSurvey(given, folder, found, [] if found else [itself], single=True)
    if "Accelerate" in itself.why or "torch.distributed.checkpoint" in itself.why:
        return FolderSurvey(given, folder, others=[itself], single=True)
    found_here = list(_summaries(folder))
    stamps = {summary.manifest.stamp for summary in found_here if summary.manifest}
    return FolderSurvey(
        given,
        folder,
        checkpoints=[summary for summary in found_here if summary.manifest is not None],
        others=[summary for summary in found_here if summary.manifest is None],
        leftovers=sorted(_leftovers(folder, stamps), key=lambda leftover: _in_order(leftover.name)),
        latest=_latest(folder),
    )


def size_problems(checkpoint: CheckpointSummary) -> list[str]:
    """Return the files of a checkpoint that are missing or have the wrong size, a sentence each."""
    assert checkpoint.manifest is not None
    wrong: list[str] = []
    try:
        with ConfinedFolder(checkpoint.folder) as opened:
            for name, entry in checkpoint.manifest.files.items():
                try:
                    if (there := opened.size(name)) != entry.size:
                        wrong.append(f"{checkpoint.folder / name} has {there:,} bytes, and the manifest lists {entry.size:,}")
                except CheckpointError as error:
                    wrong.append(str(error))
    except CheckpointError as error:
        wrong.append(str(error))
    return wrong


def _summaries(folder: Path) -> Iterator[CheckpointSummary]:
    with os.scandir(folder) as entries:
        names = {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}
    moved = {name: found for name in sorted(names_with_leftovers(folder) - names) if (found := find_recoverable(folder / name)) is not None}
    for name in sorted({*names, *moved}, key=_in_order):
        if name in moved:
            yield summarize_checkpoint(moved[name], name, f"a crash left it as {moved[name].name}; load_state finds it there")
        else:
            yield summarize_checkpoint(folder / name)


def _in_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key by which checkpoint_9 comes before checkpoint_10."""
    return [(1, int(part), "") if part.isdigit() and part.isascii() else (0, 0, part) for part in _DIGITS.split(name)]


def _latest(folder: Path) -> str | None:
    try:
        with ConfinedFolder(folder) as opened:
            return opened.read(LATEST, _LONGEST_NOTE).decode(errors="replace").strip()
    except CheckpointError:  # missing or damaged; nothing relies on it
        return None


def _leftovers(folder: Path, stamps: set[str]) -> Iterator[Leftover]:
    """Yield the leftovers in a folder of checkpoints with these stamps."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(".")]
    living = {found["name"]: who for name in names if (found := _LOCK.fullmatch(name)) and (who := _saving_process(folder / found["name"]))}
    for name in names:
        if found := _LEFT.fullmatch(name):
            what = _MEANING[found["kind"]]
        elif (found := _RANK.fullmatch(name)) and (waiting := RankFile.of(found["file"])) and waiting.stamp not in stamps:
            what = _MEANING["file"]  # others belong to the checkpoint with their stamp
        else:
            continue
        yield Leftover(name, found["name"], what, _size(folder / name), living.get(found["name"], ""))
    for name, who in living.items():
        if not any((found := _LEFT.fullmatch(entry)) and found["name"] == name for entry in names):
            yield Leftover(f".{name}.lock", name, "a save that is starting or finishing", 0, who)


def _saving_process(path: Path) -> str:
    """Return the live process that holds the lock of a name; "" if there is none."""
    process, host = read_lock_owner(lock_path(path))
    if not process or (host == socket.gethostname() and not is_alive(process)):
        return ""
    return f"process {process} on {host}"


def _size(path: Path) -> int:
    with suppress(OSError):  # it was just removed
        if path.is_symlink() or not path.is_dir():
            return os.lstat(path).st_size
        return sum(_size(inner) for inner in path.iterdir())
    return 0


def _suggest_nearby(path: Path) -> str:
    parent = path.parent
    inside = parent.iterdir() if os.access(parent, os.R_OK | os.X_OK) and parent.is_dir() else ()
    near = sorted((entry.name for entry in inside if entry.is_dir() and not entry.name.startswith(".")), key=_in_order)
    if not near:
        return "Give a folder that save_state made, or the folder around such ones."
    return f"In {parent} there are {', '.join(near[:8])}{', ...' if len(near) > 8 else ''}."


def split_duplicates(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into those that name different locations, and repetitions."""
    seen: set[str] = set()
    kept: list[str] = []
    again: list[str] = []
    for entry in given:
        place = entry.rstrip("/") if is_url(entry) else os.path.realpath(os.path.expanduser(local_path(entry)))
        (again if place in seen else kept).append(entry)
        seen.add(place)
    return kept, again


def survey_location(given: str) -> FolderSurvey:
    """Return the checkpoints at a path or URL."""
    if not is_url(given):
        return _local_survey(given)
    from slipstream.checkpoint.remote import list_numbered, read_remote_manifest

    shown, url = redact(given), given.rstrip("/")
    numbered = list_numbered(url)
    if not numbered:
        try:
            found = CheckpointSummary(Path(shown), shown.rpartition("/")[2], read_remote_manifest(url), url=url)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        return FolderSurvey(shown, Path(shown), [found], single=True)
    found_here, others = [], []
    for _, place in numbered:
        name = place.rpartition("/")[2]
        try:
            found_here.append(CheckpointSummary(Path(redact(place)), name, read_remote_manifest(place), url=place))
        except CheckpointError as error:
            others.append(CheckpointSummary(Path(redact(place)), name, why=str(error), url=place))
    return FolderSurvey(shown, Path(shown), found_here, others)


def _local_survey(given: str) -> FolderSurvey:
    """Return the checkpoints in a folder; in a project folder, those in its folder `checkpoints`."""
    found = survey_folder(given, check_folder(local_path(given)))
    if not found.single and not found.checkpoints and any(other.name == "checkpoints" for other in found.others):
        inner = survey_folder(f"{given.rstrip('/')}/checkpoints", found.folder / "checkpoints")
        if not inner.single:
            return inner
    return found


@contextmanager
def open_readable(checkpoint: CheckpointSummary) -> Iterator[CheckpointSummary]:
    """Yield the checkpoint with readable files; one at a URL is copied for the time of the block."""
    if checkpoint.url is None:
        yield checkpoint
        return
    from slipstream.checkpoint.remote import fetch

    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        yield summarize_checkpoint(fetch(checkpoint.url, Path(folder, "copy")), checkpoint.name)


def find_single_checkpoint(given: str) -> CheckpointSummary:
    """Return the checkpoint at a path or URL; for a folder of several raise a `ConfigError` that names them."""
    found = survey_location(given)
    if found.single:
        if not found.checkpoints:
            raise CheckpointError(found.others[0].why)
        return found.checkpoints[0]
    shown = redact(found.given)
    if not found.checkpoints:
        raise ConfigError(f"{summarize_checkpoint(found.folder).why[:1000]}.\nGive a folder that save_state made.")
    names = [checkpoint.name for checkpoint in found.checkpoints]
    raise ConfigError(
        f"{shown} contains {len(names)} checkpoints and is not one itself.\n"
        f"Name one of them, such as {shown.rstrip('/')}/{names[-1]}; `slipstream checkpoint ls {shown}` lists them."
    )


READ_SIZE: Final = 4 << 20
"""Bytes per read."""
_DEEPEST: Final = 256
_NAMING: Final = ("$tensor", "$array", "$numbers")


class LazyTensorFile:
    """A safetensors file whose header was read; tensors are read on request."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self._folder, self._name = folder, name
        with ConfinedFolder(folder) as opened:
            fd = opened.open(name)
        try:
            self.layout: SafetensorsLayout = read_layout(
                lambda offset, count: os.pread(fd, count, offset), os.fstat(fd).st_size, str(self.path)
            )
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)

    def tree(self) -> Any:
        """Return the JSON tree of the state."""
        text = self.layout.metadata.get("tree")
        if text is None:
            raise CheckpointError(f"{self.path} has tensors but no state: there is no 'tree' in its metadata")
        beside = self.layout.size - self.layout.data_start
        return strict_json.parse(text, str(self.path), deepest=_DEEPEST, beside=beside)

    def chunks(self, entry: TensorEntry) -> Iterator[bytes]:
        """Yield the bytes of a tensor, a few megabytes at a time."""
        with ConfinedFolder(self._folder) as opened:
            fd = opened.open(self._name)
        place, end = self.layout.data_start + entry.start, self.layout.data_start + entry.end
        with os.fdopen(fd, "rb") as file:
            file.seek(place)
            while place < end:
                count = min(READ_SIZE, end - place)
                try:
                    chunk = file.read(count)
                except OSError as error:
                    raise CheckpointError(f"{self.path} cannot be read at byte {place:,}: {error.strerror}") from error
                if len(chunk) < count:
                    raise CheckpointError(f"{self.path} ended at byte {place + len(chunk):,}: it was changed while it was read")
                yield chunk
                place += count


@dataclass(frozen=True)
class StoredTensor:
    """One tensor, and where it is stored: in one file, or in shards."""

    entry: TensorEntry
    """Name, dtype and shape of the full tensor."""
    held: tuple[tuple[LazyTensorFile, TensorEntry, ShardPosition], ...]

    @staticmethod
    def whole(file: LazyTensorFile, entry: TensorEntry) -> StoredTensor:
        return StoredTensor(entry, ((file, entry, ShardPosition(entry.shape, whole_box(entry.shape))),))

    @property
    def size(self) -> int:
        return self.entry.end - self.entry.start

    @property
    def files(self) -> list[str]:
        """The names of all files with elements of it."""
        return [file.path.name for file, _, _ in self.held]

    def describe(self) -> str:
        """Return dtype and shape."""
        return f"{self.entry.dtype} {list(self.entry.shape)}"

    def chunks(self) -> Iterator[bytes]:
        """Yield its bytes; a tensor in shards is assembled in memory."""
        if len(self.held) == 1:
            file, entry, _ = self.held[0]
            yield from file.chunks(entry)
            return
        import numpy  # only comparisons need it

        item = ITEM_SIZE[self.entry.dtype]
        made = numpy.zeros((*self.entry.shape, item), numpy.uint8)
        for file, entry, place in self.held:
            data = numpy.frombuffer(b"".join(file.chunks(entry)), numpy.uint8)
            made[place.box.slices()] = data.reshape((*place.box.shape, item))
        raw = memoryview(made.reshape(-1)) if made.size else memoryview(b"")  # type: ignore[arg-type]
        for start in range(0, len(raw), READ_SIZE):
            yield bytes(raw[start : start + READ_SIZE])


def read_state_part(folder: Path, name: str, shards: Iterable[str] = ()) -> tuple[Any, dict[str, StoredTensor]]:
    """Return the tree of a part, and its tensors by name; `shards` are the shard files of sharded ones."""
    if name.endswith(".json"):
        with ConfinedFolder(folder) as opened:
            data = opened.read(name, strict_json.LARGEST)
            return strict_json.parse(data, str(folder / name), deepest=_DEEPEST), _join_shards(folder, shards, {})
    file = LazyTensorFile(folder, name)
    stored = {entry.name: StoredTensor.whole(file, entry) for entry in file.layout.entries.values()}
    return file.tree(), _join_shards(folder, shards, stored)


def read_model_tensors(folder: Path, model: ModelEntry) -> dict[str, StoredTensor]:
    """Return the tensors of a model that are stored, by name."""
    found: dict[str, StoredTensor] = {}
    for name in model.files:
        file = LazyTensorFile(folder, name)
        for entry in file.layout.entries.values():
            if entry.name in found:
                raise CheckpointError(f"{file.path}: {entry.name[:100]!r} is in {found[entry.name].files[0]}, too")
            found[entry.name] = StoredTensor.whole(file, entry)
    return _join_shards(folder, model.shards, found)


def _join_shards(folder: Path, names: Iterable[str], found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return `found` with the tensors in these shard files; raise if their shards do not cover them."""
    held: dict[str, list[tuple[LazyTensorFile, TensorEntry, ShardPosition]]] = {}
    for name in names:
        file = LazyTensorFile(folder, name)
        for key, place in read_positions(file.layout, str(file.path)).items():
            held.setdefault(key, []).append((file, file.layout.entries[key], place))
    for key, shards in held.items():
        (file, entry, place), shown = shards[0], key[:100]
        if key in found or len({(shard.dtype, its.shape) for _, shard, its in shards}) > 1:
            raise CheckpointError(f"{file.path}: the shards of {shown!r} do not belong to one tensor, or it is also stored in full")
        try:
            list(cover_box((its.box for _, _, its in shards), whole_box(place.shape)))
        except ValueError as error:
            raise CheckpointError(f"{file.path}: {shown!r} cannot be assembled: {error}") from None
        size = math.prod(place.shape) * ITEM_SIZE[entry.dtype]
        found[key] = StoredTensor(TensorEntry(key, entry.dtype, place.shape, 0, size), tuple(shards))
    return found


def resolve_aliases(stored: Mapping[str, StoredTensor], aliases: Mapping[str, str], where: str) -> dict[str, StoredTensor]:
    """Return the tensors under all their names; tied weights are stored once."""
    found = dict(stored)
    for name, target in aliases.items():
        if target not in stored or name in stored:
            why = "is not stored" if target not in stored else "is stored separately"
            raise CheckpointError(f"{where}: {name[:100]!r} is listed as an alias of {target[:100]!r}, which {why}")
        found[name] = stored[target]
    return found


def tensor_names(tree: Any) -> Iterator[str]:
    """Yield the names of all tensors that a tree refers to."""
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


Advance = Callable[[int], object]
"""Called with the number of bytes that were read."""


def bytes_to_read(checkpoint: CheckpointSummary) -> int:
    """Return how many bytes `find_problems` reads, for a progress bar."""
    total = checkpoint.size
    for path in checkpoint.ranks().values():
        total += path.lstat().st_size if not path.is_symlink() else 0
    return total


def find_problems(checkpoint: CheckpointSummary, advance: Advance) -> Iterator[str]:
    """Yield the problems of a checkpoint, after reading every byte of it; `advance` is called with the bytes read."""
    manifest, folder = checkpoint.manifest, checkpoint.folder
    assert manifest is not None
    damaged: set[str] = set()
    for name, entry in manifest.files.items():
        if why := _find_damage(folder, name, entry, advance):
            damaged.add(name)
            yield why
    checks: list[Callable[[], object]] = []
    for rank, path in sorted(checkpoint.ranks().items()):
        found = RankFile.of(path.name[path.name.index("rank_") :])
        assert found is not None
        if why := _find_damage(path.parent, path.name, FileEntry(-1, found.checksum), advance):
            yield why
        else:
            checks.append(partial(_check_rank, path.parent, path.name, rank, manifest.stamp))
    checks += [
        partial(_check_rank, folder, name, rank, manifest.stamp) for rank, name in manifest.ranks.items() if name not in damaged
    ]
    for name in (*manifest.optimizers, *manifest.objects, *([manifest.training] if manifest.training else [])):
        shards = manifest.shards.get(name, ())
        if not damaged & {name, *shards}:
            checks.append(partial(_check_part, folder, name, shards))
    checks += [
        partial(_check_model, folder, model)
        for model in manifest.models
        if not damaged & {*model.files, *model.shards, model.extra, model.index}
    ]
    for check in checks:
        try:
            check()
        except CheckpointError as error:
            yield str(error)


def _find_damage(folder: Path, name: str, entry: FileEntry, advance: Advance) -> str | None:
    """Return the problem with one file, or None; a negative size in the entry is not compared."""
    path = folder / name
    try:
        with ConfinedFolder(folder) as opened:
            fd = opened.open(name)
    except CheckpointError as error:
        advance(max(entry.size, 0))
        return str(error)
    try:
        there = os.fstat(fd).st_size
        if entry.size >= 0 and there != entry.size:
            advance(entry.size)
            return f"{path} has {there:,} bytes, and the manifest lists {entry.size:,}"
        running, done = Digest(), 0
        while chunk := os.pread(fd, READ_SIZE, done):
            running.update(chunk)
            done += len(chunk)
            advance(len(chunk))
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    finally:
        os.close(fd)
    if running.hexdigest() != entry.checksum:
        return f"{path} is damaged: its checksum is {running.hexdigest()}, and {entry.checksum[:40]} was written"
    return None


def _check_part(folder: Path, name: str, shards: Iterable[str] = ()) -> Any:
    """Raise if a part refers to a tensor that is missing; return its tree."""
    tree, tensors = read_state_part(folder, name, shards)
    missing = next((name for name in tensor_names(tree) if name not in tensors), None)
    if missing is not None:
        raise CheckpointError(f"{folder / name} refers to a tensor {missing[:100]!r} that is not in it")
    return tree


def _check_rank(folder: Path, name: str, rank: int, stamp: str) -> None:
    tree = _check_part(folder, name)
    if not isinstance(tree, dict) or tree.get("rank") != rank or tree.get("stamp") != stamp:
        raise CheckpointError(f"{folder / name} does not belong to rank {rank} of this save")


def _check_model(folder: Path, model: ModelEntry) -> None:
    stored = read_model_tensors(folder, model)
    resolve_aliases(stored, model.aliases, str(folder / MANIFEST))
    if model.extra is not None:
        _check_part(folder, model.extra)
    if model.index is None:
        return
    where = str(folder / model.index)
    with ConfinedFolder(folder) as opened:
        index = strict_json.parse(opened.read(model.index, strict_json.LARGEST), where)
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict):
        raise CheckpointError(f"{where} has no weight_map")
    for name, file in listed.items():
        if check_name(file, where) not in model.files or name not in stored or stored[name].files[0] != Path(file).name:
            raise CheckpointError(f"{where} lists {name[:100]!r} in {file!r}, which does not contain it")
    if len(listed) != len(stored):
        raise CheckpointError(f"{where} lists {len(listed):,} tensors, and {len(stored):,} are stored")
