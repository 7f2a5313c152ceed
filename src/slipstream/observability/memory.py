"""Snapshots of the tensors that are alive in this process, by size and name, also when memory runs out.

`memory_snapshot()` counts each storage once, for views and tied parameters too, and holds numbers and strings only, so it keeps no tensor
alive. Tensors that Python has never seen (saved activations inside autograd) are not listed; the allocator statistics and the resident
size of the process show how much there is in addition.

`watch_memory` chains a hook in front of `sys.excepthook`. When an uncaught out-of-memory error ends the process, the hook logs a table,
writes `memory-rank<rank>.json` and adds a note to the error; then the previous hook runs. The hook never hides the error and never
raises. The launcher's workers, which catch failures, call it too. Notebooks bypass `sys.excepthook`: call `memory_snapshot()` there.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
import socket
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import psutil
import torch

# torch internals: the only test for tensors that are made of others (DTensor, quantised). torch 2.13; test_memory_snapshot.py notices.
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.config.handlers import check_count
from slipstream.devices.memory import allocator_statistics, convert_bytes, host_memory, should_reduce_batch_size
from slipstream.distributed.current import current, current_or_none

__all__ = [
    "AliveTensors", "FailureHook", "MemorySnapshot", "MemoryWatch", "NamedTensor", "memory_snapshot", "named_tensors",
    "report_if_out_of_memory", "summarize_alive", "watch_memory",
]


NamedTensor = tuple[str, str, torch.Tensor]
"""What it is (parameter, buffer, gradient, optimizer state), its name, and the tensor."""


def named_tensors(models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> Iterator[NamedTensor]:
    """Return the parameters, buffers and gradients of models, and what optimizers keep for each parameter.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> [(kind, name) for kind, name, _ in named_tensors([model], [optimizer])]
    [('parameter', 'weight'), ('gradient', 'weight'), ('optimizer state', 'momentum_buffer of weight')]
    """
    names: dict[int, str] = {}
    several = list(models)
    for number, model in enumerate(several):
        prefix = f"model {number}: " if len(several) > 1 else ""
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{prefix}{name}")
            yield "parameter", f"{prefix}{name}", parameter
            if parameter.grad is not None:
                yield "gradient", f"{prefix}{name}", parameter.grad
        for name, buffer in model.named_buffers():
            yield "buffer", f"{prefix}{name}", buffer
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            whose = names.get(id(owner), "a parameter of no prepared model")
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield "optimizer state", f"{key} of {whose}", value


_ROWS: Final = 10
_MAX_NAME: Final = 60
_OTHERS: Final = "other tensors"


@dataclass(frozen=True)
class AliveTensors:
    """A named tensor, or all unnamed tensors that are alike."""

    name: str | None
    kind: str
    """parameter, buffer, gradient, optimizer state, or other tensors."""
    shape: tuple[int, ...]
    dtype: str
    device: str
    count: int
    bytes: int
    """Of all of them together."""


@dataclass(frozen=True)
class MemorySnapshot:
    """The tensors that were alive at one moment. As text it is a short table; `write` stores all of it."""

    rank: int
    host: str
    time: float
    tensors: int
    """The number of storages."""
    total: int
    """Their bytes, on all devices."""
    by_device: dict[str, int]
    by_kind: dict[str, int]
    alive: tuple[AliveTensors, ...]
    """The largest first."""
    more: int
    """How many tensors are not listed."""
    process: int
    """Bytes of main memory that this process takes altogether."""
    available: int
    """Bytes of main memory that can still be had."""
    allocators: dict[str, dict[str, int]] = field(default_factory=dict)
    """What the allocators of devices say."""

    def line(self) -> str:
        """Return a clause for one line, such as "no tensors were alive" or "8.0 bytes in 1 tensor were alive (...)"."""
        if not self.alive:
            return self._summary()
        first = self.alive[0]
        many = f"{first.count} x " if first.count > 1 else ""
        name = f"{first.name}, " if first.name else ""
        largest = f"{convert_bytes(first.bytes)}: {name}{many}{first.dtype} {list(first.shape)} on {first.device}"
        return f"{self._summary()}, the largest {largest}"

    def _summary(self) -> str:
        if not self.tensors:
            return "no tensors were alive"
        count = "1 tensor" if self.tensors == 1 else f"{self.tensors:,} tensors"
        kinds = ", ".join(f"{kind.removesuffix('s')}s {convert_bytes(size)}" for kind, size in self.by_kind.items())
        return f"{convert_bytes(self.total)} in {count} were alive ({kinds})"

    def __str__(self) -> str:
        lines = [
            f"{self._summary()}; the process takes {convert_bytes(self.process)} of main memory, {convert_bytes(self.available)} are left"
        ]
        for device, numbers in self.allocators.items():
            sizes = {name.replace("_", " "): size for name, size in numbers.items() if name not in ("retries", "failures")}
            lines.append(f"{device}: {', '.join(f'{name} {convert_bytes(size)}' for name, size in sizes.items())}")
        if not self.alive:
            return "\n".join(lines)
        from slipstream.observability.report.text_charts import align_columns

        rows = [["bytes", "count", "tensor", "what"]]
        for group in self.alive[:_ROWS]:
            what = f"{group.kind} {group.name}" if group.name else group.kind
            what = what if len(what) <= _MAX_NAME else what[: _MAX_NAME - 3] + "..."
            rows.append([convert_bytes(group.bytes), str(group.count), f"{group.dtype} {list(group.shape)} {group.device}", what])
        return "\n".join([*lines, *align_columns(rows, left=(2, 3))])

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write all of it as a JSON file, which is whole or not there."""
        from slipstream.observability.run_dir.folder import replacing

        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as beside:
            beside.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        return target


