"""`gather_for_metrics`: assign gathered rows to samples, so that results are in dataset order and without repeated samples.

Inside a loop, rows belong to the batch that the loader returned last. After a loop that was read to its end they belong to the whole
pass, if nothing was gathered inside it, no other loader has begun and no update was made since. The number of rows per rank decides; it is
compared with the plan of the pass, so nothing is counted while batches are read. If every rank passes as many rows for a short batch as
for a full one (`loss.repeat(batch_size)`), one row per real sample is kept. A list with one entry per sample is gathered as a list if the
ranks agree, in one small guarded call, that its lengths fit the samples; a tuple is always structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from slipstream.data.loader import PreparedLoader
from slipstream.distributed import pytree
from slipstream.distributed.call_site import call_site
from slipstream.distributed.codec import Entries, is_entries, is_tensor_leaf
from slipstream.distributed.collectives import ResultOrder
from slipstream.distributed.gradient_state import BatchShares, GradientState, LoaderPass
from slipstream.distributed.guard import Channel, Limits
from slipstream.distributed.scatter import agree_or_raise
from slipstream.distributed.state import AcceleratorState
from slipstream.logging import get_logger

__all__ = ["find_result_order", "gather_for_metrics", "make_batch_order", "make_pass_order"]


def gather_for_metrics(process_state: AcceleratorState, state: GradientState, data: Any, use_gather_object: bool) -> Any:
    """Gather results of all ranks in dataset order, without those of samples that only padded a batch."""
    order = find_result_order(state)
    if not use_gather_object and _has_lists(data) and (handed := _count_handed_samples(state)):
        data = _mark_sample_lists(data, handed, state.metrics.sample_lists, process_state.channel(), process_state.limits)
    return process_state.gather_for_metrics(data, use_gather_object, order)


_ShareRun = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A number of consecutive batches that were shared in the same way, the samples that each rank received of one, and those kept."""


def find_result_order(state: GradientState) -> ResultOrder | None:
    """Return the order for results that are gathered now; None if no loader determines it.

    Mark the current passes as gathered.
    """
    loader = state.pacing() if state.active is not None else None
    batch = make_batch_order(loader)
    whole = make_pass_order(state.metrics.finished)
    if batch is not None and whole is None and batch.is_plain and state.metrics.has_split(state.active):
        return None  # results of inputs that were split inside this batch
    loader_pass = _current_pass(loader)
    if whole is None or state.metrics.finished.last_pass.gathered:
        for present in (loader_pass, _current_pass(state.active)):  # two if loaders are read side by side
            if present is not None:
                present.gathered = True
    return None if batch is None and whole is None else _CurrentResultOrder(state, whole, batch, loader_pass)


def _current_pass(loader: Any) -> LoaderPass | None:
    return loader._epochs.live[-1] if isinstance(loader, PreparedLoader) and loader._epochs.live else None


def _count_handed_samples(state: GradientState) -> list[list[int]]:
    """Return how many samples each rank received, in the last finished pass and in the current batch, if results can belong to them."""
    whole, loader = state.metrics.finished, state.pacing() if state.active is not None else None
    loader_pass = whole.last_pass if isinstance(whole, PreparedLoader) else None
    counts = []
    if loader_pass is not None and loader_pass.recording and loader_pass.handed and not loader_pass.gathered:
        counts.append(_sum_columns((count, given) for count, given, _ in _share_runs(loader_pass, whole._given)))
    if isinstance(loader, PreparedLoader):
        counts.append(list(loader._given if loader.shares is None else loader.shares.given))
    return counts


def make_batch_order(loader: Any) -> _ResultOrder | None:
    """Return the order for results of the current batch; None without a prepared loader."""
    if not isinstance(loader, PreparedLoader):
        return None
    full, shares = loader._given, loader.shares
    if shares is None:
        return _ResultOrder([(1, full, full)])
    constant, present = None, _current_pass(loader)
    ahead = present is not None and any(earlier is not present.batch and earlier.anchor() is not None for earlier in present.unread)
    # If an earlier batch is still alive, the loader was read ahead, and rows of a full batch may belong to that batch.
    if not ahead and shares.given != full and all(real <= most for real, most in zip(shares.real, full, strict=True)):
        constant = _ResultOrder([(1, full, shares.real)])
    return _ResultOrder([(1, shares.given, shares.real)], alternative=constant)


