"""Lists with one entry per sample that hold tensors alone (detections, masks, crops of different sizes), for `gather_for_metrics`.

Elsewhere a list of tensors is structure: its entries are gathered one by one, each along its first dimension. In
`gather_for_metrics` such a list is a list of samples if on every rank it has exactly as many entries as the rank was handed samples,
unless all it holds looks like batches (`[predictions, references]` of a batch of two): then every tensor in it has as many rows as there
are samples. Entries that are dicts with the same keys are always those of samples. What a line of the script gathered as samples once
is gathered so again. Tuples are structure always.

The ranks decide together, in one small guarded call that is made only where a list with tensors is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.comm import tree
from slipstream.comm.channel import Channel, Limits
from slipstream.comm.deal import tell
from slipstream.comm.leaves import Entries, is_entries, is_tensor_leaf
from slipstream.comm.sites import call_site
from slipstream.runtime.gradient_state import GradientState

__all__ = ["gather_listed"]

_Path = tuple[str, ...]
_Found = dict[_Path, tuple[list[int], bool]]
"""For each list that may be of samples: whose counts it fits, and whether all it holds looks like batches."""


def gather_listed(
    state: GradientState,
    handed: list[list[int]],
    channel: Callable[[], Channel],
    limits: Limits,
    data: Any,
    gather: Callable[[Any], Any],
) -> Any:
    """What `gather` makes of the data, with lists of samples joined as lists; `handed`: what the ranks were given, as it may be meant."""
    if not handed or not _has_lists(data):
        return gather(data)
    link = channel()
    found: _Found = {}
    _walk(data, (), found, [counts[link.rank] for counts in handed])
    told = [dict(one) for one in tell(link, limits, list(found.items()), operation="gather_for_metrics")]
    site = call_site()
    listed: set[_Path] = set()
    for path in sorted(found, key=len):
        inside = any(path[: len(outer)] == outer for outer in listed)
        if not inside and all(path in one for one in told) and _of_samples(path, told, handed, (site, path) in state.listed):
            listed.add(path)
            state.listed.add((site, path))
    return gather(_marked(data, (), listed) if listed else data)


def _has_lists(data: Any) -> bool:
    if not tree.is_node(data) or is_entries(data):
        return False
    return isinstance(data, list) or any(_has_lists(item) for _, item in tree.children(data))


def _walk(data: Any, path: _Path, found: _Found, counts: list[int]) -> None:
    if not tree.is_node(data) or is_entries(data):
        return
    if isinstance(data, list):
        fitting = [place for place, count in enumerate(counts) if count == len(data)]
        if fitting:
            found[path] = fitting, _looks_like_batches(data)
    for key, item in tree.children(data):
        _walk(item, (*path, repr(key)), found, counts)


def _looks_like_batches(entries: list[Any]) -> bool:
    if all(isinstance(entry, Mapping) and entry.keys() == entries[0].keys() for entry in entries):
        return False
    rows = [leaf.shape[0] for leaf in tree.flatten(entries) if is_tensor_leaf(leaf) and len(leaf.shape)]
    return all(count == len(entries) for count in rows) if rows else len(entries) == 1


def _of_samples(path: _Path, told: list[_Found], handed: list[list[int]], before: bool) -> bool:
    fitting = [place for place in range(len(handed)) if all(place in one[path][0] for one in told)]
    certain = before or not all(one[path][1] for one in told)
    return any(certain or len(set(handed[place])) > 1 for place in fitting)


def _marked(data: Any, path: _Path, listed: set[_Path]) -> Any:
    """The data with these lists as lists of entries."""
    if path in listed:
        return Entries(data)
    if not tree.is_node(data) or not any(path == place[: len(path)] for place in listed):
        return data
    return tree.rebuild(data, [_marked(item, (*path, repr(key)), listed) for key, item in tree.children(data)])