def memory_snapshot(count: int = 50, *, names: Iterable[NamedTensor] | None = None) -> MemorySnapshot:
    """Return the tensors that are alive in this process; `count` is how many rows are listed.

    Parameters, buffers, gradients and states of optimizers that were prepared have their names; `names` gives others, as
    `named_tensors(models, optimizers)` makes them.

    >>> weights = torch.zeros(1000, 1000)
    >>> snapshot = memory_snapshot(names=[("parameter", "weights", weights)])
    >>> [(group.name, group.shape, group.bytes) for group in snapshot.alive if group.name]
    [('weights', (1000, 1000), 4000000)]
    """
    check_count(count, f"memory_snapshot(count={count!r}): write how many entries are wanted, from 1")
    runtime = current_or_none()
    watched = [] if runtime is None else [named for watch in runtime.memory_watches for named in watch.named()]
    blocks = _find_storages([*(names or ()), *watched])
    rows = sorted(_group_alike(blocks), key=lambda block: (-block.bytes, block.name or ""))
    return MemorySnapshot(
        rank=0 if runtime is None else runtime.process.rank,
        host=socket.gethostname(),
        time=time.time(),
        tensors=len(blocks),
        total=sum(block.bytes for block in blocks),
        by_device=_sum_by_key((block.device, block.bytes) for block in blocks),
        by_kind=_sum_by_key((block.kind, block.bytes) for block in blocks),
        alive=tuple(rows[:count]),
        more=sum(row.count for row in rows[count:]),
        process=int(psutil.Process().memory_info().rss),
        available=host_memory().available,
        allocators=allocator_statistics(),
    )


@dataclass
class _Storage:
    """A storage that one or more tensors share."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    kind: str = _OTHERS
    names: list[str] = field(default_factory=list)

    @property
    def name(self) -> str | None:
        return f"{self.names[0]} and {len(self.names) - 1} others" if len(self.names) > 1 else next(iter(self.names), None)


def _find_storages(named: Iterable[NamedTensor]) -> list[_Storage]:
    """Return each storage once; named tensors first, so that their names count."""
    found: dict[tuple[str, int], _Storage] = {}
    for kind, name, whole in named:
        for tensor in _inner_tensors(whole):
            block = _add_storage(found, tensor)
            if block is not None and name not in block.names:
                block.kind = kind if not block.names else block.kind
                block.names.append(name)
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not is_traceable_wrapper_subclass(thing):
            _add_storage(found, thing)
    return list(found.values())


def _inner_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """Return the inner tensors of a sharded or quantised one, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    inner, _ = tensor.__tensor_flatten__()
    for name in inner:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield from _inner_tensors(part)


def _add_storage(found: dict[tuple[str, int], _Storage], tensor: torch.Tensor) -> _Storage | None:
    """Return the storage of a tensor; None if it has none or does not reveal it."""
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta" or not storage.nbytes():  # of fakes too
            return None
        size, place = storage.nbytes(), (str(storage.device), storage.data_ptr())
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    block = found.get(place)
    if block is None:
        block = found[place] = _Storage(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), place[0], size)
    return block


def _group_alike(blocks: Iterable[_Storage]) -> list[AliveTensors]:
    """Return named tensors one by one, the others grouped by shape, dtype and device."""
    groups: dict[Any, list[_Storage]] = {}
    for block in blocks:
        groups.setdefault((block.name, block.kind, block.shape, block.dtype, block.device, block.bytes), []).append(block)
    return [
        AliveTensors(name, kind, shape, dtype, device, len(alike), size * len(alike))
        for (name, kind, shape, dtype, device, size), alike in groups.items()
    ]