def make_pass_order(loader: Any) -> _ResultOrder | None:
    """Return the order for results of the whole last pass; None if rank order is dataset order."""
    loader_pass = loader.last_pass if isinstance(loader, PreparedLoader) else None
    if loader_pass is None or not loader_pass.handed or loader.data_rank.world_size == 1:
        return None
    if not loader_pass.recording:
        get_logger(__name__).warning("too many batches of different sizes: results of this whole pass stay in the order of the ranks")
        return None
    runs = list(_share_runs(loader_pass, loader._given))
    by_item = None
    if loader.original.batch_sampler is None and loader.original.batch_size is None:
        items = [(count, (1,) * len(given), tuple(int(samples > 0) for samples in real)) for count, given, real in runs]
        by_item = _ResultOrder(items, most_rows=1)
    return _ResultOrder(runs, most_rows=1, alternative=by_item)


def _share_runs(loader_pass: LoaderPass, full: tuple[int, ...]) -> Iterator[_ShareRun]:
    changes: list[tuple[int, BatchShares | None]] = [(0, None), *loader_pass.record]
    ends = [*(begin for begin, _ in changes[1:]), loader_pass.handed]
    for (begin, shares), end in zip(changes, ends, strict=True):
        if end > begin:
            yield end - begin, full if shares is None else shares.given, full if shares is None else shares.real


class _ResultOrder:
    """Result order for a sequence of runs of identically shared batches."""

    def __init__(self, runs: list[_ShareRun], *, most_rows: int | None = None, alternative: _ResultOrder | None = None) -> None:
        """Accept up to `most_rows` rows per sample; rows that do not fit are tried with the `alternative`."""
        self.runs = runs
        self.most_rows = most_rows
        self.alternative = alternative
        self.batches = sum(count for count, _, _ in runs)
        self.received = _sum_columns((count, given) for count, given, _ in runs)
        self.kept = _sum_columns((count, real) for count, _, real in runs)
        """How many of the samples that each rank received are kept; the others are padding."""
        pairs = zip(self.received, self.kept, strict=True)
        self.keeps_whole_ranks = all(kept in (0, received) for received, kept in pairs) and not all(self.kept)
        """Whether all samples of a rank are kept or none: then the rows of a rank without are dropped, whatever their number."""

    @property
    def total(self) -> int:
        return sum(self.kept)

    @property
    def padding(self) -> int:
        return sum(self.received) - self.total

    @property
    def is_plain(self) -> bool:
        """Whether all rows are kept and already in order."""
        return self.batches == 1 and self.received == self.kept and self.alternative is None

    @property
    def ranks(self) -> list[int] | None:
        """The ranks whose single values are kept; None for all."""
        ranks = [rank for rank, kept in enumerate(self.kept) if kept]
        return ranks if ranks and len(ranks) < len(self.kept) else None

    def order(self, counts: Sequence[int], full_batch_rows: Sequence[int] | None = None) -> list[int] | None:
        """Return the positions of the rows to keep, sample by sample; None if the counts do not fit the samples.

        `counts` are the rows of each rank, which may be k per sample. `full_batch_rows` are the counts for a full batch, if known.
        """
        if self.uses_alternative(counts, full_batch_rows):
            assert self.alternative is not None
            return self.alternative.order(counts)
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        rows = self.rows_per_sample(counts)
        if rows is None:
            if not self.keeps_whole_ranks or self.most_rows is not None or len(counts) != len(self.received):
                return None
            return [at for rank, start in enumerate(starts) if self.kept[rank] for at in range(start, start + counts[rank])]
        order: list[int] = []
        for count, given, real in self.runs:
            for _ in range(count):
                for rank, kept in enumerate(real):
                    order.extend(range(starts[rank], starts[rank] + kept * rows))
                    starts[rank] += given[rank] * rows
        return order

    def uses_alternative(self, counts: Sequence[int], full_batch_rows: Sequence[int] | None = None) -> bool:
        """Return whether the alternative applies: only it fits, or both fit and a full batch had the same counts."""
        if self.alternative is None or self.alternative.rows_per_sample(counts) is None:
            return False
        return self.rows_per_sample(counts) is None if full_batch_rows is None else list(full_batch_rows) == list(counts)

    def rows_per_sample(self, counts: Sequence[int]) -> int | None:
        """Return how many rows per received sample the ranks have, if that is the same number for all."""
        given = self.received
        if len(counts) != len(given) or not sum(given) or (set(counts) == {1} and set(given) != {1}):
            return None
        rows = sum(counts) // sum(given)
        fits = 1 <= rows <= (self.most_rows or rows) and list(counts) == [rows * samples for samples in given]
        return rows if fits else None


