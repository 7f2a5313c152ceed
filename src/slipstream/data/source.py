"""A stream and the place in it: what is read of it from a position on, and what is noted so that the position can be found again.

Used by whoever reads a stream: each rank (`stream.py`), or rank 0 for all (`dispatch.py`). With workers, each of them notes how far it is,
and a pass that goes on lets each go on there, in the same turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from slipstream.data.items import Mark, Marks, Reader, check_mark, plain_mark, skips
from slipstream.data.reading import Engine, Message, Recipe, Turn
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["PLACE", "SavedPlace", "StreamSource"]

PLACE = ("dataset", "random", "workers", "parts", "part", "full")
"""Names of what the position of a stream holds besides numbers."""


@dataclass(frozen=True)
class SavedPlace:
    """What leads to a saved position."""

    epoch: int
    samples: int
    mark: Mark | None
    turns: Sequence[Turn] | None


class StreamSource:
    """What one process reads of a stream, and the places in it."""

    def __init__(self, original: DataLoader[Any], dataset: Any, ahead: int = 0) -> None:
        """`ahead`: how many global batches are read ahead of the script, besides the one that is always."""
        self.original = original
        self.dataset = dataset
        self.engine = Engine(original)
        self.saved: SavedPlace | None = None
        """The place that was loaded."""
        self._ahead = ahead + 4
        self._marks = Marks(self._ahead)
        self._rotas: dict[tuple[int, int], tuple[Turn, ...]] = {}
        """How far the workers are, in the order of their turns, by epoch and position."""

    # -- reading --------------------------------------------------------------------------------------------------

    def messages(
        self,
        dataset: Any,
        recipe: Recipe,
        *,
        epoch: int,
        start: int,
        seed: int,
        pipeline: int,
        place: tuple[int, int] = (0, 1),
        careful: bool = False,
        needs_head: bool = True,
        head: list[Any] | None = None,
        digest: bool = False,
    ) -> Iterator[Message]:
        """The batches from a position on; places are noted, and those that were are used."""
        saved = self._found(epoch, start) if start else None
        may_skip = skips(dataset, epoch)
        if self.engine.has_workers:
            turns = None if saved is None else saved.turns
            messages = self.engine.in_workers(
                dataset,
                recipe,
                seed=seed,
                pipeline=pipeline,
                place=place,
                start=start,
                turns=turns,
                digest=digest,
                careful=careful,
                may_skip=may_skip,
            )
            return self._followed(messages, recipe, epoch, start, turns)
        reader = self.reader(dataset, recipe, seed, pipeline, place, careful=careful, may_skip=may_skip)
        mark = None if saved is None else saved.mark
        items, head = reader.open(start, mark, needs_head=needs_head, head=head, note=self.note(epoch))
        return self.engine.here(recipe.messages(items, start, head))

    def reader(
        self, dataset: Any, recipe: Recipe, seed: int, pipeline: int, place: tuple[int, int], *, careful: bool, may_skip: bool = True
    ) -> Reader:
        """What reads the items in this process."""
        return Reader(dataset, recipe.block, seed, pipeline, place, careful=careful, aligned=recipe.aligned, may_skip=may_skip)

    def note(self, epoch: int) -> Callable[[int, Mark], None]:
        """Takes the marks of a pass."""
        return lambda position, mark: self._marks.note(epoch, position, mark)

    def can_seek(self, dataset: Any, epoch: int, start: int) -> bool:
        """Whether this position can be found without reading everything before it."""
        saved = self._found(epoch, start)
        return skips(dataset, epoch) or (saved is not None and saved.mark is not None and saved.mark.seeks)

    def _found(self, epoch: int, start: int) -> SavedPlace | None:
        """What leads to this position, if it was loaded, or if a pass of this process got there."""
        if self.saved is not None and (self.saved.epoch, self.saved.samples) == (epoch, start):
            return self.saved
        turns = self._rotas.get((epoch, start))
        mark = self._marks.at(epoch, start, 0)
        return None if mark is None and turns is None else SavedPlace(epoch, start, mark, turns)

    def _followed(
        self, messages: Iterator[Message], recipe: Recipe, epoch: int, start: int, begun: Sequence[Turn] | None
    ) -> Iterator[Message]:
        """Notes how far the workers are after each message."""
        rota = tuple(begun or (Turn(role) for role in range(self.original.num_workers)))
        position = start - (start % recipe.block if recipe.aligned else 0)
        if begun is None and start:  # whole messages were dropped: nothing is known of the workers
            yield from messages
            return
        for message in messages:
            position += recipe.block
            turn = Turn(*message.turn)
            place = next(place for place, one in enumerate(rota) if one.role == turn.role)
            rota = (*rota[place + 1 :], *rota[:place], turn)
            self._rotas[epoch, position] = rota
            if len(self._rotas) > self._ahead:
                del self._rotas[next(iter(self._rotas))]
            yield message

    # -- places ---------------------------------------------------------------------------------------------------

    def state(self, epoch: int, position: int, recipe: Recipe) -> dict[str, Any]:
        """What leads back to a position, in plain data."""
        rota = self._rotas.get((epoch, position))
        if rota is not None:
            return {"workers": [_plain_turn(turn) for turn in rota]}
        if self.engine.has_workers:
            return {}
        return plain_mark(self._marks.at(epoch, position, recipe.block))

    def check(self, state: Mapping[str, Any]) -> SavedPlace:
        """The place in a saved state; a `ConfigError` where it cannot be one. Changes nothing."""
        name = type(self.dataset).__name__
        workers = state.get("workers")
        if workers is not None and (not isinstance(workers, list) or not all(_fits(turn) for turn in workers)):
            raise ConfigError(f"the state of a loader of {name} says how far its workers were, in a way that cannot be read")
        roles = sorted(turn["role"] for turn in workers or [])
        if roles != list(range(len(roles))):
            raise ConfigError(f"the state of a loader of {name} has workers {roles}: each is there once, from 0")
        turns = None if workers is None else [Turn(one["role"], one["items"], check_mark(one), one["over"]) for one in workers]
        mark = check_mark(state)
        keeps = [one for one in (mark, *(turn.mark for turn in turns or [])) if one is not None and one.seeks]
        if keeps and not callable(getattr(self.dataset, "load_state_dict", None)):
            raise ConfigError(
                f"the state of a dataset was saved with this position, and {name} has no load_state_dict: give the loader the same dataset"
            )
        return SavedPlace(state["epoch"], state["samples"], mark, turns)

    def load(self, saved: SavedPlace) -> None:
        """Goes on at that place when a pass begins there; tells if another number of workers reads in another order."""
        turns, mark, workers = saved.turns, saved.mark, self.original.num_workers
        before, now = len(turns) if turns is not None else 1 if mark is not None else workers, max(1, workers)
        if max(1, before) != now and saved.samples:
            get_logger(__name__).warning(
                f"the position of {type(self.dataset).__name__} was saved with {before} workers, and there are {now} now: several "
                "workers read in another order, so in this epoch some samples may come twice and others never. Use num_workers as it was."
            )
        if turns is not None and len(turns) != workers:
            mark = turns[0].mark if len(turns) == 1 else None
            turns = None
        elif turns is None and mark is not None and workers == 1:
            turns = [Turn(0, saved.samples, mark)]
        self.saved = SavedPlace(saved.epoch, saved.samples, mark, turns)


def _plain_turn(turn: Turn) -> dict[str, Any]:
    return {"role": turn.role, "items": turn.items, "over": turn.over, **plain_mark(turn.mark)}


def _fits(turn: Any) -> bool:
    if not isinstance(turn, Mapping) or not {"role", "items", "over"} <= set(turn) <= {"role", "items", "over", "dataset", "random"}:
        return False
    numbers = all(type(turn[name]) is int and 0 <= turn[name] < 2**53 for name in ("role", "items"))
    return numbers and isinstance(turn["over"], bool)