def _sum_by_key(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for key, size in pairs:
        sums[key] += size
    return dict(sums.most_common())


_Names = Callable[[], Iterable[NamedTensor]]
_Folder = Callable[[], "Path | None"]
_OnSnapshot = Callable[[Path, MemorySnapshot], object]
_SEEN_ATTRIBUTE: Final = "_slipstream_has_looked"
_MAX_CHAIN: Final = 20
_logger = logging.getLogger(__name__)


class MemoryWatch:
    """The names of tensors and the folder for a snapshot. Created by `watch_memory`; `close` ends it."""

    def __init__(self, names: _Names, folder: _Folder, tell: _OnSnapshot | None) -> None:
        self._names, self._folder, self._tell = _hold_weakly(names), _hold_weakly(folder), _hold_weakly(tell)

    @property
    def has_owner(self) -> bool:
        """Whether the owner of the names is still alive."""
        return self._names() is not None

    def named(self) -> Iterator[NamedTensor]:
        """Return the named tensors; none once their owner is gone."""
        names = self._names()
        yield from () if names is None else names()

    def folder(self) -> Path | None:
        """Return where a snapshot is written."""
        folder = self._folder()
        return None if folder is None else folder()

    def tell(self, path: Path, snapshot: MemorySnapshot) -> None:
        """Report where a snapshot is."""
        tell = self._tell()
        if tell is not None:
            tell(path, snapshot)

    def close(self) -> None:
        """End the watch; the last one also removes the hook, unless another hook was installed after it."""
        runtime = current_or_none()
        if runtime is not None and self in runtime.memory_watches:
            runtime.memory_watches.remove(self)
            if not runtime.memory_watches and isinstance(sys.excepthook, FailureHook):
                sys.excepthook = sys.excepthook.previous


def watch_memory(names: _Names, folder: _Folder = lambda: None, tell: _OnSnapshot | None = None) -> MemoryWatch:
    """Take a snapshot when an out-of-memory error ends this process.

    `names()` returns the names of tensors (`named_tensors(models, optimizers)`), `folder()` the folder for `memory-rank<rank>.json` (None:
    not written), and `tell(path, snapshot)` is called when the file is written. Methods are held weakly: a watch keeps no object alive.

    >>> import torch
    >>> weight = torch.zeros(1000)
    >>> watch = watch_memory(lambda: [("parameter", "weight", weight)])
    >>> [group.name for group in memory_snapshot().alive if group.name]
    ['weight']
    >>> watch.close()
    """
    watch = MemoryWatch(names, folder, tell)
    watches = current().memory_watches
    watches[:] = [*(watch for watch in watches if watch.has_owner), watch]
    if not isinstance(sys.excepthook, FailureHook):
        sys.excepthook = FailureHook(sys.excepthook)
    return watch


class FailureHook:
    """A `sys.excepthook` that examines an error before the previous hook shows it."""

    def __init__(self, previous: Callable[..., Any]) -> None:
        self.previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.look_at_failure(error)
        self.previous(kind, error, trace)

    def look_at_failure(self, error: BaseException) -> None:
        """Examine an error without showing it: for those who catch it (`launch/worker_main.py`)."""
        report_if_out_of_memory(error)


def report_if_out_of_memory(error: BaseException) -> None:
    """Report what is alive if an error, or its cause, is an out-of-memory error. Once for each error; never raises."""
    try:
        if getattr(error, _SEEN_ATTRIBUTE, False) or not _is_out_of_memory(error):
            return
        setattr(error, _SEEN_ATTRIBUTE, True)
        _report_snapshot(error)
    except Exception as problem:  # must not hide the error that is being reported
        _logger.warning("memory ran out, and live tensors could not be listed (%s: %s)", type(problem).__name__, problem)


def summarize_alive() -> str:
    """Return what is alive now as a clause for one line (`MemorySnapshot.line`). Never raises."""
    try:
        return memory_snapshot(1).line()
    except Exception as problem:  # memory has run out: it may be too little for this too
        return f"live tensors could not be listed ({type(problem).__name__})"


def _is_out_of_memory(error: BaseException) -> bool:
    link: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if link is None or should_reduce_batch_size(link):
            return link is not None
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def _report_snapshot(error: BaseException) -> None:
    snapshot = memory_snapshot()
    runtime = current_or_none()
    watches = [] if runtime is None else list(runtime.memory_watches)
    rank = f"[RANK {snapshot.rank}] " if runtime is not None and runtime.process.world_size > 1 else ""
    _logger.error("%smemory ran out: %s", rank, snapshot)
    written: Path | None = None
    for watch in watches:
        try:
            folder = watch.folder()
            if folder is not None:
                written = snapshot.write(folder / f"memory-rank{snapshot.rank}.json")
                watch.tell(written, snapshot)
        except Exception as problem:  # a full disk, a store that is gone: what is in the log is still there
            _logger.warning("%sthe snapshot of memory could not be written (%s: %s)", rank, type(problem).__name__, problem)
    where = f"; all of it is in {written}" if written is not None else ""
    if hasattr(error, "add_note"):
        error.add_note(f"When memory ran out, {snapshot.line()}{where}")
    elif where:
        _logger.error("%s%s", rank, where.removeprefix("; "))


def _hold_weakly(function: Any) -> Callable[[], Any]:
    """Return a callable that returns the function, or the method while its object is alive."""
    return weakref.WeakMethod(function) if inspect.ismethod(function) else lambda: function
