"""Looking at gradients before they are averaged: a communication hook that shows each bucket to somebody and then does what was to be done.

The sums are those that DDP makes without any hook, bit for bit: each rank's part times one over their number, added up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Shown", "show"]

_Look = Callable[[Any], None]
_Hook = Callable[[Any, Any], Any]


class Shown:
    """What the hook needs: who looks, and what happens to a bucket then."""

    def __init__(self, look: _Look, group: Any) -> None:
        self.look = look
        self.state: Any = group
        self.hook: _Hook = _average
        self.is_usual = True
        """Whether nobody has given another hook yet: there can be one."""

    def put(self, state: Any, hook: _Hook) -> None:
        """Another way to average, after the look."""
        self.state, self.hook, self.is_usual = state, hook, False


def show(shown: Shown, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The hook itself."""
    shown.look(bucket)
    done: torch.futures.Future[torch.Tensor] = shown.hook(shown.state, bucket)
    return done


def _average(group: Any, bucket: Any) -> Any:
    buffer = bucket.buffer()
    buffer.mul_(1.0 / dist.get_world_size(group))
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
