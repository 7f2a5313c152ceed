"""What lies in a folder: checkpoints in order, folders that are none and why, and what dead or living saves left beside them.

`survey` looks at one folder, which is a checkpoint or holds some. Only names, manifests and sizes are read; nothing is changed, and no
lock is taken: a run that saves at this moment does not notice.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from slipstream.checkpoint.format import LATEST, MANIFEST, Manifest, RankFile
from slipstream.checkpoint.leftovers import lock_of, recover, swept_names
from slipstream.checkpoint.lookup import rank_files, read_manifest
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.inside import Folder

__all__ = ["Leftover", "Look", "Survey", "folder_of", "look", "sizes", "survey"]

_LEFT: Final = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|was|removing|rank|writing)-[0-9a-f]{8}(-[0-9a-f]{16})?", re.DOTALL)
_RANK: Final = re.compile(r"\.(?P<name>.+)\.(?P<file>rank_\d{1,9}\..+)", re.DOTALL | re.ASCII)
_LOCK: Final = re.compile(r"\.(?P<name>.+)\.lock", re.DOTALL)
_DIGITS: Final = re.compile(r"(\d{1,300})", re.ASCII)
_LONGEST_NOTE: Final = 4096
_MEANING: Final = {
    "saving": "the stage of a save that did not come to its end",
    "was": "a checkpoint that was replaced",
    "removing": "a checkpoint on its way out",
    "rank": "a rank's own file, half written",
    "writing": "a small file, half written",
    "file": "a rank's own file that no checkpoint has taken in",
}


@dataclass(frozen=True)
class Look:
    """A folder with its manifest, or the reason why it has none."""

    folder: Path
    """Where it is read."""
    name: str
    manifest: Manifest | None = None
    why: str = ""
    note: str = ""
    url: str | None = None
    """Where it has to be copied from before its files can be read."""

    @property
    def size(self) -> int:
        """Bytes that its files should have."""
        return 0 if self.manifest is None else sum(entry.size for entry in self.manifest.files.values())

    def ranks(self) -> dict[int, Path]:
        """The files of ranks that were added after its manifest."""
        return {} if self.manifest is None or self.url is not None else rank_files(self.folder, self.manifest.stamp)


@dataclass(frozen=True)
class Leftover:
    """Something hidden that belongs to a save of the checkpoint `of`."""

    name: str
    of: str
    what: str
    size: int
    alive: str = ""
    """Who is saving at this moment, if somebody is."""


@dataclass(frozen=True)
class Survey:
    """One folder that was given."""

    given: str
    folder: Path
    checkpoints: list[Look] = field(default_factory=list)
    others: list[Look] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    latest: str | None = None
    single: bool = False
    """Whether the folder is a checkpoint itself."""

    @property
    def lost_latest(self) -> bool:
        """Whether `latest` names something that is not there."""
        return self.latest is not None and self.latest not in {one.name for one in self.checkpoints}


def folder_of(given: str) -> Path:
    """The folder that an argument names, or a `ConfigError` that says what is wrong with it."""
    path = Path(os.path.abspath(os.path.expanduser(given)))
    try:
        os.scandir(path).close()
    except FileNotFoundError:
        if (found := recover(path)) is not None:  # the moment between two renames of a save
            return found
        raise ConfigError(f"There is no folder {given}.\n{_nearby(path)}") from None
    except NotADirectoryError:
        inside = path.name == MANIFEST or path.suffix in (".safetensors", ".json")
        hint = f"Give the folder that it is in: {os.path.dirname(given) or '.'}" if inside else "Give a folder that save_state made."
        raise ConfigError(f"{given} is a file, and a checkpoint is a folder.\n{hint}") from None
    except OSError as error:
        raise ConfigError(f"{given} cannot be read: {error.strerror}.\nLook at the permissions of the folder.") from None
    return path


def look(folder: Path, name: str | None = None, note: str = "") -> Look:
    """A folder with its manifest, or with the reason why it has none."""
    shown = folder.name if name is None else name
    try:
        return Look(folder, shown, read_manifest(folder), note=note)
    except CheckpointError as error:
        return Look(folder, shown, why=str(error), note=note)


def survey(given: str, folder: Path) -> Survey:
    """All that lies in a folder of checkpoints, or the one checkpoint that the folder is."""
    itself = look(folder)
    if itself.manifest is not None or os.path.lexists(folder / MANIFEST):
        found = [itself] if itself.manifest is not None else []
        return Survey(given, folder, found, [] if found else [itself], single=True)
    if "Accelerate" in itself.why:
        return Survey(given, folder, others=[itself], single=True)
    looks = list(_looks(folder))
    return Survey(
        given,
        folder,
        checkpoints=[one for one in looks if one.manifest is not None],
        others=[one for one in looks if one.manifest is None],
        leftovers=sorted(_leftovers(folder, {one.manifest.stamp for one in looks if one.manifest}), key=lambda one: _in_order(one.name)),
        latest=_latest(folder),
    )


def sizes(one: Look) -> list[str]:
    """What is wrong with the files of a checkpoint as far as their sizes say, each with the name of the file."""
    assert one.manifest is not None
    wrong: list[str] = []
    try:
        with Folder(one.folder) as opened:
            for name, entry in one.manifest.files.items():
                try:
                    if (there := opened.size(name)) != entry.size:
                        wrong.append(f"{one.folder / name} has {there:,} bytes, and the manifest says {entry.size:,}")
                except CheckpointError as error:
                    wrong.append(str(error))
    except CheckpointError as error:
        wrong.append(str(error))
    return wrong


def _looks(folder: Path) -> Iterator[Look]:
    with os.scandir(folder) as entries:
        names = {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}
    moved = {name: found for name in swept_names(folder) - names if (found := recover(folder / name)) is not None}
    for name in sorted({*names, *moved}, key=_in_order):
        if name in moved:
            yield look(moved[name], name, f"a crash left it as {moved[name].name}; load_state finds it there")
        else:
            yield look(folder / name)


def _in_order(name: str) -> list[tuple[int, int, str]]:
    """checkpoint_9 comes before checkpoint_10."""
    return [(1, int(part), "") if part.isdigit() and part.isascii() else (0, 0, part) for part in _DIGITS.split(name)]


def _latest(folder: Path) -> str | None:
    try:
        with Folder(folder) as opened:
            return opened.read(LATEST, _LONGEST_NOTE).decode(errors="replace").strip()
    except CheckpointError:  # there is none, which is as good as a broken one: nobody relies on it
        return None


def _leftovers(folder: Path, stamps: set[str]) -> Iterator[Leftover]:
    """What is hidden in a folder of checkpoints with these stamps."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(".")]
    living = {found["name"]: who for name in names if (found := _LOCK.fullmatch(name)) and (who := _saving(folder / found["name"]))}
    for name in names:
        if found := _LEFT.fullmatch(name):
            what = _MEANING[found["kind"]]
        elif (found := _RANK.fullmatch(name)) and (waiting := RankFile.of(found["file"])) and waiting.stamp not in stamps:
            what = _MEANING["file"]  # one whose stamp is there belongs to that checkpoint, and is read from here
        else:
            continue
        yield Leftover(name, found["name"], what, _size(folder / name), living.get(found["name"], ""))
    for name, who in living.items():
        if not any((found := _LEFT.fullmatch(one)) and found["name"] == name for one in names):
            yield Leftover(f".{name}.lock", name, "a save that begins or ends", 0, who)


