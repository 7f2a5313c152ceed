"""The manifest of a checkpoint, the names of the files in checkpoints, and the files that ranks add later.

`MANIFEST.json` is written last and lists every other file with its size and checksum; a folder without a readable manifest is not a
checkpoint. Its own checksum covers every byte of it. `parse_manifest` checks the types of all fields, that names stay inside the folder
and that every part is listed as a file; any violation is an error that names the file. Nothing here imports torch.
`docs/checkpoint-format.md` describes the format.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from slipstream.errors import CheckpointError, MissingCheckpointError
from slipstream.files import strict_json
from slipstream.files.checksum import checksums_name, digest
from slipstream.files.disk import FileEntry
from slipstream.files.paths import ConfinedFolder, check_name, open_inside

__all__ = [
    "ACCELERATE_FILE", "LARGEST_MANIFEST", "LATEST", "MANIFEST", "MODEL_NAME", "Manifest", "ModelEntry", "OPTIMIZER_NAME",
    "RNG_STATE_NAME", "RankFile", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME", "SAFE_WEIGHTS_PATTERN_NAME",
    "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME", "VERSION", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "WEIGHTS_PATTERN_NAME",
    "checkpoint_number", "open_listed_file", "parse_manifest", "pending_rank_files", "rank_file_prefix", "rank_files", "rank_marker",
    "rank_markers", "read_manifest", "read_manifest_or_none", "shorten_repr", "split_stamp", "pending_and_unfinished",
    "FSDP_MODEL_NAME",
]


MODEL_NAME: Final = "pytorch_model"
FSDP_MODEL_NAME: Final = "pytorch_model_fsdp"
"""What Accelerate calls weights that it saved under FSDP."""
SAFE_MODEL_NAME: Final = "model"
OPTIMIZER_NAME: Final = "optimizer"
SCHEDULER_NAME: Final = "scheduler"
SAMPLER_NAME: Final = "sampler"
SCALER_NAME: Final = "scaler.pt"
RNG_STATE_NAME: Final = "random_states"

WEIGHTS_NAME: Final = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME: Final = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME: Final = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME: Final = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME: Final = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME: Final = f"{SAFE_WEIGHTS_NAME}.index.json"


MANIFEST = "MANIFEST.json"
LATEST = "latest"
VERSION = 1

_FORMAT = "slipstream-checkpoint"
_NO_CHECKSUM = "0" * 32
_LARGEST_SIZE = 2**60
_LARGEST_WORLD = 2**20
LARGEST_MANIFEST: Final = 64 << 20
ACCELERATE_FILE: Final = re.compile(
    r"(optimizer|scheduler|sampler|dl_state_dict)(_\d{1,9})?\.bin|scaler\.pt|(random_states|custom_checkpoint)_\d{1,9}\.pkl", re.ASCII
)
"""File names by which a checkpoint of Accelerate is recognised."""


@dataclass(frozen=True)
class ModelEntry:
    """The weights of one model."""

    kind: str
    """Its class name, informative."""
    files: tuple[str, ...]
    """The safetensors files, in order."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Aliases of tied weights, and the name under which each is stored."""
    index: str | None = None
    """The index file, if there are several files."""
    extra: str | None = None
    """The part with the entries of the state dict that are not tensors."""
    number: int = 0
    """The index of the prepared model; hooks may save some models themselves."""
    shards: tuple[str, ...] = ()
    """Shard files with the sharded tensors of the model: see `shard_layout.py`. The key on disk is "pieces"."""


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    >>> manifest = Manifest(stamp="s", step=3, created="2026-01-01T00:00:00Z", written_by="slipstream", world=1, strategy="single")
    >>> parse_manifest(manifest.dump(), "MANIFEST.json") == manifest
    True
    """

    stamp: str
    """The identity of the save, which is also in the names of files that ranks add later."""
    step: int
    """The number of updates."""
    created: str
    written_by: str
    world: int
    """The number of processes of the run."""
    strategy: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    models: tuple[ModelEntry, ...] = ()
    optimizers: tuple[str, ...] = ()
    training: str | None = None
    """The part with schedulers, loss scale, loaders and clipping."""
    objects: tuple[str, ...] = ()
    """The parts of registered objects."""
    ranks: Mapping[int, str] = field(default_factory=dict)
    """The states of ranks that were there when the manifest was written."""
    shards: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Shard files with the sharded tensors of a part, by the file of the part. The key on disk is "pieces"."""
    metric: float | None = None
    receipt: Mapping[str, Any] = field(default_factory=dict)
    """The settings that results depend on: see `capture.current_settings`."""
    savers: int | None = None
    """How many ranks save to this folder if all of them call `save_state`; None where one process does, and in older checkpoints."""
    site: str = ""
    """A hash of the lines of the script that led to `save_state`, where there are several savers."""

    def shard_files(self) -> set[str]:
        """Return the names of all shard files."""
        return {name for names in (*(model.shards for model in self.models), *self.shards.values()) for name in names}

    def part_files(self) -> set[str]:
        """Return the files with parts, without shard files and indexes."""
        names = {name for model in self.models for name in (*model.files, model.extra) if name is not None}
        names.update(self.optimizers, self.objects, self.ranks.values())
        return names if self.training is None else names | {self.training}

    def other_files(self) -> list[str]:
        """Return the files that save hooks wrote."""
        ours = self.part_files() | {model.index for model in self.models if model.index is not None}
        ours.update(file for name in self.shard_files() for file in (name, checksums_name(name)))
        return [name for name in self.files if name not in ours]

    def dump(self) -> bytes:
        """Return the bytes of the file, with a checksum over all of them."""
        body = {
            "format": _FORMAT,
            "version": VERSION,
            "checksum": _NO_CHECKSUM,
            **{name: getattr(self, name) for name in ("stamp", "step", "created", "written_by", "world", "strategy")},
            **{name: getattr(self, name) for name in ("mesh", "metric", "receipt")},
            "models": [_model_fields(model) for model in self.models],
            **{name: getattr(self, name) for name in ("optimizers", "training", "objects", "ranks")},
            **_shards_field(self.shards),
            **({} if self.savers is None else {"savers": self.savers, "site": self.site}),
            "files": {name: vars(entry) for name, entry in self.files.items()},
        }
        data = strict_json.dump_lines(body)
        if why := strict_json.explain_too_large(data.decode()):
            raise CheckpointError(f"The manifest of {len(self.files):,} files would be unreadable: {why}. Save fewer files.")
        return data.replace(_NO_CHECKSUM.encode(), digest(data).encode(), 1)


