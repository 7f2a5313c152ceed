"""Replicas that drift apart: the weights of all processes are compared now and then, bit for bit, without a collective.

At a moment that all processes come to (a number of updates, `save_state`, the end of training) each of them adds up the bits of each
parameter as whole numbers (one pass over the weights; exact, and the same in any order of adding) and leaves the sums in the store, under
the name of the moment. The main process compares them when it next settles its ledger, and names the first parameter that differs and
the ranks. Nobody waits for anybody: a moment to which some processes never come, such as a `save_state` of the main process alone, is
forgotten.

Buffers are left out: those that DDP broadcasts are made equal again by every forward, and between two forwards each process has the
statistics of its own batch. So are parameters that are no plain tensors (sharded ones, and other wrappers): each process holds its own
part of those, and looking at them as a whole may be a collective.

Nothing is compared while gradients are not averaged (`no_sync`, LocalSGD), nor after `join_uneven_inputs`, where the processes make
different numbers of updates.
"""

from __future__ import annotations

import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.step.guards.finding import Finding
from slipstream.step.guards.rank_reports import RankReports

__all__ = ["Drift", "Moment", "fingerprint", "next_look", "replicated"]

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def next_look(updates: int, looks: int, every: int) -> int:
    """Return with how many updates weights are compared next, after `looks` comparisons: in 1, 2, 4, 8, ..., then at multiples of `every`.

    >>> next_look(1, 1, 1000), next_look(2, 2, 1000), next_look(4, 3, 1000), next_look(5016, 5, 1000), next_look(8000, 50, 1000)
    (2, 4, 8, 5032, 9000)
    """
    return min(updates + (1 << min(looks - 1, 40)), (updates // every + 1) * every)


@dataclass(frozen=True)
class Moment:
    """When weights are compared.

    >>> Moment("update 8", "after update 8", 8).key
    'update 8'
    """

    key: str
    """The same on every process that comes to it, and of no other moment."""
    words: str
    """How it is told."""
    updates: int


class Drift:
    """The comparisons of some models.

    >>> from torch.distributed import HashStore
    >>> store, model = HashStore(), torch.nn.Linear(2, 1)
    >>> ranks = [Drift(lambda: store, rank, 2, "0") for rank in range(2)]
    >>> named, moment = list(model.named_parameters()), Moment("update 1", "after update 1", 1)
    >>> ranks[0].look(moment, named)
    >>> with torch.no_grad():
    ...     _ = model.bias.add_(1.0)
    >>> ranks[1].look(moment, named)
    >>> print(ranks[0].compare().text)
    the replicas have different weights after update 1: bias of rank 1 is not that of rank 0 (1 of 2 parameters differ)
    """

    def __init__(self, store: Callable[[], Any], rank: int, world_size: int, key: str) -> None:
        self._reports = RankReports(store, rank, world_size, f"drift/{key}", "weights are compared")

    def look(self, moment: Moment, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Reports the sums of these parameters."""
        if self._reports.wants(moment.key):
            sums = fingerprint([parameter for _, parameter in named])
            self._reports.add(moment.key, sums, (moment, [name for name, _ in named]))

    def compare(self) -> Finding | None:
        """On the main process: the first moment to which every rank has come and whose sums differ, if there is one."""
        found = [
            _difference(moment, parts, names)
            for (moment, names), parts in self._reports.take()
            if len(set(parts)) > 1 and len(set(map(len, parts))) == 1
        ]
        return found[0] if found else None


def _difference(moment: Moment, parts: Sequence[bytes], names: Sequence[str]) -> Finding:
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
        "prepare, gradients changed after backward, other arguments of the optimizer), and go on from a checkpoint that every rank loads"
    )
    return Finding("drift", moment.updates, ranks[0], text, remedy, {"parameter": names[place], "ranks": ranks})
