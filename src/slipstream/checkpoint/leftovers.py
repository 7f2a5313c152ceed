"""What lies beside a checkpoint: hidden folders of saves under way, of replaced checkpoints, and of saves that died.

    .NAME.lock          held by the process that is saving to NAME
    .NAME.saving-HEX    a stage: all of it is ours
    .NAME.was-HEX       a whole folder that was replaced, or is about to take the place of NAME
    .NAME.removing-HEX  on its way out: all of it may go

Whoever holds the lock knows that everything else in the list is left over. A process loses its lock when it ends, however it ends, so no
save can be blocked by a dead one; and no save touches what belongs to a living one, or to another name.

What this never does: remove a file that is not ours. What others put into a folder that is replaced moves into the new one.
"""

from __future__ import annotations

import errno
import filecmp
import os
import re
import secrets
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from slipstream.checkpoint.format import MANIFEST, Manifest, RankFile, parse
from slipstream.errors import CheckpointError
from slipstream.files.digest import digest
from slipstream.files.disk import Disk
from slipstream.files.inside import Folder
from slipstream.files.trouble import told
from slipstream.logging import get_logger

__all__ = [
    "LARGEST_MANIFEST",
    "Kind",
    "discard",
    "hidden",
    "hold",
    "lock_of",
    "manifest_of",
    "recover",
    "remove",
    "sweep",
    "sweep_held",
    "swept_names",
]

Kind = Literal["saving", "was", "removing"]

LARGEST_MANIFEST: Final = 64 << 20

_HIDDEN: Final = re.compile(r"\.(?P<stem>.+)\.((?P<kind>saving|was|removing)-[0-9a-f]{8}|lock)", re.DOTALL)
_LONGEST_STEM: Final = 200  # with what is put around it a name stays below the 255 bytes of every file system
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_CHILDREN_MAY_TAKE: Final = 10.0


def hidden(path: Path, kind: Kind) -> Path:
    """A new hidden name beside a checkpoint.

    >>> hidden(Path("/data/first"), "saving").name[:14]
    '.first.saving-'
    """
    return path.with_name(f".{_stem(path.name)}.{kind}-{secrets.token_hex(4)}")


def swept_names(folder: Path) -> set[str]:
    """The names of all checkpoints in a folder that have something lying beside them."""
    with suppress(OSError), os.scandir(folder) as entries:
        return {found["stem"] for entry in entries if (found := _HIDDEN.fullmatch(entry.name))}
    return set()


