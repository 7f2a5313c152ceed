"""Every state in which a crash can leave a disk in the middle of a save.

`Trace` is a disk that does what it is told and keeps a list of it. `states` goes through every prefix of that list and gives the trees that
could be found after a power cut at that point, by a model of a journaling file system that promises little:

  - a change of names (create, rename, exchange, link, unlink, mkdir, rmdir) happens as a whole or not at all;
  - it is certain only after a sync of a folder whose names it changes. Of those that are not certain any subset may have happened, in
    any order that makes sense: a rename cannot happen without the file that it renames;
  - syncing a file makes its bytes certain and nothing else, not even its name;
  - bytes that are not certain are there, not there, there in part, or zeros.

Where the subsets of one prefix are too many, `most` of them are taken: none, all, each one missing, each one alone, each beginning, and
then random ones. Nothing here knows what a checkpoint is.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

from slipstream.files.disk import Disk

__all__ = ["Change", "Name", "State", "Trace", "Tree", "materialise", "states"]

Tree = dict[str, Union[bytes, "Tree"]]
Check = Callable[[Path], None]


@dataclass(frozen=True)
class Name:
    """One name in a folder means something else from now on; 0 stands for nothing. Numbers are those of files and folders."""

    folder: int
    name: str
    before: int
    after: int


@dataclass(frozen=True)
class Change:
    """One operation: names that change together, or bytes of a file, or a sync."""

    what: str
    names: tuple[Name, ...] = ()
    inode: int = 0
    offset: int = 0
    data: bytes = b""
    size: int = 0


@dataclass
class State:
    """What a crash after `after` operations can leave, and what must be true of it then."""

    after: int
    tree: Tree
    check: Check


class Trace(Disk):
    """Does what it is told below `root`, without really syncing, and remembers it.

    `forgets` names operations ("sync file", "sync folder") that are left out, as a faulty program would: the tests of the tests use it.
    """

    def __init__(self, root: Path, *, exchanges: bool = True, forgets: str = "") -> None:
        self.root = root
        self.changes: list[Change] = []
        self.checks: list[tuple[int, Check]] = []
        self._exchanges = exchanges
        self._forgets = forgets
        self._numbers = itertools.count(2)
        self._folders: dict[int, dict[str, int]] = {}
        self._open_files: dict[int, int] = {}
        self.files: dict[int, bytes] = {}
        self.begin()

    def begin(self) -> None:
        """What is there now is certain; the list begins anew."""
        self.changes, self.checks = [], []
        self._folders, self.files = {}, {}
        self._know(1, self.root)
        self.folders = {number: dict(names) for number, names in self._folders.items()}

    def promise(self, check: Check) -> None:
        """From here on every state has to pass this check."""
        self.checks.append((len(self.changes), check))

    def _know(self, number: int, path: Path) -> None:
        known: dict[str, int] = {}
        self._folders[number] = known
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            known[entry.name] = next(self._numbers)
            if entry.is_dir(follow_symlinks=False):
                self._know(known[entry.name], Path(entry.path))
            else:
                self.files[known[entry.name]] = Path(entry.path).read_bytes()

    def _at(self, path: Path) -> tuple[int, str, int]:
        """The number of the folder, the name in it, and the number of what it names."""
        *way, name = path.relative_to(self.root).parts
        folder = 1
        for part in way:
            folder = self._folders[folder][part]
        return folder, name, self._folders[folder].get(name, 0)

    def _inode(self, path: Path) -> int:
        return 1 if path == self.root else self._at(path)[2]

    def _record(self, what: str, *names: Name) -> None:
        self.changes.append(Change(what, names))
        for name in names:
            if name.after:
                self._folders[name.folder][name.name] = name.after
            else:
                del self._folders[name.folder][name.name]

    def _open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        fd = super()._open(path, flags, mode)
        if flags & os.O_CREAT and not self._at(path)[2]:
            folder, name, _ = self._at(path)
            self._record("create", Name(folder, name, 0, next(self._numbers)))
        self._open_files[fd] = self._inode(path)
        return fd

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        count = super()._pwrite(fd, data, offset)
        self.changes.append(Change("write", inode=self._open_files[fd], offset=offset, data=bytes(memoryview(data)[:count])))
        return count

    def _allocate(self, fd: int, size: int) -> None:
        super()._allocate(fd, size)
        self.changes.append(Change("allocate", inode=self._open_files[fd], size=size))

    def _fsync(self, fd: int) -> None:
        inode = self._open_files[fd]
        what = "sync folder" if inode in self._folders else "sync file"
        if what != self._forgets:
            self.changes.append(Change(what, inode=inode))

    def _close(self, fd: int) -> None:
        del self._open_files[fd]
        super()._close(fd)

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        super().make_folder(path, mode)
        folder, name, _ = self._at(path)
        number = next(self._numbers)
        self._folders[number] = {}
        self._record("mkdir", Name(folder, name, 0, number))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        (folder, name, inode), (new_folder, new_name, replaced) = self._at(old), self._at(new)
        self._record("rename", Name(folder, name, inode, 0), Name(new_folder, new_name, replaced, inode))

    def exchange(self, path: Path, other: Path) -> bool:
        if not self._exchanges or not super().exchange(path, other):
            return False
        (folder, name, inode), (other_folder, other_name, other_inode) = self._at(path), self._at(other)
        self._record("exchange", Name(folder, name, inode, other_inode), Name(other_folder, other_name, other_inode, inode))
        return True

    def link(self, old: Path, new: Path) -> None:
        super().link(old, new)
        folder, name, _ = self._at(new)
        self._record("link", Name(folder, name, 0, self._inode(old)))

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._record("unlink", Name(*self._at(path), 0))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self._record("rmdir", Name(*self._at(path), 0))


@dataclass
class _Pending:
    """What is certain after a number of operations, and what is not."""

    certain: set[int] = field(default_factory=set)
    uncertain: list[int] = field(default_factory=list)
    files: dict[int, list[bytes]] = field(default_factory=dict)
    """What each file that is not certain can hold."""


def states(trace: Trace, most: int, seed: int = 0) -> Iterator[State]:
    """Every different state, at most about `most` for each prefix."""
    chance = random.Random(seed)
    seen: set[tuple[int, Any]] = set()
    for after in range(len(trace.changes) + 1):
        number, check = max((index, check) for index, (start, check) in enumerate(trace.checks) if start <= after)
        pending = _pending(trace, after)
        for chosen, contents in _choices(pending, most, chance):
            tree = _tree(trace, pending, chosen, contents)
            if tree is None:
                continue
            key = (number, _key(tree))
            if key not in seen:
                seen.add(key)
                yield State(after, tree, check)


def materialise(tree: Tree, folder: Path) -> None:
    """Make a state real, in an empty folder."""
    for name, content in tree.items():
        if isinstance(content, dict):
            (folder / name).mkdir()
            materialise(content, folder / name)
        else:
            (folder / name).write_bytes(content)


def _pending(trace: Trace, after: int) -> _Pending:
    pending = _Pending()
    changes = trace.changes[:after]
    synced: dict[int, int] = {change.inode: index for index, change in enumerate(changes) if change.what.startswith("sync")}
    for index, change in enumerate(changes):
        if change.names:
            certain = any(synced.get(name.folder, -1) > index for name in change.names)
            pending.certain.add(index) if certain else pending.uncertain.append(index)
    written: dict[int, list[int]] = {}
    for index, change in enumerate(changes):
        if change.what in ("write", "allocate"):
            written.setdefault(change.inode, []).append(index)
    for inode, indexes in written.items():
        sure = _content(trace, inode, [index for index in indexes if index < synced.get(inode, -1)])
        loose = [index for index in indexes if index > synced.get(inode, -1)]
        pending.files[inode] = [sure] if not loose else _possible(trace, inode, sure, indexes, loose)
    return pending


def _possible(trace: Trace, inode: int, sure: bytes, indexes: list[int], loose: list[int]) -> list[bytes]:
    whole = _content(trace, inode, indexes)
    without_last = _content(trace, inode, indexes[:-1])
    last_alone = _content(trace, inode, [index for index in indexes if index not in loose[:-1]])
    zeros = sure.ljust(len(whole), b"\0")
    torn = whole[: (len(sure) + len(whole)) // 2]
    return list(dict.fromkeys([whole, sure, zeros, torn, without_last, last_alone]))


def _content(trace: Trace, inode: int, indexes: list[int]) -> bytes:
    content = bytearray(trace.files.get(inode, b""))
    for index in indexes:
        change = trace.changes[index]
        end = max(change.offset + len(change.data), change.size)
        content.extend(bytes(max(0, end - len(content))))
        content[change.offset : change.offset + len(change.data)] = change.data
    return bytes(content)


def _choices(pending: _Pending, most: int, chance: random.Random) -> Iterator[tuple[set[int], dict[int, bytes]]]:
    loose = pending.uncertain
    variants = [dict(zip(pending.files, content, strict=True)) for content in itertools.product(*pending.files.values())]
    if len(variants) << len(loose) <= most:
        subsets: list[set[int]] = [
            set(combination) for size in range(len(loose) + 1) for combination in itertools.combinations(loose, size)
        ]
        yield from itertools.product(subsets, variants)
        return
    telling = [set(loose[:size]) for size in range(len(loose), -1, -1)]
    telling += [set(loose) - {entry} for entry in loose] + [{entry} for entry in loose]
    for number in range(most):
        subset = telling[number] if number < len(telling) else {entry for entry in loose if chance.random() < 0.7}
        yield subset, variants[number % len(variants)] if number < len(telling) else chance.choice(variants)


def _tree(trace: Trace, pending: _Pending, chosen: set[int], contents: dict[int, bytes]) -> Tree | None:
    """The tree after these changes of names; None if they cannot have happened without others."""
    folders = {number: dict(names) for number, names in trace.folders.items()}
    for index in sorted(pending.certain | chosen):
        names = trace.changes[index].names
        if any(folders.setdefault(name.folder, {}).get(name.name, 0) != name.before for name in names):
            return None
        for name in names:
            folders[name.folder].pop(name.name, None)
            if name.after:
                folders[name.folder][name.name] = name.after
        if trace.changes[index].what == "mkdir":
            folders.setdefault(names[0].after, {})
    return _grow(1, folders, {**trace.files, **contents})


def _grow(number: int, folders: dict[int, dict[str, int]], files: dict[int, bytes]) -> Tree:
    return {
        name: _grow(inode, folders, files) if inode in folders else files.get(inode, b"") for name, inode in sorted(folders[number].items())
    }


def _key(tree: Tree) -> Any:
    return tuple((name, _key(content) if isinstance(content, dict) else content) for name, content in tree.items())
