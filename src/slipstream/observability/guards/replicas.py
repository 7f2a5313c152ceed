"""Comparisons between ranks, to find replicas whose weights drift apart and ranks that train on the same batches.

At points that all ranks reach (an update count, `save_state`, the end of training) each rank sums the bits of every parameter exactly and
reports the sums through `RankReports`; the main process names the first parameter and the ranks that differ. Buffers and sharded
parameters are left out. Nothing is compared while gradients are not averaged (`no_sync`, LocalSGD) or after `join_uneven_inputs`.

Where a model trains without a prepared loader, the inputs of its first calls are hashed and compared in the same way; after a few calls
the hook removes itself. No comparison is a collective, and no rank waits.
"""

from __future__ import annotations

import array
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.devices.late_read import LateValues
from slipstream.observability.guards.findings import GuardFinding, RankReports

__all__ = [
    "ComparisonPoint", "DriftGuard", "FirstBatchHashes", "find_shared_batches", "hash_inputs", "next_comparison", "select_replicated",
    "sum_bits",
]


_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_bits(parameters: Sequence[torch.Tensor]) -> LateValues:
    """Return the sum of the bits of each, as values that their device computes. Waits for devices only if there are several.

    >>> one, other = torch.ones(3), torch.ones(3)
    >>> other[1] += 1e-7
    >>> sum_bits([one]).tolist() == sum_bits([torch.ones(3)]).tolist(), sum_bits([one]).tolist() == sum_bits([other]).tolist()
    (True, False)
    >>> sum_bits([torch.arange(8.0).view(4, 2)[:, 1]]).tolist() == sum_bits([torch.tensor([1.0, 3.0, 5.0, 7.0])]).tolist()
    True
    """
    sums = [_sum_tensor_bits(parameter.detach()) for parameter in parameters]
    if len({total.device for total in sums}) > 1:
        sums = [total.cpu() for total in sums]
    return LateValues(torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64))


def _sum_tensor_bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    size = flat.element_size()
    per = 8 // size
    if flat.storage_offset() % per or not flat.is_contiguous():  # of a view with gaps, or of one value that is repeated
        flat = flat.clone(memory_format=torch.contiguous_format)
    even = flat.numel() // per * per
    total = flat[:even].view(torch.int64).sum()
    return total if even == flat.numel() else total + flat[even:].view(_INTEGER_DTYPES[size]).sum(dtype=torch.int64)


