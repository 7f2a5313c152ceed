"""Which gathered results belong to which sample: results of all ranks into dataset order, without what only filled up a batch.

Two questions: of the batch that a loader handed out last (results gathered inside the loop), and of a pass that was read to its end
(results kept on each rank and gathered after the loop). Nothing here is counted while batches are read; it follows from the plan.
Which of the two is meant is told by how many rows each rank brings; what fits neither while a batch holds repeated samples is warned of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from slipstream.comm.gather import Arrange
from slipstream.data.clock import Pass
from slipstream.data.loader import PreparedLoader
from slipstream.logging import get_logger
from slipstream.runtime.gradient_state import GradientState, Shares

__all__ = ["batch_arrangement", "handed_counts", "pass_arrangement", "present_arrangement"]

_Run = tuple[int, tuple[int, ...], tuple[int, ...]]
"""How many batches in a row were dealt out alike, what each rank was given of one, and how much of that counts."""


def present_arrangement(state: GradientState) -> Arrange | None:
    """How results are put in order that are gathered now: of the pass that ended last, or of the present batch."""
    whole = _of_pass(state.finished)
    loader = state.pacing() if state.active is not None else None
    batch = _of_batch(loader)
    if whole is None and (batch is None or batch.given == batch.counting):
        return None
    return _Present(state, whole, batch)


def handed_counts(state: GradientState) -> list[list[int]]:
    """How many samples each rank was handed, in the pass that ended last and in the present batch, as far as there are such."""
    whole, loader = state.finished, state.pacing() if state.active is not None else None
    turn = whole.last_pass if isinstance(whole, PreparedLoader) else None
    counts = []
    if turn is not None and turn.recording and turn.handed:
        counts.append(_columns((count, given) for count, given, _ in _runs(turn, whole._given)))
    if isinstance(loader, PreparedLoader):
        counts.append(list(loader._given if loader.shares is None else loader.shares.given))
    return counts


def batch_arrangement(loader: Any) -> Arrange | None:
    """How results of the present batch are put in order; None where joining them in the order of the ranks is right."""
    batch = _of_batch(loader)
    return None if batch is None or batch.given == batch.counting else batch


def pass_arrangement(loader: Any) -> Arrange | None:
    """How results of the whole pass that was read to its end last are put in order; None where the order of the ranks is right."""
    return _of_pass(loader)


def _of_batch(loader: Any) -> _Arrangement | None:
    if not isinstance(loader, PreparedLoader) or loader.place.world_size == 1:
        return None
    shares = loader.shares
    if shares is None:
        return _Arrangement([(1, loader._given, loader._given)])
    return _Arrangement([(1, shares.given, shares.real)], by_rank=shares.weighed)


def _of_pass(loader: Any) -> _Arrangement | None:
    turn = loader.last_pass if isinstance(loader, PreparedLoader) else None
    if turn is None or not turn.handed or loader.place.world_size == 1:
        return None
    if not turn.recording:
        get_logger(__name__).warning("too many batches of different sizes: results of this whole pass stay in the order of the ranks")
        return None
    return _Arrangement(list(_runs(turn, loader._given)), most_rows=1)


def _runs(turn: Pass, full: tuple[int, ...]) -> Iterator[_Run]:
    changes: list[tuple[int, Shares | None]] = [(0, None), *turn.record]
    ends = [*(begin for begin, _ in changes[1:]), turn.handed]
    for (begin, shares), end in zip(changes, ends, strict=True):
        if end > begin:
            yield end - begin, full if shares is None else shares.given, full if shares is None else shares.real


class _Arrangement:
    """Of runs of batches that were dealt out alike."""

    leaf_by_leaf = True
    """Results of samples may stand beside values of the whole batch."""

    def __init__(self, runs: list[_Run], *, most_rows: int | None = None, by_rank: bool = False) -> None:
        """`most_rows` per sample are accepted; `by_rank`: a rank that has none that count is left out, whatever it brings."""
        self.runs = runs
        self.most_rows = most_rows
        self.batches = sum(count for count, _, _ in runs)
        self.given = _columns((count, given) for count, given, _ in runs)
        self.counting = _columns((count, real) for count, _, real in runs)
        """Of what each rank was given: how much counts."""
        self.by_rank = by_rank and all(real in (0, given) for given, real in zip(self.given, self.counting, strict=True))

    @property
    def total(self) -> int:
        return sum(self.counting)

    @property
    def fillers(self) -> int:
        return sum(self.given) - self.total

    def order(self, counts: Sequence[int]) -> list[int] | None:
        """Positions in what the ranks brought: all that counts, a sample after the other; k rows per sample where each brought k times.

        One value per rank, and anything else that is not of samples, is left alone.
        """
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        rows = self.rows_per_sample(counts)
        if rows is None or (self.most_rows is not None and rows > self.most_rows):
            if not self.by_rank or len(counts) != len(self.given):
                return None
            return [at for rank, start in enumerate(starts) if self.counting[rank] for at in range(start, start + counts[rank])]
        order: list[int] = []
        for count, given, real in self.runs:
            for _ in range(count):
                for rank, kept in enumerate(real):
                    order.extend(range(starts[rank], starts[rank] + kept * rows))
                    starts[rank] += given[rank] * rows
        return order

    def rows_per_sample(self, counts: Sequence[int]) -> int | None:
        """How many times the given samples each rank brought, if that is the same number for all."""
        given = self.given
        if len(counts) != len(given) or not sum(given) or (set(counts) == {1} and set(given) != {1}):
            return None
        rows = sum(counts) // sum(given)
        return rows if rows >= 1 and list(counts) == [rows * one for one in given] else None


def _columns(runs: Iterable[tuple[int, tuple[int, ...]]]) -> list[int]:
    return [sum(column) for column in zip(*([count * one for one in counts] for count, counts in runs), strict=True)]


class _Present:
    """Of the pass that ended last, or of the present batch: whichever the counts fit, leaf by leaf."""

    leaf_by_leaf = True

    def __init__(self, state: GradientState, whole: _Arrangement | None, batch: _Arrangement | None) -> None:
        self.state, self.whole, self.batch = state, whole, batch

    @property
    def total(self) -> int:
        """Both totals in one number: the ranks have to agree on both."""
        whole, batch = (0 if one is None else one.total for one in (self.whole, self.batch))
        return (whole << 24) + batch

    def order(self, counts: Sequence[int]) -> list[int] | None:
        whole, batch = self.whole, self.batch
        of_pass = None if whole is None else whole.order(counts)
        of_batch = None if batch is None else batch.order(counts)
        if whole is not None and of_pass is not None:
            if batch is None or whole.batches > 1 or list(counts) != batch.given:
                return of_pass
            if of_pass != of_batch:
                self._tell("either", _EITHER.format(fillers=whole.fillers))
        if of_batch is None and set(counts) != {1}:
            unmatched = batch if batch is not None else whole if whole is not None and whole.rows_per_sample(counts) else None
            if unmatched is not None and unmatched.fillers:
                self._tell("unmatched", _UNMATCHED.format(counts=list(counts), given=unmatched.given, fillers=unmatched.fillers))
        return of_batch

    def _tell(self, what: str, text: str) -> None:
        if what not in self.state.told:
            self.state.told.add(what)
            get_logger(__name__).warning(text)


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