def _model_fields(model: ModelEntry) -> dict[str, Any]:
    fields = {"number": model.number, **vars(model)}
    return {**fields, **_shards_field(fields.pop("shards"))}


def _shards_field(shards: Any) -> dict[str, Any]:
    """Return the key "pieces" only if something is sharded: versions before sharding do not know it."""
    return {"pieces": shards} if shards else {}


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Return the manifest in these bytes; `where` is the path for messages."""
    body = strict_json.parse(data, where, largest=LARGEST_MANIFEST)
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise CheckpointError(f"{where} is not the manifest of a Slipstream checkpoint: it has no \"format\": \"{_FORMAT}\"")
    version = body.get("version")
    if version != VERSION or isinstance(version, bool):
        raise CheckpointError(
            f"{where} has version {shorten_repr(version)} of the checkpoint format, and this version of slipstream reads {VERSION}. "
            f"It was written by {shorten_repr(body.get('written_by'))}: use that version, or a newer one."
        )
    checksum = body.get("checksum")
    blanked = data.replace(checksum.encode(), _NO_CHECKSUM.encode(), 1) if isinstance(checksum, str) else data
    if blanked == data or digest(blanked) != checksum:
        raise CheckpointError(f"{where} has been changed since it was written: its checksum does not match")
    return _ManifestReader(body, where).manifest()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint; if there is none, the error lists what the folder contains."""
    where = str(folder / MANIFEST)
    try:
        with ConfinedFolder(folder) as opened:
            data = opened.read(MANIFEST, LARGEST_MANIFEST)
    except FileNotFoundError:
        raise MissingCheckpointError(_missing_manifest_error(folder)) from None
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is a file, and a checkpoint is a folder: pass the folder that save_state made") from None
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    return parse_manifest(data, where)


