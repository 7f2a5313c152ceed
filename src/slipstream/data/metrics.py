"""`gather_for_metrics`: which gathered rows belong to which sample.

Results come in dataset order, without repeated samples.

Inside a loop, rows are those of the batch that the loader handed out last. After a loop that was read to its end they are those of the
whole pass, if nothing was gathered inside it and no loader began and no update was made since. The number of rows per rank decides, and
follows from the plan of the pass: nothing is counted while batches are read. A short batch for which every rank brings as many rows as
for a full one (`loss.repeat(batch_size)`) keeps one row per sample that counts. A list with one entry per sample is gathered as a list if
the ranks agree, in one small guarded call, that its lengths fit the samples; a tuple is always structure.
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
    """Gather results of all ranks in dataset order, without those of samples that only filled up a batch."""
    order = find_result_order(state)
    if not use_gather_object and _has_lists(data) and (handed := _count_handed_samples(state)):
        data = _mark_sample_lists(data, handed, state.metrics.sample_lists, process_state.channel(), process_state.limits)
    return process_state.gather_for_metrics(data, use_gather_object, order)


_ShareRun = tuple[int, tuple[int, ...], tuple[int, ...]]
"""How many batches in a row were dealt out alike, what each rank was given of one, and how much of that counts."""


def find_result_order(state: GradientState) -> ResultOrder | None:
    """Return how results that are gathered now are put in order; None where no loader decides it.

    Notes on the passes under way that results of theirs were gathered.
    """
    loader = state.pacing() if state.active is not None else None
    batch = make_batch_order(loader)
    whole = make_pass_order(state.metrics.finished)
    if batch is not None and whole is None and batch.is_plain and state.metrics.has_split(state.active):
        return None  # inputs that were split inside of this batch
    loader_pass = _current_pass(loader)
    if whole is None or state.metrics.finished.last_pass.gathered:
        for present in (loader_pass, _current_pass(state.active)):  # two, where loaders are read side by side
            if present is not None:
                present.gathered = True
    return None if batch is None and whole is None else _CurrentResultOrder(state, whole, batch, loader_pass)


def _current_pass(loader: Any) -> LoaderPass | None:
    return loader._epochs.live[-1] if isinstance(loader, PreparedLoader) and loader._epochs.live else None


def _count_handed_samples(state: GradientState) -> list[list[int]]:
    """Return how many samples each rank was handed, in the pass that ended last and in the present batch, where results can be of these."""
    whole, loader = state.metrics.finished, state.pacing() if state.active is not None else None
    loader_pass = whole.last_pass if isinstance(whole, PreparedLoader) else None
    counts = []
    if loader_pass is not None and loader_pass.recording and loader_pass.handed and not loader_pass.gathered:
        counts.append(_sum_columns((count, given) for count, given, _ in _share_runs(loader_pass, whole._given)))
    if isinstance(loader, PreparedLoader):
        counts.append(list(loader._given if loader.shares is None else loader.shares.given))
    return counts


def make_batch_order(loader: Any) -> _ResultOrder | None:
    """Return how results of the present batch are put in order; None without a prepared loader."""
    if not isinstance(loader, PreparedLoader):
        return None
    full, shares = loader._given, loader.shares
    if shares is None:
        return _ResultOrder([(1, full, full)])
    constant, present = None, _current_pass(loader)
    ahead = present is not None and any(earlier is not present.batch and earlier.anchor() is not None for earlier in present.unread)
    # Where an earlier batch is still there, the loader was read ahead, and rows of a full batch may be those of that one.
    if not ahead and shares.given != full and all(real <= most for real, most in zip(shares.real, full, strict=True)):
        constant = _ResultOrder([(1, full, shares.real)])
    return _ResultOrder([(1, shares.given, shares.real)], other=constant)


def make_pass_order(loader: Any) -> _ResultOrder | None:
    """Return how results of the whole pass that was read to its end last are put in order; None where the order of the ranks is right."""
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
    return _ResultOrder(runs, most_rows=1, other=by_item)


def _share_runs(loader_pass: LoaderPass, full: tuple[int, ...]) -> Iterator[_ShareRun]:
    changes: list[tuple[int, BatchShares | None]] = [(0, None), *loader_pass.record]
    ends = [*(begin for begin, _ in changes[1:]), loader_pass.handed]
    for (begin, shares), end in zip(changes, ends, strict=True):
        if end > begin:
            yield end - begin, full if shares is None else shares.given, full if shares is None else shares.real


class _ResultOrder:
    """The order of results of runs of batches that were shared alike."""

    leaf_by_leaf = True
    """Results of samples may stand beside values of the whole batch."""

    def __init__(self, runs: list[_ShareRun], *, most_rows: int | None = None, other: _ResultOrder | None = None) -> None:
        """`most_rows` per sample are accepted; `other` is a second reading, for rows that do not fit the first one."""
        self.runs = runs
        self.most_rows = most_rows
        self.other = other
        self.batches = sum(count for count, _, _ in runs)
        self.given = _sum_columns((count, given) for count, given, _ in runs)
        self.counting = _sum_columns((count, real) for count, _, real in runs)
        """Return how many of the samples that each rank received count."""
        self.by_rank = all(real in (0, given) for given, real in zip(self.given, self.counting, strict=True)) and not all(self.counting)
        """Whether a rank either counts whole or not at all: then one that does not is left out, whatever it brings."""

    @property
    def total(self) -> int:
        return sum(self.counting)

    @property
    def fillers(self) -> int:
        return sum(self.given) - self.total

    @property
    def is_plain(self) -> bool:
        """Whether everything counts and stands in order already, however it is read."""
        return self.batches == 1 and self.given == self.counting and self.other is None

    @property
    def ranks(self) -> list[int] | None:
        """The ranks whose single values count; None for all."""
        counting = [rank for rank, real in enumerate(self.counting) if real]
        return counting if counting and len(counting) < len(self.counting) else None

    def order(self, counts: Sequence[int], usual: Sequence[int] | None = None) -> list[int] | None:
        """Return positions in what the ranks brought: all that counts, sample by sample; k rows per sample where each brought k times.

        `usual`: what the ranks brought of a full batch, if that is known. One value per rank, and anything else that is not of samples,
        is left alone.
        """
        if self.reads_otherwise(counts, usual):
            assert self.other is not None
            return self.other.order(counts)
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        rows = self.rows_per_sample(counts)
        if rows is None:
            if not self.by_rank or self.most_rows is not None or len(counts) != len(self.given):
                return None
            return [at for rank, start in enumerate(starts) if self.counting[rank] for at in range(start, start + counts[rank])]
        order: list[int] = []
        for count, given, real in self.runs:
            for _ in range(count):
                for rank, kept in enumerate(real):
                    order.extend(range(starts[rank], starts[rank] + kept * rows))
                    starts[rank] += given[rank] * rows
        return order

    def reads_otherwise(self, counts: Sequence[int], usual: Sequence[int] | None = None) -> bool:
        """Return whether the second reading is meant: the first does not fit, or both do and full batches brought as many rows."""
        if self.other is None or self.other.rows_per_sample(counts) is None:
            return False
        return self.rows_per_sample(counts) is None if usual is None else list(usual) == list(counts)

    def rows_per_sample(self, counts: Sequence[int]) -> int | None:
        """Return how many times the given samples each rank brought, if that is the same number for all."""
        given = self.given
        if len(counts) != len(given) or not sum(given) or (set(counts) == {1} and set(given) != {1}):
            return None
        rows = sum(counts) // sum(given)
        fits = 1 <= rows <= (self.most_rows or rows) and list(counts) == [rows * samples for samples in given]
        return rows if fits else None


def _sum_columns(runs: Iterable[tuple[int, tuple[int, ...]]]) -> list[int]:
    return [sum(column) for column in zip(*([count * size for size in sizes] for count, sizes in runs), strict=True)]


class _CurrentResultOrder:
    """Choose, leaf by leaf, between the order of the pass that ended last and that of the present batch, by their counts."""

    leaf_by_leaf = True

    def __init__(
        self, state: GradientState, whole: _ResultOrder | None, batch: _ResultOrder | None, loader_pass: LoaderPass | None
    ) -> None:
        """`loader_pass` is the pass of the present batch."""
        self.state, self.whole, self.batch, self.loader_pass = state, whole, batch, loader_pass
        finished: Any = state.metrics.finished
        self.finished = finished
        self.is_past = whole is not None and finished.last_pass.gathered
        """Whether results of the pass that ended last were gathered inside of its loop."""
        self.site = call_site()
        self.leaf = 0

    @property
    def total(self) -> int:
        """Both totals in one number, as the header of a gather has room for one: the ranks have to agree on both.

        A batch of 2**24 samples or more would mix them; then ranks that disagree could go unnoticed.
        """
        whole, batch = (0 if order is None else order.total for order in (self.whole, self.batch))
        return (whole << 24) + batch

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
            self._note_rows(counts)
            return None
        usual = None if self.loader_pass is None else self.loader_pass.rows.get((self.site, self.leaf))
        order = batch.order(counts, usual)
        if order is None:
            self._warn_of_unmatched(counts, batch)
        elif batch.reads_otherwise(counts, usual):
            self._log_once("constant", lambda: _CONSTANT.format(given=batch.given, counts=list(counts), real=batch.counting), quietly=True)
        return None if order == list(range(sum(counts))) else order

    def _of_pass(self, counts: Sequence[int]) -> list[int] | None:
        whole, batch = self.whole, self.batch
        assert whole is not None
        order = whole.order(counts)
        if order is None:
            if batch is None and whole.fillers and set(counts) != {1} and not self.is_past and self._is_multiple(whole, counts):
                self._warn_of_unmatched(counts, whole)
            return None
        kept, brought = len(order), sum(counts)
        name = type(self.finished.original.dataset).__name__
        if self.is_past:
            if batch is None and order != list(range(brought)):
                self._log_once("past", lambda: _PAST.format(brought=brought, name=name), quietly=True)
            return None
        if batch is not None and whole.batches == 1 and list(counts) == batch.given:
            if order != batch.order(counts):
                self._log_once("either", lambda: _EITHER.format(fillers=whole.fillers))
            return None
        if order != list(range(brought)):
            self._log_once("whole", lambda: _WHOLE.format(brought=brought, name=name, left=brought - kept), quietly=kept == brought)
        return order

    @staticmethod
    def _is_multiple(whole: _ResultOrder, counts: Sequence[int]) -> bool:
        return _ResultOrder(whole.runs).rows_per_sample(counts) is not None

    def _note_rows(self, counts: Sequence[int]) -> None:
        if self.loader_pass is not None and len(self.loader_pass.rows) < _MAX_NOTED_ROWS:
            self.loader_pass.rows[self.site, self.leaf] = tuple(counts)

    def _warn_of_unmatched(self, counts: Sequence[int], of: _ResultOrder) -> None:
        if of.fillers and set(counts) != {1}:
            self._log_once("unmatched", lambda: _UNMATCHED.format(counts=list(counts), given=of.given, fillers=of.fillers))

    def _log_once(self, what: str, text: Callable[[], str], *, quietly: bool = False) -> None:
        if what not in self.state.metrics.warned:
            self.state.metrics.warned.add(what)
            logger = get_logger(__name__)
            (logger.info if quietly else logger.warning)(text())


_MAX_NOTED_ROWS = 10_000
"""Limit of remembered leaves by call site, for a script that gathers a different structure every time."""

_UNMATCHED = (
    "gather_for_metrics: the processes brought {counts} rows of {given} samples, which cannot be matched to samples, so those of "
    "{fillers} repeated samples may be in the result. Gather one row per sample (in a loop: or k rows for each) and select later; or use "
    "DataLoaderConfiguration(even_batches=False), where a process repeats samples only if it has none left, and its rows are left out; "
    "or leave them out yourself by loader.shares. (Said once.)"
)
_EITHER = (
    "gather_for_metrics: as many rows were given as the present batch of the outer loader has, and as the whole loader that was read "
    "inside of it: they are taken for those of the batch, so {fillers} repeated samples of the inner one may be in the result. Gather its "
    "results inside of its loop. (Said once.)"
)
_WHOLE = (
    "gather_for_metrics after the loop: these {brought} rows are taken for the results of the loader of {name} that was read to its end, "
    "as every process brings as many as it was handed samples. They are put in the order of the dataset, and {left} rows of repeated "
    "samples are left out. If they are something else, use gather. (Said once.)"
)
_PAST = (
    "gather_for_metrics after the loop: these {brought} rows are gathered as they are. They are as many as the loader of {name} handed "
    "out, but results of that pass were gathered inside of its loop already. (Said once.)"
)
_CONSTANT = (
    "gather_for_metrics: this batch has {given} samples, and the processes brought {counts} rows, as many as of a full batch. The first "
    "{real} are kept, one for each sample that counts. (Said once.)"
)


_TreePath = tuple[str, ...]
_SampleLists = dict[_TreePath, tuple[list[int], bool]]
"""For each list that may be of samples: whose counts it fits, and whether all it holds looks like batches."""


def _mark_sample_lists(data: Any, handed: list[list[int]], known: set[tuple[str, _TreePath]], channel: Channel, limits: Limits) -> Any:
    """Return the data with its lists of samples as `Entries`; `handed` is what the ranks were given, as it may be meant.

    `known` holds the lists that earlier calls recognised, by the line of the script.
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
