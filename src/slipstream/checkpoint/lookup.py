"""What can be said of a folder without reading its tensors: its manifest, or why it has none; the files that ranks added later.

Nothing here imports torch, so that the command line can look into checkpoints quickly, and nothing changes a file.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from slipstream.checkpoint.format import MANIFEST, Manifest, RankFile, parse
from slipstream.checkpoint.leftovers import LARGEST_MANIFEST
from slipstream.checkpoint.rotate import is_numbered
from slipstream.errors import CheckpointError, MissingCheckpointError
from slipstream.files.digest import digest
from slipstream.files.inside import Folder

__all__ = ["beside", "lying_beside", "rank_files", "read_manifest", "unfinished_beside"]

_NUMBERED_BESIDE: Final = r"\.checkpoint_[0-9]{1,18}\."
_UNFINISHED: Final = re.compile(r"rank-[0-9a-f]{8}-[0-9a-f]{16}", re.ASCII)
_LONGEST: Final = 100  # with what is put around it a name stays below the 255 bytes of every file system
_OF_ACCELERATE: Final = re.compile(
    r"(optimizer|scheduler|sampler|dl_state_dict)(_\d{1,9})?\.bin|scaler\.pt|(random_states|custom_checkpoint)_\d{1,9}\.pkl", re.ASCII
)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; an error that says what is there instead if there is none."""
    where = str(folder / MANIFEST)
    try:
        with Folder(folder) as opened:
            data = opened.read(MANIFEST, LARGEST_MANIFEST)
    except FileNotFoundError:
        raise MissingCheckpointError(_nothing_there(folder)) from None
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is a file, and a checkpoint is a folder: pass the folder that save_state made") from None
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    return parse(data, where)


def _nothing_there(folder: Path) -> str:
    if not folder.exists():
        near = sorted(one.name for one in folder.parent.iterdir() if one.is_dir())[:8] if folder.parent.is_dir() else []
        there = f"; in {folder.parent} there are {', '.join(near)}" if near else ""
        return f"there is no checkpoint at {folder}{there}"
    names = sorted(os.listdir(folder))
    if any(map(_OF_ACCELERATE.fullmatch, names)):
        told = f"it has no {MANIFEST}. load_state reads it, and save_state makes one of ours"
        return f"{folder} is a checkpoint of Accelerate, or looks like one: {told}"
    held = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "nothing"
    return f"{folder} is no checkpoint, or one whose save did not come to its end: it has no {MANIFEST} (it holds {held})"


def rank_files(target: Path, stamp: str) -> dict[int, Path]:
    """Where the files of ranks are that were added to a checkpoint after its manifest was written; of two of one rank the later one."""
    try:
        inside = [(path, found) for path in target.iterdir() if (found := RankFile.of(path.name)) is not None]
        inside.sort(key=lambda one: (one[0].lstat().st_mtime_ns, one[0].name))
    except FileNotFoundError:
        raise CheckpointError(f"{target} was removed while it was being read") from None
    return {found.rank: path for path, found in [*inside, *lying_beside(target)] if found.stamp == stamp}


def beside(target: Path) -> str:
    """What the names of files begin with that ranks put beside a checkpoint.

    >>> beside(Path("runs/first"))
    '.first.'
    """
    encoded = os.fsencode(target.name)
    return f".{target.name}." if len(encoded) <= _LONGEST else f".{encoded[:_LONGEST].decode(errors='ignore')}~{digest(encoded)}."


def lying_beside(target: Path) -> list[tuple[Path, RankFile]]:
    """Files of ranks that wait beside a checkpoint: they came before it, and its commit takes them in.

    If it is numbered, those of all numbers: a rank may count otherwise than the main process, which may have saved alone before. The
    stamp in a name tells to which save it belongs.
    """
    return [(target.parent / name, found) for name, rest in _beside(target) if (found := RankFile.of(rest)) is not None]


def unfinished_beside(target: Path) -> list[Path]:
    """Files beside a checkpoint that ranks are writing, or did not come to write."""
    return [target.parent / name for name, rest in _beside(target) if _UNFINISHED.fullmatch(rest)]


def _beside(target: Path) -> list[tuple[str, str]]:
    """Hidden names beside a checkpoint, and what follows its name in them."""
    pattern = re.compile(_NUMBERED_BESIDE if is_numbered(target) else re.escape(beside(target)))
    with suppress(FileNotFoundError), os.scandir(target.parent) as entries:
        return [(entry.name, entry.name[match.end() :]) for entry in entries if (match := pattern.match(entry.name))]
    return []