def read_manifest_or_none(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, or None if it is missing or damaged."""
    try:
        return read_manifest(folder)
    except (CheckpointError, OSError):
        return None


def open_listed_file(folder: Path, name: str) -> int:
    """Open a file that the manifest lists; the caller closes the descriptor."""
    try:
        return open_inside(folder, name)
    except FileNotFoundError:
        raise CheckpointError(f"{folder / name} is missing, and the manifest lists it") from None


def _missing_manifest_error(folder: Path) -> str:
    if not folder.exists():
        near = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())[:8] if folder.parent.is_dir() else []
        there = f"; in {folder.parent} there are {', '.join(near)}" if near else ""
        return f"there is no checkpoint at {folder}{there}"
    names = sorted(os.listdir(folder))
    if any(map(ACCELERATE_FILE.fullmatch, names)):
        why = f"it has no {MANIFEST}. load_state reads it, and save_state writes a checkpoint of Slipstream"
        return f"{folder} is a checkpoint of Accelerate, or looks like one: {why}"
    if any(name.endswith(".metadata") or name.startswith(f"{FSDP_MODEL_NAME}_") for name in names):
        return (
            f"{folder} was written by torch.distributed.checkpoint: it has no {MANIFEST}. load_state and load_checkpoint_in_model read it, "
            "and `slipstream checkpoint show`, `verify` and `diff` look into it"
        )
    held = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "nothing"
    return f"{folder} is not a checkpoint, or its save did not finish: it has no {MANIFEST} (it contains {held})"


def shorten_repr(value: Any, longest: int = 60) -> str:
    """Return `repr(value)`, cut to a length that fits into a message."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer larger than any float
        return False


class _ManifestReader:
    """Reads fields from parsed JSON and checks their types."""

    def __init__(self, body: dict[str, Any], where: str) -> None:
        self._body = body
        self._where = where
        self._files: dict[str, FileEntry] = {}
        self._used: set[str] = set()

    def manifest(self) -> Manifest:
        self._files = {check_name(name, self._where): self._entry(name, entry) for name, entry in self._mapping("files").items()}
        if any(name.casefold() == MANIFEST.casefold() for name in self._files):
            raise self._wrong("files", f"it lists {MANIFEST} itself")
        world = self._whole("world", self._body.get("world"), 1, _LARGEST_WORLD)
        shards = self._mapping("pieces") if "pieces" in self._body else {}
        models = tuple(self._model(number, entry) for number, entry in enumerate(self._list("models")))
        if len({model.number for model in models}) != len(models):
            raise self._wrong("models", "two of them have the same number")
        return Manifest(
            stamp=self._text("stamp"),
            step=self._whole("step", self._body.get("step")),
            created=self._text("created"),
            written_by=self._text("written_by"),
            world=world,
            strategy=self._text("strategy"),
            mesh={str(axis): self._whole(f"mesh[{axis!r}]", size, 1) for axis, size in self._mapping("mesh").items()},
            files=self._files,
            models=models,
            optimizers=tuple(self._part("optimizers", name) for name in self._list("optimizers")),
            training=self._optional_part("training", self._body.get("training")),
            objects=tuple(self._part("objects", name) for name in self._list("objects")),
            ranks={self._rank(rank, world): self._part("ranks", name) for rank, name in self._mapping("ranks").items()},
            shards={self._listed("pieces", part): self._shards("pieces", names) for part, names in shards.items()},
            metric=self._metric(),
            receipt=self._mapping("receipt"),
            savers=self._whole("savers", self._body["savers"], 1, world) if "savers" in self._body else None,
            site=self._text("site") if "site" in self._body else "",
        )

    def _wrong(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {name!r} cannot be used: {why}")

    def _text(self, name: str) -> str:
        value = self._body.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, f"{shorten_repr(value)} is not a string")
        return value

    def _whole(self, name: str, value: Any, least: int = 0, most: int = _LARGEST_SIZE) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(name, f"{shorten_repr(value)} is not an integer from {least} to {most}")
        return value

    def _metric(self) -> float | None:
        value = self._body.get("metric")
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)):
            return value
        raise self._wrong("metric", f"{shorten_repr(value)} is not a finite number")

    def _list(self, name: str) -> list[Any]:
        value = self._body.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, f"{type(value).__name__} is not a list")
        return value

    def _mapping(self, name: str, value: Any = None) -> dict[str, Any]:
        value = self._body.get(name) if value is None else value
        if not isinstance(value, dict):
            raise self._wrong(name, f"{type(value).__name__} is not a mapping")
        return value

    def _entry(self, name: str, entry: Any) -> FileEntry:
        if not isinstance(entry, dict) or not isinstance(entry.get("checksum"), str):
            raise self._wrong("files", f"{shorten_repr(name)} has no checksum")
        return FileEntry(self._whole(f"size of {name}", entry.get("size")), entry["checksum"])

    def _part(self, where: str, name: Any) -> str:
        """Return the name of a listed file that nothing else uses."""
        if self._listed(where, name) in self._used:
            raise self._wrong(where, f"{shorten_repr(name)} is used twice")
        self._used.add(name)
        return str(name)

    def _listed(self, where: str, name: Any) -> str:
        if not isinstance(name, str) or name not in self._files:
            raise self._wrong(where, f"{shorten_repr(name)} is not among its files")
        return name

    def _optional_part(self, where: str, name: Any) -> str | None:
        return None if name is None else self._part(where, name)

    def _model(self, number: int, value: Any) -> ModelEntry:
        where = f"models[{number}]"
        entry = self._mapping(where, value if value is not None else [])
        files, aliases, kind = entry.get("files"), entry.get("aliases"), entry.get("kind")
        if not isinstance(files, list) or not isinstance(kind, str):
            raise self._wrong(where, "it has no list of files or no kind")
        if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
            raise self._wrong(where, "its aliases are not a mapping of names")
        index, extra = (self._optional_part(where, entry.get(name)) for name in ("index", "extra"))
        known = self._whole(where, entry.get("number"))
        shards = self._shards(where, entry.get("pieces", []))
        return ModelEntry(kind, tuple(self._part(where, name) for name in files), aliases, index, extra, known, shards)

    def _shards(self, where: str, names: Any) -> tuple[str, ...]:
        """Return shard files; each has a file of block checksums beside it."""
        if not isinstance(names, list):
            raise self._wrong(where, "'pieces' is not a list of files")
        for name in names:
            self._part(where, checksums_name(self._part(where, name)))
        return tuple(names)

    def _rank(self, rank: str, world: int) -> int:
        if not rank.isascii() or not rank.isdigit() or str(int(rank[:9])) != rank or int(rank) >= world:
            raise self._wrong("ranks", f"{shorten_repr(rank)} is not a rank of a run of {world} processes")
        return int(rank)