def _sum_columns(runs: Iterable[tuple[int, tuple[int, ...]]]) -> list[int]:
    return [sum(column) for column in zip(*([count * size for size in sizes] for count, sizes in runs), strict=True)]


class _CurrentResultOrder:
    """Chooses, per leaf, between the order of the last finished pass and that of the current batch, by row counts."""

    leaf_by_leaf = True
    """A result may hold both rows of samples and values of the whole batch."""

    def __init__(
        self, state: GradientState, whole: _ResultOrder | None, batch: _ResultOrder | None, loader_pass: LoaderPass | None
    ) -> None:
        """`loader_pass` is the pass of the current batch."""
        self.state, self.whole, self.batch, self.loader_pass = state, whole, batch, loader_pass
        finished: Any = state.metrics.finished
        self.finished = finished
        self.was_gathered = whole is not None and finished.last_pass.gathered
        """Whether results of the last finished pass were gathered inside its loop."""
        self.site = call_site()
        self.leaf = 0

    @property
    def total(self) -> int:
        return 0 if self.whole is None else self.whole.total

    @property
    def batch_total(self) -> int:
        return 0 if self.batch is None else self.batch.total

    @property
    def ranks(self) -> list[int] | None:
        return None if self.batch is None else self.batch.ranks

    def order(self, counts: Sequence[int]) -> list[int] | None:
        self.leaf += 1
        of_pass = None if self.whole is None else self._of_pass(counts)
        if of_pass is not None:
            return of_pass
        if self.loader_pass is not None:
            self.loader_pass.gathered = True
        batch = self.batch
        if batch is None:
            return None
        if batch.is_plain:
            self._record_rows(counts)
            return None
        full_batch_rows = None if self.loader_pass is None else self.loader_pass.rows.get((self.site, self.leaf))
        order = batch.order(counts, full_batch_rows)
        if order is None:
            self._warn_of_unmatched(counts, batch)
        elif batch.uses_alternative(counts, full_batch_rows):
            message = _CONSTANT.format(received=batch.received, counts=list(counts), kept=batch.kept)
            self._log_once("constant", lambda: message, quietly=True)
        return None if order == list(range(sum(counts))) else order

    def _of_pass(self, counts: Sequence[int]) -> list[int] | None:
        whole, batch = self.whole, self.batch
        assert whole is not None
        order = whole.order(counts)
        if order is None:
            if batch is None and whole.padding and set(counts) != {1} and not self.was_gathered and self._is_multiple(whole, counts):
                self._warn_of_unmatched(counts, whole)
            return None
        kept, rows = len(order), sum(counts)
        name = type(self.finished.original.dataset).__name__
        if self.was_gathered:
            if batch is None and order != list(range(rows)):
                self._log_once("past", lambda: _PAST.format(rows=rows, name=name), quietly=True)
            return None
        if batch is not None and whole.batches == 1 and list(counts) == batch.received:
            if order != batch.order(counts):
                self._log_once("either", lambda: _EITHER.format(padding=whole.padding))
            return None
        if order != list(range(rows)):
            self._log_once("whole", lambda: _WHOLE.format(rows=rows, name=name, dropped=rows - kept), quietly=kept == rows)
        return order

    @staticmethod
    def _is_multiple(whole: _ResultOrder, counts: Sequence[int]) -> bool:
        return _ResultOrder(whole.runs).rows_per_sample(counts) is not None

    def _record_rows(self, counts: Sequence[int]) -> None:
        if self.loader_pass is not None and len(self.loader_pass.rows) < _MAX_RECORDED_ROWS:
            self.loader_pass.rows[self.site, self.leaf] = tuple(counts)

    def _warn_of_unmatched(self, counts: Sequence[int], of: _ResultOrder) -> None:
        if of.padding and set(counts) != {1}:
            self._log_once("unmatched", lambda: _UNMATCHED.format(counts=list(counts), received=of.received, padding=of.padding))

    def _log_once(self, what: str, text: Callable[[], str], *, quietly: bool = False) -> None:
        if what not in self.state.metrics.warned:
            self.state.metrics.warned.add(what)
            logger = get_logger(__name__)
            (logger.info if quietly else logger.warning)(text())


_MAX_RECORDED_ROWS = 10_000
"""Limit for remembered (call site, leaf) pairs, for scripts that gather a different structure every time."""