def manifest_of(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None if there is none that can be read."""
    try:
        with Folder(folder) as opened:
            return parse(opened.read(MANIFEST, LARGEST_MANIFEST), str(folder / MANIFEST))
    except CheckpointError:
        return None


def recover(path: Path) -> Path | None:
    """Where the checkpoint of this name can be read if a crash took it from its place; None if it is in its place, or nowhere.

    That can be only where the system knows no exchange of two folders: the moment between two renames.
    """
    if os.path.lexists(path):
        return None
    whole = [
        (manifest.step, str(found), found)
        for found in _beside(path, "was")
        if (manifest := manifest_of(found)) and _is_whole(found, manifest)
    ]
    return max(whole)[2] if whole else None


def lock_of(path: Path) -> Path:
    """The file that a save to this name holds locked."""
    return path.with_name(f".{_stem(path.name)}.lock")


def hold(path: Path, disk: Disk) -> int | None:
    """The lock of a name, or None where the file system knows no locks; a `CheckpointError` names the process that has it."""
    lock = lock_of(path)
    deadline = time.monotonic() + _CHILDREN_MAY_TAKE
    while True:
        try:
            return disk.lock(lock)
        except BlockingIOError:
            owner, host = _owner(lock)
            # a process that died may have left children that still have its lock: they end soon after it
            if time.monotonic() < deadline and host == socket.gethostname() and not _lives(owner):
                time.sleep(0.05)
                continue
            who = f"process {owner} on {host}" if owner else "another process"
            raise CheckpointError(
                f"{path} is being saved by {who} at this moment.\n"
                "Give every run a folder of its own, or wait until that save is done; what is there already is untouched."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if disk.locks_are_missed:
                return None
            disk.locks_are_missed = True
            get_logger(__name__).warning(
                f"{path.parent} knows no file locks: two saves to one name at once would not be noticed, and leftovers of a save that was "
                "killed (.NAME.saving-*) are not removed."
            )
            return None


def sweep(path: Path, disk: Disk) -> None:
    """Remove what dead saves to this name left, and put a checkpoint back that a crash took from its place; a living save is left alone."""
    if not os.path.lexists(lock_of(path)) and not any(_beside(path, kind) for kind in ("saving", "was", "removing")):
        return
    try:
        lock = hold(path, disk)
    except (CheckpointError, OSError):  # somebody is at work there, or nobody may be: either way it is not ours to tidy up
        return
    if lock is None:
        return
    try:
        sweep_held(path, disk)
    finally:
        with suppress(OSError):
            disk.unlock(lock_of(path), lock)


def sweep_held(path: Path, disk: Disk) -> None:
    """The same for whoever holds the lock. What cannot be removed is said and left: it is no reason not to save."""
    found = {kind: _beside(path, kind) for kind in ("saving", "was", "removing")}
    if not any(found.values()):
        return
    try:
        if not os.path.lexists(path) and found["was"]:
            back = recover(path) or found["was"][0]
            disk.rename(back, path)
            found["was"].remove(back)
        disk.sync_folder(path.parent)  # what stands under the name is there to stay, before anything goes
        for leftover in [*found["saving"], *found["removing"]]:
            disk.remove_tree(leftover)
        for leftover in found["was"]:
            discard(leftover, path, disk)
    except OSError as error:
        get_logger(__name__).warning(
            f"What an earlier save to {path} left could not be removed ({told(error)}); the next save tries again."
        )


def discard(old: Path, new: Path, disk: Disk) -> None:
    """Remove a folder that was replaced; what is not of its checkpoint moves into the new one, or is left and named."""
    if not stat.S_ISDIR(os.lstat(old).st_mode):
        get_logger(__name__).warning(f"{old} is no folder, and was left as it is.")
        return
    ours = _files_of(old, new)
    moved, left = _carry(old, new, "", ours, disk)
    if moved:
        disk.sync_folder(new)
    if not left:
        remove(old, new, disk)
        return
    kept = new.with_name(f"replaced-{secrets.token_hex(4)}.{_stem(new.name)}")  # no name that a script takes for a checkpoint
    for name in sorted(ours):
        with suppress(FileNotFoundError):
            disk.remove(old / name)
    disk.rename(old, kept)
    disk.sync_folder(new.parent)
    get_logger(__name__).warning(
        f"{new} was replaced; {', '.join(left[:5])}{' and others' if len(left) > 5 else ''} did not belong to the old checkpoint, "
        f"and the new one has files of the same name: look into {kept}, and remove it."
    )


def remove(folder: Path, named: Path, disk: Disk) -> None:
    """Remove a folder with all that is in it, so that no crash leaves a part of it under a name that counts."""
    going = hidden(named, "removing")
    disk.rename(folder, going)
    disk.sync_folder(going.parent)
    disk.remove_tree(going)


def _carry(old: Path, new: Path, below: str, ours: set[str], disk: Disk) -> tuple[int, list[str]]:
    """Move everything that is not ours; how many were moved, and the names of those that could not because theirs are taken."""
    moved = 0
    left: list[str] = []
    with os.scandir(old / below) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = below + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if name in ours and not is_folder:
            continue
        taken = os.path.lexists(new / name)
        if is_folder and (any(one.startswith(f"{name}/") for one in ours) or (taken and (new / name).is_dir())):
            if not taken:
                disk.make_folder(new / name)
            inner_moved, inner_left = _carry(old, new, f"{name}/", ours, disk)
            if inner_moved:
                disk.sync_folder(new / name)
            elif not taken:
                disk.remove_folder(new / name)
            moved, left = moved + inner_moved, left + inner_left
        elif taken and _is_same(old / name, new / name):
            disk.remove(old / name)
        elif taken:
            left.append(name)
        else:
            disk.rename(Path(entry.path), new / name)
            moved += 1
    return moved, left


def _is_same(one: Path, other: Path) -> bool:
    """Whether two files hold the same bytes."""
    if one.is_symlink() or other.is_symlink() or not one.is_file() or not other.is_file():
        return False
    return filecmp.cmp(one, other, shallow=False)


def _files_of(old: Path, new: Path) -> set[str]:
    """The names of the files in a replaced folder that belong to its checkpoint."""
    manifest, successor = manifest_of(old), manifest_of(new)
    # A second save at the same place of a run: a rank that came before its commit took the first one for it, and put its file there.
    stamp = None if successor is None else successor.stamp
    ranks = {name for name in os.listdir(old) if (rank := RankFile.of(name)) and (rank.stamp != stamp or os.path.lexists(new / name))}
    if manifest is not None:
        return {MANIFEST, *manifest.files, *ranks}
    if not os.path.lexists(old / MANIFEST):
        return ranks
    # it was a checkpoint, but its manifest is damaged: what has a successor of the same name was part of it
    return {MANIFEST, *ranks, *(successor.files if successor else ())}


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    try:
        with Folder(folder) as opened:
            return all(opened.size(name) == entry.size for name, entry in manifest.files.items())
    except CheckpointError:
        return False


def _stem(name: str) -> str:
    """The name, or for one that is too long to have something put around it, its beginning and its checksum."""
    encoded = os.fsencode(name)
    if len(encoded) <= _LONGEST_STEM:
        return name
    return f"{encoded[: _LONGEST_STEM - 33].decode(errors='ignore')}~{digest(encoded)}"


def _beside(path: Path, kind: Kind) -> list[Path]:
    stem = _stem(path.name)
    with suppress(OSError), os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        matches = [found for name in sorted(names) if (found := _HIDDEN.fullmatch(name))]
        return [path.with_name(found.string) for found in matches if found["stem"] == stem and found["kind"] == kind]
    return []


def _owner(lock: Path) -> tuple[int, str]:
    try:
        pid, host = lock.read_text(errors="replace").split("\n")[0].split(" ", 1)
        return int(pid), host
    except (OSError, ValueError):  # just being written, or just gone
        return 0, ""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is there, but another user's
        return True
    return True
