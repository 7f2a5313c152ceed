"""Sharing work between processes: the methods of `PartialState` that hand out parts of an input, and put results together again.

Static parts are those of `split.py`; work that is handed out as processes become free is in `dynamic/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Literal

from slipstream.comm.channel import Channel, Limits
from slipstream.comm.gather import Arrange
from slipstream.comm.sites import calling_code
from slipstream.runtime.arrange import arrangement
from slipstream.runtime.dynamic.opening import Options, Team, hand_out, how_to_split
from slipstream.runtime.runtime import Runtime
from slipstream.runtime.split import split

__all__ = ["Sharing"]


class Sharing:
    """What a state object knows of the part that it handed out last."""

    _runtime: Runtime
    _limits: Limits
    _part: Arrange | None = None
    _part_of: CodeType | None = None

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        raise NotImplementedError

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        raise NotImplementedError

    def _channel(self) -> Channel:
        raise NotImplementedError

    @contextmanager
    def split_between_processes(
        self,
        inputs: Any,
        apply_padding: bool = False,
        *,
        balance: Literal["static", "dynamic"] = "static",
        batch_size: int | None = None,
        key: Callable[[Any], float] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> Iterator[Any]:
        """This process's part of a list, tuple, dict, tensor, array, range, dataset or iterable.

        With `apply_padding` every process gets the same count, the last item repeated; a `gather` of one result per item drops
        the repeated ones again, and gives the results of a dealt-out iterable in the order of the input.

        With `balance="dynamic"` the block gets a `Work`: a loop over items (or lists of up to `batch_size` items) that are handed out as
        processes become free; see `runtime/dynamic/work.py`. `key` says what an item costs, `checkpoint` names the file of results.
        """
        options = Options(batch_size=batch_size, key=key, checkpoint=checkpoint, progress=progress)
        way = how_to_split(balance, apply_padding, options)
        if way is None:
            part = split(inputs, self.process_index, self.num_processes, apply_padding)
            self._part, self._part_of = arrangement(part), calling_code()
            yield part.value
            return
        with hand_out(self._team("split_between_processes"), inputs, way) as work:
            self._part, self._part_of = work, calling_code()
            yield work

    def map_across_processes(
        self,
        function: Callable[[Any], Any],
        inputs: Any,
        batch_size: int | None = None,
        order: bool = True,
        key: Callable[[Any], float] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> list[Any]:
        """The results of a function for all inputs, on every process; items are handed out as processes become free.

        `function` gets one item, or with `batch_size` a list of up to so many, for which it gives a list of as many results. The results
        are in the order of the input; with `order=False`, as they were finished. See `runtime/dynamic/work.py`.

        >>> from slipstream.runtime.state import PartialState
        >>> PartialState().map_across_processes(len, ["a", "bb", "ccc"], key=len)
        [1, 2, 3]
        """
        options = Options(batch_size=batch_size, key=key, checkpoint=checkpoint, progress=progress)
        with hand_out(self._team("map_across_processes"), inputs, options) as work:
            for item in work:
                work.done(function(item))
        return work.results(order)

    def _team(self, operation: str) -> Team:
        return Team(self._channel(), self._limits, lambda: self._runtime.store, operation)

    def _arrangement(self, *, anywhere: bool = False) -> Arrange | None:
        """For results of the part that was split last; of plain gathers only those in the function that split it."""
        return self._part if anywhere or calling_code() is self._part_of else None
