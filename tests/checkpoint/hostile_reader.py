"""Reads tampered checkpoints in a process of its own, watched from inside, and writes down what came of each.

    python hostile_reader.py FOLDER RESULTS.json [all]

Watched are: what is opened, and where it really is; code that is run, compiled, imported or unpickled; processes and sockets; time of the
processor; memory. A case that blocks is cut off. Everything is read twice: through the kernel's `openat2`, and part by part without it.
"""

from __future__ import annotations

import errno
import json
import os
import pickle  # noqa: TID251 - to see whether unpickling would be seen
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import hostile
import torch

from slipstream.big_models.load import load_checkpoint_in_model
from slipstream.checkpoint import locate, shard_layout
from slipstream.checkpoint.locate import read_saved_state
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files import paths

LONGEST = 20.0
HARMLESS = {"sys._getframe", "object.__getattr__", "object.__setattr__", "object.__delattr__", "gc.get_objects", "sys.setprofile"}
RUNNING = (
    "exec",
    "compile",
    "import",
    "pickle.find_class",
    "marshal.loads",
    "code.__new__",
    "function.__new__",
    "builtins.input",
    "cpython.",
)
BEYOND = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.spawn", "os.posix_spawn", "pty.", "urllib.", "http.", "ftplib.")
CHANGING = (
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate", "os.utime", "shutil.",
    "tempfile.",
)  # fmt: skip


class Watch:
    """What happened while it was armed that should not."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.root is None or event in HARMLESS:
            return
        if event.startswith((*RUNNING, *BEYOND, *CHANGING)):
            self.seen.append(f"{event} {str(arguments[:2])[:200]}")
        elif event == "open":
            self._opened(*arguments)
        elif (
            event in ("os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes)) and not self._within(os.fsdecode(arguments[0]))
        ):
            self.seen.append(f"{event} {arguments[0]!r}")

    def _opened(self, path: Any, mode: Any, flags: int) -> None:
        if isinstance(path, int):
            return
        name = os.fsdecode(path)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            self.seen.append(f"opened for writing: {name}")
        elif os.path.isabs(name):
            if not self._within(name) and not name.startswith("/proc/self/"):
                self.seen.append(f"opened: {name}")
        elif "/" in name or name in (".", "..") or not flags & os.O_NOFOLLOW:
            self.seen.append(f"opened with a path that may lead elsewhere: {name}")

    def _within(self, path: str) -> bool:
        assert self.root is not None
        return path == self.root or path.startswith(f"{self.root}/")


def peak() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class Net(torch.nn.Module):
    """The model whose weights the specimens hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.small = torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))

    def get_extra_state(self) -> Any:
        return {"version": 2}

    def set_extra_state(self, state: Any) -> None:
        pass


def whole(folder: Path) -> str:
    saved = read_saved_state(locate.open_checkpoint(folder), str(folder))
    for model in saved.models.values():
        for tensor in model.tensors.values():
            saved.placeholders.read(tensor, shard_layout.whole_box(tensor.shape))
    for rank in range(min(saved.world or 0, 4)):
        saved.rank(rank)
    return folder.name


def previous(folder: Path) -> str:
    return locate.open_newest([folder, folder.parent / "checkpoint_1"], str(folder.parent)).checkpoint.folder.name


def weights(folder: Path) -> str:
    model = Net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        load_checkpoint_in_model(model, folder, strict=True)
    except BaseException:
        for old, new in zip(before, model.parameters(), strict=True):
            if not torch.equal(old, new):
                return "changed the model and then refused"
        raise
    return folder.name


READERS: dict[str, Callable[[Path], str]] = {"whole": whole, "previous": previous, "weights": weights}


class TooLong(BaseException):
    pass


def cut_off(number: int, frame: Any) -> None:
    raise TooLong


def attempt(read: Callable[[Path], str], folder: Path, watch: Watch) -> dict[str, Any]:
    """What comes of reading a folder, and what it took."""
    forget_peak()
    before, began = peak(), time.process_time()
    watch.seen, watch.root = [], str(folder.parent)
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        outcome = {"read": read(folder)}
    except (CheckpointError, ConfigError) as error:
        outcome = {"refused": str(error)[:20_000], "length": len(str(error))}
    except TooLong:
        outcome = {"blocked": True}
    except Exception as error:
        outcome = {"crashed": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.root = None
    return {**outcome, "seconds": time.process_time() - began, "memory": peak() - before, "seen": watch.seen}


def by_parts(*arguments: Any) -> int:
    raise OSError(errno.ENOSYS, "not here")


def unseen(watch: Watch) -> list[str]:
    """What the watch does not see of what it should; run last, as it imports and opens."""
    acts: dict[str, Callable[[], object]] = {
        "a file outside": lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)),
        "a relative path": lambda: os.open("some/path", os.O_RDONLY),
        "a link": lambda: os.open("link", os.O_RDONLY),
        "writing": lambda: os.open(f"{watch.root}/x", os.O_WRONLY),
        "running": lambda: exec("1"),
        "importing": lambda: __import__("antigravity_that_is_not_there"),
        "unpickling": lambda: pickle.loads(b"cos\ngetpid\n(tR."),
        "a listing": lambda: os.listdir("/"),
        "a socket": lambda: socket.socket().close(),
        "a removal": lambda: os.unlink("/nothing/there"),
    }
    missed = []
    for name, act in acts.items():
        watch.seen, watch.root = [], "/nothing/inside"
        with suppress(OSError, ImportError):
            act()
        watch.root = None
        missed += [] if watch.seen else [name]
    return missed


def reset(base: Path, case: Path) -> Path:
    """A fresh copy of the checkpoint that is attacked next."""
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(base / "checkpoint_2", case / "checkpoint_2")
    shutil.copytree(base / "checkpoint_1", case / "checkpoint_1", copy_function=os.link)
    (case / "secret").write_text("secret")
    return case / "checkpoint_2"


def largest(folder: Path) -> int:
    """Bytes on the disk below a folder."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def main(folder: str, results: str, extent: str = "some") -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, cut_off)
    base, case = Path(folder, "base"), Path(folder, "case")
    hostile.make(base)
    watch = Watch()
    kernel = paths._open_beneath

    def seen_by_kernel(root: int, place: str, resolve: int) -> int:
        fd = kernel(root, place, resolve)
        real = os.readlink(f"/proc/self/fd/{fd}")
        if watch.root is not None and not watch._within(real):
            watch.seen.append(f"opened: {real}")
        return fd

    for opener in (seen_by_kernel, by_parts):  # what is imported at the first use is imported here, errors included
        paths._open_beneath = opener
        for read in READERS.values():
            read(base / "checkpoint_2")
            for name in ("training.json", hostile.SHARDS[0]):
                hostile.put(reset(base, case), name, b"")
                attempt(read, case / "checkpoint_2", watch)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (6 << 30), resource.RLIM_INFINITY))
    found: dict[str, Any] = {}
    for attack in hostile.attacks(everything=extent == "all"):
        attack.change(reset(base, case))
        outcome = found[attack.name] = {"names": attack.names, "refused": attack.refused, "bytes": largest(case), "damages": attack.damages}
        for way, opener in (("kernel", seen_by_kernel), ("parts", by_parts)):
            paths._open_beneath = opener
            for reader, read in READERS.items() if way == "kernel" else [("whole", whole)]:
                outcome[f"{way}/{reader}"] = attempt(read, case / "checkpoint_2", watch)
    Path(results).write_text(json.dumps({"attacks": found, "unseen": unseen(watch)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
