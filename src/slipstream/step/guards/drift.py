"""Replicas that drift apart: the weights of all processes are compared once in a while, bit for bit, without a collective.

After the first update and then after every so many, each process adds up the bits of each parameter as whole numbers (one pass over
the weights; exact, and the same in any order of adding) and leaves the sums in the store. The main process compares them when it next
settles its ledger, and names the first parameter that differs and the ranks. Nobody waits for anybody.

Buffers are left out: those that DDP broadcasts are made equal again by every forward, and between two forwards each process has the
statistics of its own batch. So are parameters that are no plain tensors (sharded ones, and other wrappers): each process holds its own
part of those, and looking at them as a whole may be a collective.

Updates whose gradients were not averaged (`no_sync`, LocalSGD) are not compared; nor is anything after `join_uneven_inputs`, where the
processes make different numbers of updates.
"""

from __future__ import annotations

import array
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from slipstream.logging import get_logger
from slipstream.step.guards.finding import Finding

__all__ = ["Drift", "fingerprint", "replicated"]

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PENDING = 8
"""How many comparisons may wait for other ranks at the main process."""


def fingerprint(parameters: Sequence[torch.Tensor]) -> bytes:
    """The sum of the bits of each, as eight bytes per parameter. Waits for the device.

    >>> one, other = torch.ones(3), torch.ones(3)
    >>> other[1] += 1e-7
    >>> fingerprint([one]) == fingerprint([torch.ones(3)]), fingerprint([one]) == fingerprint([other])
    (True, False)
    """
    sums = [_sum(one.detach()) for one in parameters]
    if len({one.device for one in sums}) > 1:
        sums = [one.cpu() for one in sums]
    return array.array("q", torch.stack(sums).tolist() if sums else ()).tobytes()


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    size = flat.element_size()
    per = 8 // size
    if flat.storage_offset() % per:
        flat = flat.clone()
    even = flat.numel() // per * per
    total = flat[:even].view(torch.int64).sum()
    return total if even == flat.numel() else total + flat[even:].view(_WHOLE[size]).sum(dtype=torch.int64)


def replicated(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Those that every process holds as a whole: plain tensors with values, not wrappers that answer for a part of one.

    >>> [name for name, _ in replicated([("weight", torch.ones(1)), ("bias", torch.ones(1, device="meta"))])]
    ['weight']
    """
    plain = torch.Tensor.__torch_dispatch__
    return [
        (name, one) for name, one in named if type(one).__torch_dispatch__ is plain and one.layout == torch.strided and not one.is_meta
    ]


class Drift:
    """The comparisons of one optimizer's models.

    >>> from torch.distributed import HashStore
    >>> store, model = HashStore(), torch.nn.Linear(2, 1)
    >>> ranks = [Drift(lambda: store, rank, 2, "0") for rank in range(2)]
    >>> named = list(model.named_parameters())
    >>> ranks[0].look(1, named)
    >>> with torch.no_grad():
    ...     _ = model.bias.add_(1.0)
    >>> ranks[1].look(1, named)
    >>> print(ranks[0].compare().text)
    the replicas have different weights after update 1: bias of rank 1 is not that of rank 0 (1 of 2 parameters differ)
    """

    def __init__(self, store: Callable[[], Any], rank: int, world_size: int, key: str) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._key = key
        self._serial = 0
        self._lost = False
        """Whether the store does not answer any more."""
        self._own: deque[tuple[int, int, list[str], bytes]] = deque()

    def look(self, updates: int, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Leaves the fingerprints of these parameters, which are compared after so many updates; all ranks call it alike."""
        store = None if self._lost else self._store()
        if store is None:
            return
        self._serial += 1
        data = struct.pack("<q", updates) + fingerprint([parameter for _, parameter in named])
        if self._rank:
            self._ask(lambda: self._leave(store, self._name(self._serial, self._rank), data))
            return
        self._own.append((self._serial, updates, [name for name, _ in named], data))
        if len(self._own) > _PENDING:
            dropped = self._own.popleft()[0]
            self._ask(lambda: self._drop(store, dropped))

    def compare(self) -> Finding | None:
        """On the main process: the first comparison for which every rank has left its part and that fails, if any."""
        found: Finding | None = self._ask(self._compare)
        return found

    def _compare(self) -> Finding | None:
        store = self._store() if self._own else None
        while self._own and store is not None:
            serial, updates, names, own = self._own[0]
            keys = [self._name(serial, rank) for rank in range(1, self._world_size)]
            if not store.check(keys):
                return None
            parts = [own, *(bytes(store.get(key)) for key in keys)]
            self._own.popleft()
            self._drop(store, serial)
            if len(set(parts)) > 1 and (finding := _compared(parts, names, updates)):
                return finding
        return None

    def _ask(self, what: Callable[[], Any]) -> Any:
        if self._lost:
            return None
        try:
            return what()
        except RuntimeError as error:  # torch's errors of stores: closed, not reached, too late
            self._lost = True
            told = next(iter(str(error).splitlines()), type(error).__name__)
            get_logger("slipstream.guards").warning(f"weights are not compared between ranks any more: {told}", main_process_only=False)
            return None

    @staticmethod
    def _leave(store: Any, key: str, data: bytes) -> None:
        store.set(key, data)
        store.check([key])  # `set` does not wait for an answer: now it is there

    def _name(self, serial: int, rank: int) -> str:
        return f"guards/drift/{self._key}/{serial}/{rank}"

    def _drop(self, store: Any, serial: int) -> None:
        for rank in range(1, self._world_size):
            store.delete_key(self._name(serial, rank))


def _compared(parts: Sequence[bytes], names: Sequence[str], updates: int) -> Finding | None:
    counts = [struct.unpack_from("<q", part)[0] for part in parts]
    if any(count != updates for count in counts) or len(set(map(len, parts))) > 1:
        return None  # of another moment: nothing can be said
    usual = Counter(parts).most_common(1)[0][0]
    standard = parts.index(usual)
    rows = [array.array("q", part[8:]) for part in parts]
    differing = [
        (place, [rank for rank, row in enumerate(rows) if row[place] != rows[standard][place]])
        for place in range(len(names))
        if any(row[place] != rows[standard][place] for row in rows)
    ]
    place, ranks = differing[0]
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    text = (
        f"the replicas have different weights after update {updates}: {names[place]} of {who} is not that of rank {standard} "
        f"({len(differing)} of {len(names)} parameters differ)"
    )
    remedy = (
        "look for what changes weights or optimizer state on some ranks only (code under is_main_process, initialisation or loading after "
        "prepare, gradients changed after backward, other arguments of the optimizer), and go on from a checkpoint that every rank loads"
    )
    return Finding("drift", updates, ranks[0], text, remedy, {"parameter": names[place], "ranks": ranks})
