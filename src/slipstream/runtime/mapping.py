"""`map_across_processes` as a plain function, on the runtime of this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from slipstream.runtime.state import PartialState

__all__ = ["map_across_processes"]


def map_across_processes(
    function: Callable[[Any], Any],
    inputs: Any,
    batch_size: int | None = None,
    order: bool = True,
    key: Callable[[Any], float] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> list[Any]:
    """The results of a function for all inputs, on every process; see `PartialState.map_across_processes`.

    >>> map_across_processes(str.upper, ["one", "two"])
    ['ONE', 'TWO']
    """
    return PartialState().map_across_processes(function, inputs, batch_size, order, key, checkpoint, progress)
