"""The worker process of `checkpoints.py`, one per library: it saves and loads on command, and reports the times.

Commands are lines of JSON on standard input, `{"do": "save", "folder": ...}`; replies are lines of JSON on standard output. The process
keeps one model with its AdamW state. It measures wall and CPU time, without setup work (removing files, emptying caches, starting).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from worker_process import serve

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

WIDTH = 1024
BLOCK = 8 * WIDTH * WIDTH * 4
"""Bytes of the two large matrices of a block."""
Clocks = tuple[float, float]
SMALL = 512
"""A square of this many weights is a megabyte."""


def blocks(megabytes: float) -> torch.nn.Sequential:
    """Return feed-forward blocks as in a transformer, with about this size of weights."""
    count = max(1, round(megabytes * 1e6 / BLOCK))
    layers = [[torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)] for _ in range(count)]
    return torch.nn.Sequential(*(layer for block in layers for layer in block))


def equal(tensors: int, elements: int) -> torch.nn.Module:
    """Return a model with so many weights of the same size."""
    return torch.nn.ParameterList(torch.ones(elements) for _ in range(tensors))


def mostly_frozen(megabytes: float) -> torch.nn.Sequential:
    """Return forty equal layers, two of which are trained: 95 % of the weights never change."""
    width = round((megabytes * 1e6 / 4 / 40) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(40)))
    for layer in model[:38]:
        layer.requires_grad_(False)
    return model


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW with state: it has made one step."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)
    step(optimizer)
    return optimizer


def step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


class Library:
    """Save and load a model with its optimizer."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.optimizer = stepped(model)

    def save(self, folder: str) -> None:
        raise NotImplementedError

    def load(self, folder: str) -> None:
        raise NotImplementedError

    @property
    def state(self) -> dict[Any, Any]:
        """Return the optimizer state by parameter."""
        return self.optimizer.state

    def tensors(self) -> list[torch.Tensor]:
        return [*self.model.state_dict().values(), *(entry for state in self.state.values() for entry in state.values())]


class Plain(Library):
    """torch.save of the two state dicts, as scripts without a library do it."""

    durable = False

    def save(self, folder: str) -> None:
        os.makedirs(folder)
        for name, entry in (("model", self.model), ("optimizer", self.optimizer)):
            with open(f"{folder}/{name}.pt", "wb") as file:
                torch.save(entry.state_dict(), file)
                if self.durable:
                    file.flush()
                    os.fsync(file.fileno())

    def load(self, folder: str) -> None:
        self.model.load_state_dict(torch.load(f"{folder}/model.pt", map_location="cpu", weights_only=True))
        self.optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt", map_location="cpu", weights_only=True))


class Synced(Plain):
    durable = True


