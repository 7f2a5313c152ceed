"""`memory_snapshot`: the tensors of this process that are alive, by size, with their names where somebody knows them.

What counts is the memory behind a tensor, once for all the tensors that look at it: views, and parameters that are tied. What torch keeps
for itself without ever having shown it to Python (some of what a backward pass needs) is not seen; the allocators of devices, and the
memory of the process, say how much there is besides. Nothing is kept alive: a snapshot holds numbers and words.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.devices.allocators import allocator_statistics
from slipstream.devices.host import host_memory
from slipstream.devices.memory import convert_bytes
from slipstream.errors import ConfigError
from slipstream.runtime.current import current_or_none
from slipstream.runtime.memory.naming import Named

__all__ = ["AliveTensors", "MemorySnapshot", "memory_snapshot"]

_ROWS: Final = 10
_LONGEST: Final = 60
_OTHERS: Final = "other tensors"


@dataclass(frozen=True)
class AliveTensors:
    """Tensors that are alike: one, if it has a name."""

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
    """What was alive at one moment. As text it is a short table; `write` keeps all of it."""

    rank: int
    host: str
    time: float
    tensors: int
    """How many pieces of memory belong to tensors."""
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
        return f"{convert_bytes(self.total)} in {count} were alive ({_parts(self.by_kind)})"

    def __str__(self) -> str:
        lines = [
            f"{self._summary()}; the process takes {convert_bytes(self.process)} of main memory, {convert_bytes(self.available)} are left"
        ]
        for device, told in self.allocators.items():
            words = ", ".join(
                f"{name.replace('_', ' ')} {convert_bytes(told[name])}" for name in told if name not in ("retries", "failures")
            )
            lines.append(f"{device}: {words}")
        rows = [
            (convert_bytes(entry.bytes), str(entry.count), f"{entry.dtype} {list(entry.shape)} {entry.device}", _said(entry))
            for entry in self.alive[:_ROWS]
        ]
        if not rows:
            return "\n".join(lines)
        titles = ("bytes", "count", "tensor", "what")
        widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(3)]
        lines += [f"{row[0].rjust(widths[0])}  {row[1].rjust(widths[1])}  {row[2].ljust(widths[2])}  {row[3]}" for row in (titles, *rows)]
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes all of it as a JSON file, which is whole or not there."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.writing-{os.getpid()}")
        try:
            beside.write_text(json.dumps(self.plain(), indent=1), encoding="utf-8")
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
        return target


def memory_snapshot(count: int = 50, *, names: Iterable[Named] | None = None) -> MemorySnapshot:
    """What tensors are alive in this process now; `count` is how many entries are listed.

    Parameters, buffers, gradients and states of optimizers that were prepared have their names; `names` gives others, as
    `named_tensors(models, optimizers)` makes them.

    >>> weights = torch.zeros(1000, 1000)
    >>> snapshot = memory_snapshot(names=[("parameter", "weights", weights)])
    >>> [(one.name, one.shape, one.bytes) for one in snapshot.alive if one.name]
    [('weights', (1000, 1000), 4000000)]
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"memory_snapshot(count={count!r}): write how many entries are wanted, from 1")
    runtime = current_or_none()
    watched = [] if runtime is None else [named for watch in runtime.memory_watches for named in watch.named()]
    blocks = _blocks([*(names or ()), *watched])
    rows = sorted(_grouped(blocks), key=lambda one: (-one.bytes, one.name or ""))
    return MemorySnapshot(
        rank=0 if runtime is None else runtime.process.rank,
        host=socket.gethostname(),
        time=time.time(),
        tensors=len(blocks),
        total=sum(block.bytes for block in blocks),
        by_device=_summed((block.device, block.bytes) for block in blocks),
        by_kind=_summed((block.kind, block.bytes) for block in blocks),
        alive=tuple(rows[:count]),
        more=sum(one.count for one in rows[count:]),
        process=int(psutil.Process().memory_info().rss),
        available=host_memory().available,
        allocators=allocator_statistics(),
    )


@dataclass
class _Block:
    """A piece of memory that tensors look at."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    kind: str = _OTHERS
    names: list[str] = field(default_factory=list)

    @property
    def name(self) -> str | None:
        return f"{self.names[0]} and {len(self.names) - 1} others" if len(self.names) > 1 else next(iter(self.names), None)


def _blocks(named: Iterable[Named]) -> list[_Block]:
    """Every piece of memory once; named tensors first, as what they are called counts."""
    found: dict[tuple[str, int], _Block] = {}
    for kind, name, whole in named:
        for tensor in _plain(whole):
            block = _add(found, tensor)
            if block is not None and name not in block.names:
                block.kind = kind if not block.names else block.kind
                block.names.append(name)
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and not is_traceable_wrapper_subclass(one):
            _add(found, one)
    return list(found.values())


def _plain(tensor: Any) -> Iterator[torch.Tensor]:
    """A tensor that is made of others (sharded, quantised), as those."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    inner, _ = tensor.__tensor_flatten__()
    for name in inner:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield from _plain(part)


def _add(found: dict[tuple[str, int], _Block], tensor: torch.Tensor) -> _Block | None:
    """The memory behind a tensor; None for one that has none, or is of a kind that does not say."""
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta" or not storage.nbytes():  # of fakes too
            return None
        size, place = storage.nbytes(), (str(storage.device), storage.data_ptr())
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    block = found.get(place)
    if block is None:
        block = found[place] = _Block(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), place[0], size)
    return block


def _grouped(blocks: Iterable[_Block]) -> list[AliveTensors]:
    """Those with a name one by one, the others by what they look like."""
    groups: dict[Any, list[_Block]] = {}
    for block in blocks:
        groups.setdefault((block.name, block.kind, block.shape, block.dtype, block.device, block.bytes), []).append(block)
    return [
        AliveTensors(name, kind, shape, dtype, device, len(alike), size * len(alike))
        for (name, kind, shape, dtype, device, size), alike in groups.items()
    ]


def _summed(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for key, size in pairs:
        sums[key] = sums.get(key, 0) + size
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


def _parts(by_kind: dict[str, int]) -> str:
    return ", ".join(f"{_plural(kind)} {convert_bytes(size)}" for kind, size in by_kind.items())


def _plural(kind: str) -> str:
    return kind if kind.endswith("s") else f"{kind}s"


def _said(one: AliveTensors) -> str:
    said = f"{one.kind} {one.name}" if one.name else one.kind
    return said if len(said) <= _LONGEST else said[: _LONGEST - 3] + "..."