def select_replicated(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return those that every process holds as a whole: plain tensors with values, not wrappers that answer for a part of one.

    >>> [name for name, _ in select_replicated([("weight", torch.ones(1)), ("bias", torch.ones(1, device="meta"))])]
    ['weight']
    """
    plain = torch.Tensor.__torch_dispatch__
    return [
        (name, tensor)
        for name, tensor in named
        if type(tensor).__torch_dispatch__ is plain and tensor.layout == torch.strided and not tensor.is_meta
    ]


def next_comparison(updates: int, looks: int, every: int) -> int:
    """Return with how many updates weights are compared next, after `looks` comparisons: in 1, 2, 4, 8, ..., then at multiples of `every`.

    >>> [next_comparison(updates, looks, 1000) for updates, looks in ((1, 1), (2, 2), (4, 3), (5016, 5), (8000, 50))]
    [2, 4, 8, 5032, 9000]
    """
    return min(updates + (1 << min(looks - 1, 40)), (updates // every + 1) * every)


@dataclass(frozen=True)
class ComparisonPoint:
    """A point of training at which weights are compared.

    >>> ComparisonPoint("update 8", "after update 8", 8).key
    'update 8'
    """

    key: str
    """Equal on all processes for this point, and unique to it."""
    words: str
    """The point in words."""
    updates: int


class DriftGuard:
    """The comparisons of some models.

    >>> from torch.distributed import HashStore
    >>> store, model = HashStore(), torch.nn.Linear(2, 1)
    >>> ranks = [DriftGuard(lambda: store, rank, 2, "0") for rank in range(2)]
    >>> named, moment = list(model.named_parameters()), ComparisonPoint("update 1", "after update 1", 1)
    >>> ranks[0].look(moment, named)
    >>> with torch.no_grad():
    ...     _ = model.bias.add_(1.0)
    >>> ranks[1].look(moment, named)
    >>> print(ranks[0].compare().text)
    the replicas have different weights after update 1: bias of rank 1 is not that of rank 0 (1 of 2 parameters differ)
    """

    def __init__(self, store: Callable[[], Any], rank: int, world_size: int, key: str) -> None:
        self._reports = RankReports(store, rank, world_size, f"drift/{key}", "weights are compared")
        self._coming: deque[tuple[ComparisonPoint, list[str], LateValues]] = deque()
        """Sums that the device may not have computed yet."""

    def look(self, moment: ComparisonPoint, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Compute the sums of these parameters where they are; `publish` reports those of a device later, so nobody waits for it."""
        if self._reports.wants(moment.key) and all(moment.key != earlier.key for earlier, *_ in self._coming):
            sums = sum_bits([parameter for _, parameter in named])
            self._coming.append((moment, [name for name, _ in named], sums))
            if sums.at_once:
                self.publish()

    def publish(self, *, wait: bool = False) -> None:
        """Report the sums that are there; with `wait`, all of them."""
        while self._coming and (wait or self._coming[0][2].passed):
            moment, names, sums = self._coming.popleft()
            self._reports.add(moment.key, array.array("q", sums.tolist()).tobytes(), (moment, names))

    def compare(self) -> GuardFinding | None:
        """Return, on the main process, the first point that every rank has reached and whose sums differ, if there is one."""
        found = [
            _describe_difference(moment, parts, names)
            for (moment, names), parts in self._reports.take()
            if len(set(parts)) > 1 and len(set(map(len, parts))) == 1
        ]
        return found[0] if found else None


def _describe_difference(moment: ComparisonPoint, parts: Sequence[bytes], names: Sequence[str]) -> GuardFinding:
    usual = Counter(parts).most_common(1)[0][0]
    standard = parts.index(usual)
    rows = [array.array("q", part) for part in parts]
    differing = [
        (place, [rank for rank, row in enumerate(rows) if row[place] != rows[standard][place]])
        for place in range(len(names))
        if any(row[place] != rows[standard][place] for row in rows)
    ]
    place, ranks = differing[0]
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    text = (
        f"the replicas have different weights {moment.words}: {names[place]} of {who} is not that of rank {standard} "
        f"({len(differing)} of {len(names)} parameters differ)"
    )
    remedy = (
        "look for what changes weights or optimizer state on some ranks only (code under is_main_process, initialisation or loading after "
        "prepare, gradients changed after backward, other optimizer arguments), and resume from a checkpoint that every rank loads"
    )
    return GuardFinding("drift", moment.updates, ranks[0], text, remedy, {"parameter": names[place], "ranks": ranks})


_HASHED_CALLS = 3
_MAX_HASHED_VALUES = 16384
"""Values of a tensor that are hashed at most, evenly over all of them."""
_MIN_VALUES = 32
"""Values that the calls need together: fewer may be the same by chance."""


class FirstBatchHashes:
    """Hashes the inputs of the first calls of prepared models, and reports the hashes when there are enough."""

    def __init__(self, reads_loader: Callable[[], bool], report: Callable[[bytes], None]) -> None:
        self._reads_loader = reads_loader
        """Whether a prepared loader is being read: then there is nothing to find."""
        self._report = report
        self._handles: list[Any] = []
        self._hashes: list[bytes] = []
        self._values = 0
        self._is_over = False

    def watch(self, model: torch.nn.Module) -> None:
        """Hash the calls of a model too."""
        if not self._is_over:
            self._handles.append(model.register_forward_pre_hook(_InputHook(self), with_kwargs=True))

    def look(self, module: torch.nn.Module, inputs: Any) -> None:
        """Hash the inputs of a call."""
        if self._is_over or not module.training or not torch.is_grad_enabled():
            return
        if self._reads_loader():
            self._end()
            return
        hashed, values = hash_inputs(inputs)
        self._hashes.append(hashed)
        self._values += values
        if len(self._hashes) == _HASHED_CALLS:
            self._end()
            if len(set(self._hashes)) == _HASHED_CALLS and self._values >= _MIN_VALUES:
                self._report(b"".join(self._hashes))

    def _end(self) -> None:
        self._is_over = True
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _InputHook:
    """The hook that a model holds; a copy or pickle of the model gets one that does nothing."""

    def __init__(self, batches: FirstBatchHashes) -> None:
        self._batches = batches

    def __call__(self, module: torch.nn.Module, inputs: Any, keywords: Any) -> None:
        if not torch.compiler.is_compiling():
            self._batches.look(module, (inputs, keywords))

    def __reduce__(self) -> Any:
        return _idle_hook, ()


def _idle_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(module: torch.nn.Module, inputs: Any, keywords: Any) -> None:
    return None


def hash_inputs(inputs: Any) -> tuple[bytes, int]:
    """Return a hash of the tensors in some inputs, and how many values they have; waits for their device.

    >>> hash_inputs(torch.ones(2, 3)) == hash_inputs([torch.ones(2, 3)]), hash_inputs(torch.ones(6)) == hash_inputs(torch.ones(2, 3))
    (True, False)
    """
    found, values = hashlib.blake2b(digest_size=16), 0
    for _, tensor in select_replicated(("", tensor) for tensor in _iterate_tensors(inputs)):
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _MAX_HASHED_VALUES)].contiguous().cpu()
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(sample.view(torch.uint8).numpy().tobytes())
        values += tensor.numel()
    return found.digest(), values


def _iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _iterate_tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _iterate_tensors(part)


def find_shared_batches(reports: list[bytes]) -> GuardFinding | None:
    """Return a finding if the reports of all ranks show that some got the same batches.

    >>> print(find_shared_batches([b"abc", b"xyz", b"abc"]).text)
    ranks 0 and 2 train on the same batches, so they do the same work: the first 3 batches are equal
    >>> find_shared_batches([b"abc", b"xyz"])
    """
    groups: dict[bytes, list[int]] = {}
    for rank, report in enumerate(reports):
        groups.setdefault(report, []).append(rank)
    ranks = max(groups.values(), key=len)
    if len(ranks) < 2:
        return None
    who = f"all {len(ranks)} processes" if len(groups) == 1 else f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    text = f"{who} train on the same batches, so they do the same work: the first {_HASHED_CALLS} batches are equal"
    remedy = (
        "prepare the loader (loader = accelerator.prepare(loader)), so that each process gets its share; in a loop without a loader "
        "take different samples on each process, by accelerator.process_index"
    )
    return GuardFinding("batches", None, None, text, remedy, {"ranks": ranks})
