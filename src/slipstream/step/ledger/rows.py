"""Rows: one per step, with the seconds of each phase and the counts; and how they travel from a rank to rank 0.

A message is a line of JSON with its length before it, and the rows as 32-bit floats behind it: 40 bytes for a step.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from slipstream.comm.meter import BACKWARD, CHECKPOINT, COLUMNS, DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER, PHASES

__all__ = ["NAMES", "Message", "Rows", "Window", "pack", "seconds", "unpack"]

Rows = Any
"""A numpy array: steps x columns; seconds, then counts."""

NAMES: dict[str, int | None] = {
    "data": DATA,
    "forward": FORWARD,
    "backward": BACKWARD,
    "communication": None,
    "waiting": None,
    "optimizer": OPTIMIZER,
    "checkpoint": CHECKPOINT,
    "evaluation": EVALUATION,
    "other": OTHER,
}
"""The phases as they are told, in order; communication and waiting are found by comparing the ranks."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Window:
    """The steps of this rank since the last look, for those who examine them: see `step/guards/`."""

    steps: int
    first_step: int
    """The number of the first of them; steps are counted from 0."""
    rows: Rows
    """Steps x columns of `comm/meter.py`: seconds of each phase (DATA, FORWARD, ...), then samples and tokens."""
    losses: Sequence[tuple[int, float | torch.Tensor]]
    """(step, loss) of each backward pass, as it was given to `backward`, without its graph. The last may be of the step under way."""


@dataclass
class Message:
    """What a rank tells."""

    first: int
    rows: Rows
    memory: tuple[int | None, int | None] = (None, None)
    """High-water marks of host and device, in bytes."""
    events: list[dict[str, Any]] = field(default_factory=list)
    tail: list[float] | None = None
    """The row of what came after the last step, in the last message."""


def pack(message: Message) -> bytes:
    """A message as bytes.

    >>> unpack(pack(Message(7, numpy.ones((2, COLUMNS))))).first
    7
    """
    header = {"first": message.first, "memory": message.memory, "events": message.events, "tail": message.tail}
    text = json.dumps(header, default=str).encode()
    return _LENGTH.pack(len(text)) + text + numpy.ascontiguousarray(message.rows, dtype="<f4").tobytes()


def unpack(data: bytes) -> Message:
    """A message that was packed."""
    (length,) = _LENGTH.unpack_from(data)
    header = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    rows = numpy.frombuffer(data, dtype="<f4", offset=_LENGTH.size + length).reshape(-1, COLUMNS).astype(numpy.float64)
    host, device = header["memory"]
    return Message(header["first"], rows, (host, device), header["events"], header["tail"])


def seconds(rows: Rows) -> Rows:
    """Rows whose times are nanoseconds, with seconds."""
    made = numpy.array(rows, dtype=numpy.float64)
    made[..., :PHASES] *= 1e-9
    return made
