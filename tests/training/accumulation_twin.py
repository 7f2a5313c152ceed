"""The rules of gradient accumulation, written to be read: the oracle of `training/accumulation.py`.

A history is a list of events of one model on one process. The twin keeps all of it and answers every question by looking back; nothing
is carried from event to event.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """An `accumulate` block: the batch that it works on (None without a loader), and whether that is the last one of its pass."""

    batch: int | None = None
    end: bool = False


@dataclass(frozen=True)
class Mean:
    """A backward pass on the mean of a batch whose gradient is `value`; the batch counts as `count` full ones."""

    value: float
    count: float = 1.0


@dataclass(frozen=True)
class Sum:
    """A backward pass on a sum with its weight."""

    value: float
    weight: float


@dataclass(frozen=True)
class Clear:
    """`zero_grad()`."""


Event = Block | Mean | Sum | Clear


def blocks_of(history: list[Event]) -> list[list[Event]]:
    """The history, block by block."""
    found: list[list[Event]] = []
    for event in history:
        if isinstance(event, Block):
            found.append([])
        found[-1].append(event)
    return found


def closes(history: list[Event], steps: int) -> list[bool]:
    """For each block, whether an update ends with it."""
    blocks = [block[0] for block in blocks_of(history)]
    answers: list[bool] = []
    for place, block in enumerate(blocks):
        assert isinstance(block, Block)
        in_window = place - max([number for number, closing in enumerate(answers) if closing], default=-1)
        answers.append(in_window >= steps or (block.end and is_last_piece(blocks[: place + 1])))
    return answers


def is_last_piece(blocks: list[Event]) -> bool:
    """Whether as many pieces of the present batch have come as of the batch before it."""
    batches = [block.batch for block in blocks if isinstance(block, Block)]
    present = batches[-1]
    pieces = 1
    while pieces < len(batches) and batches[-pieces - 1] == present:
        pieces += 1
    before = batches[: len(batches) - pieces]
    usual = 0
    while usual < len(before) and before[-usual - 1] == before[-1]:
        usual += 1
    return pieces >= usual


def gradients(history: list[Event], steps: int) -> list[float]:
    """The gradient at the end of every update, where there is one."""
    blocks, closing = blocks_of(history), closes(history, steps)
    found, window = [], []
    for block, ends in zip(blocks, closing, strict=True):
        window.append(block)
        if ends:
            found.append(gradient(window))
            window = []
    return found


def gradient(window: list[list[Event]]) -> float:
    """The gradient of one window: what was not cleared, over what the window held."""
    *earlier, last = window
    cleared = [place for place, event in enumerate(last) if isinstance(event, Clear) and any(map(_is_loss, last[:place]))]
    kept = last if not cleared else last[cleared[-1] + 1 :]
    losses = [event for block in ([] if cleared else earlier) for event in block if _is_loss(event)]
    losses += [event for event in kept if _is_loss(event)]
    if any(isinstance(event, Sum) for event in losses):
        weight = sum(event.weight for block in (*earlier, kept) for event in block if isinstance(event, Sum))
        return sum(event.value for event in losses) / (weight or 1.0)
    batches = [next((event.count for event in block if isinstance(event, Mean)), 0.0) for block in window]
    return sum(event.value * event.count for event in losses if isinstance(event, Mean)) / (sum(batches) or 1.0)


def _is_loss(event: Event) -> bool:
    return isinstance(event, Mean | Sum)
