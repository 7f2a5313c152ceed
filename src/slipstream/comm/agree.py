"""Whether values that should be the same on every rank are: weights of replicas, random states.

Each rank sends a digest of every value by name; ranks that differ are named with the values in which they do. It costs a pass
over the data, so it runs where the user asks for it, and at barriers in debug mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from operator import itemgetter
from typing import Any

import torch

from slipstream.comm import codec, tree
from slipstream.comm.channel import Channel, Limits
from slipstream.comm.gather import gather_objects
from slipstream.comm.guarded import refuse
from slipstream.errors import MismatchError

__all__ = ["check_agreement"]

_SHOWN = 5


def check_agreement(channel: Channel, limits: Limits, what: str, values: Mapping[str, Any]) -> None:
    """Raises MismatchError on every rank if a value of that name is not the same on all of them.

    >>> from slipstream.comm.channel import Solo
    >>> check_agreement(Solo(), Limits(), "weights", {"w": torch.ones(2)})
    """
    operation = f"check of {what}"
    try:
        own = {name: _digest(value) for name, value in values.items()}
    except Exception as error:  # whatever a foreign class raises when it is pickled: the others must hear of it
        raise refuse(channel, limits, operation, error) from None
    digests = gather_objects(channel, limits, own, operation=operation)
    assert digests is not None
    names = sorted({name for digest in digests for name in digest})
    different = {name: [digest.get(name) for digest in digests] for name in names if len({digest.get(name) for digest in digests}) > 1}
    if not different:
        return
    lines = [f"  {name}: {_grouping(found)}" for name, found in list(different.items())[:_SHOWN]]
    more = f"\n  and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    raise MismatchError(
        f"{what} should be the same on all processes, but {len(different)} of {len(names)} are not:\n"
        + "\n".join(lines)
        + more
        + f"\n(raised on rank {channel.rank})"
    )


def _digest(value: Any) -> str:
    return blake2b(codec.encode(_canonical(value)), digest_size=12).hexdigest()


def _canonical(value: Any) -> Any:
    """The same for equal values, in whatever order their dicts and sets were filled."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    kind = type(value).__qualname__
    if isinstance(value, (set, frozenset)):
        return kind, sorted(codec.encode(_canonical(item)) for item in value)
    if isinstance(value, Mapping):
        pairs = [(codec.encode(_canonical(key)), _canonical(item)) for key, item in value.items()]
        return kind, sorted(pairs, key=itemgetter(0))
    if isinstance(value, (list, tuple)):
        return kind, [_canonical(item) for item in value]
    if tree.is_node(value):
        return kind, [(name, _canonical(item)) for name, item in tree.children(value)]
    return value


def _grouping(found: list[str | None]) -> str:
    groups: dict[str | None, list[int]] = {}
    for rank, digest in enumerate(found):
        groups.setdefault(digest, []).append(rank)
    return " | ".join(f"rank {', '.join(map(str, ranks))}{' (has none)' if digest is None else ''}" for digest, ranks in groups.items())