class Prepared(Library):
    """An Accelerator, of either library."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.plain = self.optimizer
        self.begin()

    def begin(self) -> None:
        """Create a new Accelerator, which has saved nothing yet."""
        self.accelerator = self.made()
        self.prepared, self.optimizer = self.accelerator.prepare(self.model, self.plain)

    def made(self) -> Any:
        raise NotImplementedError

    def save(self, folder: str) -> None:
        self.accelerator.save_state(folder)

    def load(self, folder: str) -> None:
        self.accelerator.load_state(folder)

    @property
    def state(self) -> dict[Any, Any]:
        return self.plain.state


class Theirs(Prepared):
    def made(self) -> Any:
        from accelerate import Accelerator

        return Accelerator(cpu=True)


class Ours(Prepared):
    def made(self) -> Any:
        from slipstream import Accelerator

        return Accelerator(cpu=True)

    def save_behind(self, folder: str) -> None:
        self.accelerator.save_state(folder, async_save=True)

    def wait(self) -> None:
        self.accelerator.end_training()


LIBRARIES: dict[str, type[Library]] = {"ours": Ours, "accelerate": Theirs, "torch": Plain, "torch, synced": Synced}


class Worker:
    """The commands: every public method is one; its arguments are those of the command, and its result is the reply."""

    def __init__(self, library: str, model: torch.nn.Module) -> None:
        self._make = LIBRARIES[library]
        self._library = self._make(model)
        self._few: Library | None = None
        self._saved: dict[str, str] = {}

    def save(self, folder: str, small: bool = False) -> Clocks:
        """A save."""
        taken = timed(self._chosen(small).save, folder)
        if not small:
            self._saved[folder] = checksum(self._library)
        return taken

    def save_behind(self, folder: str, small: bool = False, fresh: bool = False) -> tuple[Clocks, Clocks]:
        """Time an async save: until it returns, and until it is committed; `fresh`: the first of an Accelerator."""
        library = self._chosen(small)
        assert isinstance(library, Ours)
        if fresh:
            library.begin()
            gc.collect()
            step(library.optimizer)
        begin = clocks()
        library.save_behind(folder)
        stall = clocks(begin)
        library.wait()
        return stall, clocks(begin)

    def load(self, folder: str) -> Clocks:
        """Time a load into a model whose optimizer has no state yet, as after a restart; check that everything was restored."""
        with self._forgotten(folder):
            return timed(self._library.load, folder)

    def memory(self, folder: str) -> tuple[float, float]:
        """Return the peak bytes of a load beyond those before it, with and without file pages; the second is sampled."""
        with self._forgotten(folder), Peak() as peak:
            self._library.load(folder)
        return peak.resident, peak.anonymous

    def size(self) -> int:
        """Return the bytes of weights and optimizer state."""
        return sum(value.nbytes for value in self._library.tensors())

    def write(self, path: str, megabytes: float, direct: bool) -> Clocks:
        """Time a durable write of a file: by our disk writer, which also checksums it, or through the page cache with fsync."""
        from slipstream.files.disk import Disk

        data = memoryview(self._buffer(int(megabytes * 1e6)))
        if direct:
            return timed(lambda: Disk().write(Path(path), [data], len(data)))
        return timed(lambda: buffered(path, data))

    def dedup(self, folder: str, megabytes: float, saves: int) -> None:
        """Save a model with frozen weights repeatedly, as numbered checkpoints, each after a step."""
        from slipstream import Accelerator
        from slipstream.utils import ProjectConfiguration

        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project)
        model = mostly_frozen(megabytes)
        model, optimizer = accelerator.prepare(model, stepped(model))
        for _ in range(saves):
            step(optimizer)
            accelerator.save_state(dedup=True)

    def _chosen(self, small: bool) -> Library:
        if not small:
            return self._library
        if self._few is None:
            self._few = self._make(torch.nn.Linear(SMALL, SMALL))
        return self._few

    def _buffer(self, size: int) -> bytearray:
        if not hasattr(self, "_bytes"):
            self._bytes = bytearray(os.urandom(1 << 20) * (size // (1 << 20)))
        return self._bytes

    @contextmanager
    def _forgotten(self, folder: str) -> Iterator[None]:
        with torch.no_grad():
            for parameter in self._library.model.parameters():
                parameter.zero_()
        self._library.state.clear()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # a process that has just started has no memory at hand either
        yield
        assert checksum(self._library) == self._saved[folder], "what was loaded is not what was saved"


def checksum(library: Library) -> str:
    """Return a checksum of the weights and the optimizer state."""
    found = xxhash.xxh3_128()
    for value in library.tensors():
        found.update(value.detach().contiguous().numpy())
    return found.hexdigest()


def buffered(path: str, data: memoryview) -> None:
    with open(path, "xb", buffering=0) as file:
        for start in range(0, len(data), 4 << 20):
            file.write(data[start : start + (4 << 20)])
        os.fsync(file.fileno())


def clocks(begin: Clocks = (0.0, 0.0)) -> Clocks:
    """Return the seconds since a start: wall time, and CPU time of all threads of this process."""
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def timed(call: Callable[..., Any], *arguments: Any) -> Clocks:
    gc.collect()
    begin = clocks()
    call(*arguments)
    return clocks(begin)


class Peak:
    """Measure the peak memory of this process inside the block, beyond that before it."""

    resident = 0.0
    anonymous = 0.0

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        self._before = memory_lines()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.resident = memory_lines()["VmHWM"] - self._before["VmRSS"]

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.anonymous = max(self.anonymous, memory_lines()["RssAnon"] - self._before["RssAnon"])


def memory_lines() -> dict[str, float]:
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {words[0].rstrip(":"): float(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--megabytes", type=float, help="the size of the weights, in blocks as of a transformer")
    parser.add_argument("--tensors", type=int, help="instead of that, so many weights")
    parser.add_argument("--elements", type=int, default=0, help="of each of them")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = equal(options.tensors, options.elements) if options.tensors else blocks(options.megabytes)
    serve(lambda: Worker(options.library, model))


if __name__ == "__main__":
    main()