_UNMATCHED = (
    "gather_for_metrics: the ranks passed {counts} rows for {received} samples; rows cannot be assigned to samples, so up to {padding} "
    "repeated samples may be in the result. Pass one row per sample (inside the loop, k rows per sample also work) and select later; or "
    "use DataLoaderConfiguration(even_batches=False), where a process repeats samples only if it has none left, and its rows are dropped; "
    "or drop them yourself with loader.shares. (This warning is shown once.)"
)
_EITHER = (
    "gather_for_metrics: the number of rows fits both the current batch of the outer loader and the whole loader that was read inside it. "
    "They are taken as results of the batch, so {padding} repeated samples of the inner loader may be in the result. Gather its results "
    "inside its loop. (This warning is shown once.)"
)
_WHOLE = (
    "gather_for_metrics after the loop: these {rows} rows are taken as the results of the loader of {name}, which was read to its end, "
    "because every process has as many rows as samples. They are put in dataset order, and {dropped} rows of repeated samples are "
    "dropped. If they are something else, use gather. (This message is shown once.)"
)
_PAST = (
    "gather_for_metrics after the loop: these {rows} rows are gathered as they are. Their number is that of the samples of the loader of "
    "{name}, but results of that pass were already gathered inside its loop. (This message is shown once.)"
)
_CONSTANT = (
    "gather_for_metrics: this batch has {received} samples, and the ranks passed {counts} rows, as for a full batch. The first {kept} rows "
    "are kept, one per sample. (This message is shown once.)"
)


_TreePath = tuple[str, ...]
_SampleLists = dict[_TreePath, tuple[list[int], bool]]
"""For each list that may have one entry per sample: which counts it fits, and whether all its entries look like batches."""


def _mark_sample_lists(data: Any, handed: list[list[int]], known: set[tuple[str, _TreePath]], channel: Channel, limits: Limits) -> Any:
    """Return the data with its per-sample lists as `Entries`; `handed` has the possible sample counts of the ranks.

    `known` holds the lists that earlier calls recognised, by call site.
    """
    found: _SampleLists = {}
    _find_sample_lists(data, (), found, [counts[channel.rank] for counts in handed])
    ranks = [dict(lists) for lists in agree_or_raise(channel, limits, list(found.items()), operation="gather_for_metrics")]
    site = call_site()
    listed: set[_TreePath] = set()
    for path in sorted(found, key=len):
        inside = any(path[: len(outer)] == outer for outer in listed)
        if not inside and all(path in rank for rank in ranks) and _is_per_sample(path, ranks, handed, (site, path) in known):
            listed.add(path)
            known.add((site, path))
    return _mark_entries(data, (), listed) if listed else data


def _has_lists(data: Any) -> bool:
    if not pytree.is_node(data) or is_entries(data):
        return False
    return isinstance(data, list) or any(_has_lists(item) for _, item in pytree.children(data))


def _find_sample_lists(data: Any, path: _TreePath, found: _SampleLists, counts: list[int]) -> None:
    if not pytree.is_node(data) or is_entries(data):
        return
    if isinstance(data, list):
        fitting = [place for place, count in enumerate(counts) if count == len(data)]
        if fitting:
            found[path] = fitting, _looks_like_batches(data)
    for key, item in pytree.children(data):
        _find_sample_lists(item, (*path, repr(key)), found, counts)


def _looks_like_batches(entries: list[Any]) -> bool:
    if all(isinstance(entry, Mapping) and entry.keys() == entries[0].keys() for entry in entries):
        return False
    rows = [leaf.shape[0] for leaf in pytree.flatten(entries) if is_tensor_leaf(leaf) and len(leaf.shape)]
    return all(count == len(entries) for count in rows) if rows else len(entries) == 1


def _is_per_sample(path: _TreePath, ranks: list[_SampleLists], handed: list[list[int]], before: bool) -> bool:
    fitting = [place for place in range(len(handed)) if all(place in rank[path][0] for rank in ranks)]
    certain = before or not all(rank[path][1] for rank in ranks)
    return any(certain or len(set(handed[place])) > 1 for place in fitting)


def _mark_entries(data: Any, path: _TreePath, listed: set[_TreePath]) -> Any:
    """Return the data with these lists as lists of entries."""
    if path in listed:
        return Entries(data)
    if not pytree.is_node(data) or not any(path == place[: len(path)] for place in listed):
        return data
    return pytree.rebuild(data, [_mark_entries(item, (*path, repr(key)), listed) for key, item in pytree.children(data)])
