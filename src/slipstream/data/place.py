"""`Place`: where a loader stands among the processes that share its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.comm.channel import Channel, Limits
from slipstream.errors import ConfigError

__all__ = ["Place"]


@dataclass(frozen=True)
class Place:
    """Which of the processes that share the data this one is, and how it talks to the others."""

    rank: int
    world_size: int
    channel: Callable[[], Channel]
    """Opens the process group if it is not open; asked only where a collective is needed."""
    limits: Limits
    compares: bool = False
    """Whether the processes that share the data are those of the channel, and tell each other what they are about to read."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"process_index={self.rank} and num_processes={self.world_size} were given for a loader: "
                f"the index is one of 0 to {self.world_size - 1}"
            )
