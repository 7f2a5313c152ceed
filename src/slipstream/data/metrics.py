"""Which gathered results belong to which sample: results of all ranks into dataset order, without what only filled up a batch.

Two questions: of the batch that a loader handed out last (results gathered inside the loop), and of a pass that was read to its end
(results kept on each rank and gathered after the loop). Nothing here is counted while batches are read; it follows from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slipstream.comm.gather import Arrange
from slipstream.data.clock import Pass
from slipstream.data.loader import PreparedLoader
from slipstream.logging import get_logger
from slipstream.runtime.gradient_state import Shares

__all__ = ["batch_arrangement", "pass_arrangement"]


def batch_arrangement(loader: Any) -> Arrange | None:
    """How results of the present batch are put in order; None where joining them in the order of the ranks is right."""
    shares = loader.shares if isinstance(loader, PreparedLoader) else None
    if shares is None or shares.given == shares.real:
        return None
    return _Arrangement([(1, shares.given, shares.real)])


def pass_arrangement(loader: Any) -> Arrange | None:
    """How results of the whole pass that was read to its end last are put in order; None where the order of the ranks is right."""
    turn = loader.last_pass if isinstance(loader, PreparedLoader) else None
    if turn is None or loader.place.world_size == 1:
        return None
    if not turn.recording:
        get_logger(__name__).warning("too many batches of different sizes: results of this whole pass stay in the order of the ranks")
        return None
    return _Arrangement(list(_runs(turn, loader._given)))


def _runs(turn: Pass, full: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """How many batches in a row were dealt out alike, what each rank was given of one, and how much of that counts."""
    changes: list[tuple[int, Shares | None]] = [(0, None), *turn.record]
    ends = [*(begin for begin, _ in changes[1:]), turn.handed]
    for (begin, shares), end in zip(changes, ends, strict=True):
        if end > begin:
            yield end - begin, full if shares is None else shares.given, full if shares is None else shares.real


class _Arrangement:
    """Of runs of batches that were dealt out alike."""

    leaf_by_leaf = True
    """Results of samples may stand beside values of the whole batch."""

    def __init__(self, runs: list[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> None:
        self.runs = runs
        columns = zip(*([count * one for one in given] for count, given, _ in runs), strict=True)
        self.given = [sum(column) for column in columns]

    @property
    def total(self) -> int:
        return sum(count * sum(real) for count, _, real in self.runs)

    def order(self, counts: Sequence[int]) -> list[int] | None:
        """Positions in what the ranks brought: all that counts, a sample after the other; k rows per sample where each brought k times.

        One value per rank, and anything else that is not of samples, is left alone.
        """
        rows = self._rows_per_sample(counts)
        if rows is None:
            return None
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        order: list[int] = []
        for count, given, real in self.runs:
            for _ in range(count):
                for rank, kept in enumerate(real):
                    order.extend(range(starts[rank], starts[rank] + kept * rows))
                    starts[rank] += given[rank] * rows
        return order

    def _rows_per_sample(self, counts: Sequence[int]) -> int | None:
        given = self.given
        if len(counts) != len(given) or not sum(given) or (set(counts) == {1} and set(given) != {1}):
            return None
        rows = sum(counts) // sum(given)
        return rows if rows >= 1 and list(counts) == [rows * one for one in given] else None