# -- files of ranks ---------------------------------------------------------------------------------------------



def split_stamp(stamp: str) -> tuple[int, str]:
    """Return the step in a stamp, and the run id of 8 digits.

    >>> split_stamp("120-00112233445566aa")
    (120, '00112233')
    """
    step, _, rest = stamp.partition("-")
    return int(step), rest[:8]


_RANK_FILE = re.compile(r"rank_(\d{1,9})\.([0-9]{1,20}-[0-9a-f]{16})\.([0-9a-f]{32})\.safetensors", re.ASCII)


@dataclass(frozen=True)
class RankFile:
    """A file that a rank added after the manifest was written: its name has the rank, the stamp of the save, and the checksum.

    >>> name = RankFile(3, "120-00112233445566aa", "0" * 32).name
    >>> name[:28], RankFile.of(name).rank, RankFile.of("notes.txt")
    ('rank_3.120-00112233445566aa.', 3, None)
    """

    rank: int
    stamp: str
    checksum: str

    @property
    def name(self) -> str:
        return f"rank_{self.rank}.{self.stamp}.{self.checksum}.safetensors"

    @staticmethod
    def of(name: str) -> RankFile | None:
        """Parse a file name; None if it is not that of a rank's file."""
        found = _RANK_FILE.fullmatch(name)
        return None if found is None else RankFile(int(found[1]), found[2], found[3])