def _saving(path: Path) -> str:
    """Who is saving to a name at this moment: the lock says so, and is only read here."""
    try:
        with Folder(path.parent) as opened:
            pid, host = opened.read(lock_of(path).name, _LONGEST_NOTE).decode(errors="replace").split("\n")[0].split(" ", 1)
        process = int(pid)
    except (CheckpointError, ValueError):  # just gone, or just being written
        return ""
    if host == socket.gethostname():
        try:
            os.kill(process, 0)
        except PermissionError:  # another user's
            pass
        except (OSError, OverflowError):
            return ""
    return f"process {process} on {host}"


def _size(path: Path) -> int:
    with suppress(OSError):  # removed a moment ago
        if path.is_symlink() or not path.is_dir():
            return os.lstat(path).st_size
        return sum(_size(inner) for inner in path.iterdir())
    return 0


def _nearby(path: Path) -> str:
    parent = path.parent
    inside = parent.iterdir() if os.access(parent, os.R_OK | os.X_OK) and parent.is_dir() else ()
    near = sorted((one.name for one in inside if one.is_dir() and not one.name.startswith(".")), key=_in_order)
    if not near:
        return "Give a folder that save_state made, or the folder around such ones."
    return f"In {parent} there are {', '.join(near[:8])}{', ...' if len(near) > 8 else ''}."
