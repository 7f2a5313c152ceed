"""A progress bar that one process of each machine shows: `tqdm` with the same arguments, quiet on the others."""

from __future__ import annotations

from typing import Any

from slipstream.errors import ConfigError
from slipstream.runtime.progress import bar_class
from slipstream.runtime.where import this_process

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown by the first process of each machine, or by all with `main_process_only=False`, each on a line of its own.

    Which process this is comes from the runtime or the launcher's variables; nothing is opened for a progress bar. `disable=None` shows it
    on a terminal alone, as in tqdm.

    >>> list(tqdm(range(3), disable=True))
    [0, 1, 2]
    """
    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"tqdm({args[0]}, ...): the first argument is what is iterated over; write tqdm(..., main_process_only={args[0]}) "
            "to say who shows the bar"
        )
    process = this_process()
    if main_process_only and not process.is_local_main:
        kwargs["disable"] = True
    elif not main_process_only and process.local_world_size > 1:
        kwargs.setdefault("position", process.local_rank)
    return bar_class()(*args, **kwargs)