_UNFINISHED: Final = re.compile(r"rank-[0-9a-f]{8}-[0-9a-f]{16}", re.ASCII)
_LONGEST_NAME: Final = 100  # with prefix and suffix, a name stays below the 255 bytes that file systems allow
_NUMBERED: Final = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})", re.ASCII)
_BESIDE_NUMBERED: Final = re.compile(r"\.checkpoint_[0-9]{1,18}\.")


def checkpoint_number(name: str) -> int | None:
    """Return the number in the name of a numbered checkpoint; None for other names.

    >>> checkpoint_number("checkpoint_3"), checkpoint_number("best")
    (3, None)
    """
    found = _NUMBERED.fullmatch(name)
    return None if found is None else int(found[1])


def rank_files(target: Path, stamp: str) -> dict[int, Path]:
    """Return the files that ranks added to a checkpoint after the commit, by rank; of two the later one."""
    try:
        inside = [(path, found) for path in target.iterdir() if (found := RankFile.of(path.name)) is not None]
        inside.sort(key=lambda entry: (entry[0].lstat().st_mtime_ns, entry[0].name))
    except FileNotFoundError:
        raise CheckpointError(f"{target} was removed while it was read") from None
    return {found.rank: path for path, found in [*inside, *pending_rank_files(target)] if found.stamp == stamp}


def rank_file_prefix(target: Path) -> str:
    """Return the prefix of the files that ranks write beside a checkpoint.

    >>> rank_file_prefix(Path("runs/first"))
    '.first.'
    """
    encoded = os.fsencode(target.name)
    return f".{target.name}." if len(encoded) <= _LONGEST_NAME else f".{encoded[:_LONGEST_NAME].decode(errors='ignore')}~{digest(encoded)}."


def pending_rank_files(target: Path) -> list[tuple[Path, RankFile]]:
    """Return the files of ranks that wait beside a checkpoint until its commit.

    For a numbered checkpoint these are the files of all numbers, because the main process may have saved alone before and count higher
    than a rank. The stamp in a name tells which save it belongs to.
    """
    return pending_and_unfinished(target)[0]


def pending_and_unfinished(target: Path) -> tuple[list[tuple[Path, RankFile]], list[Path]]:
    """Return `pending_rank_files`, and the files beside a checkpoint that ranks are writing or did not finish, markers included."""
    beside = _hidden_beside(target)
    pending = [(target.parent / name, found) for name, rest in beside if (found := RankFile.of(rest)) is not None]
    return pending, [target.parent / name for name, rest in beside if _UNFINISHED.fullmatch(rest)]


def rank_marker(rank: int, stamp: str) -> str:
    """Return the name, after `rank_file_prefix`, of the empty file that a rank keeps beside a checkpoint until its state is written.

    >>> rank_marker(1, "120-00112233445566aa")[:14]
    'rank-00112233-'
    """
    return f"rank-{split_stamp(stamp)[1]}-{digest(stamp.encode())[:8]}{rank:08x}"


def rank_markers(target: Path, stamp: str) -> list[Path]:
    """Return the markers of ranks that have begun to save their state for this save and have not finished."""
    ours = rank_marker(0, stamp)[:-8]
    return [target.parent / name for name, rest in _hidden_beside(target) if rest.startswith(ours) and _UNFINISHED.fullmatch(rest)]


def _hidden_beside(target: Path) -> list[tuple[str, str]]:
    """Return hidden names beside a checkpoint, each with the part after the name of the checkpoint."""
    prefix = rank_file_prefix(target)
    numbered = checkpoint_number(target.name) is not None
    with suppress(FileNotFoundError):
        names = os.listdir(target.parent)
        if not numbered:
            return [(name, name[len(prefix) :]) for name in names if name.startswith(prefix)]
        return [(name, name[match.end() :]) for name in names if (match := _BESIDE_NUMBERED.match(name))]
    return []
