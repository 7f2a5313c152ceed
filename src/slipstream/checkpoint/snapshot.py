"""A snapshot: everything that one save will write, taken at one moment.

The states of objects are taken apart when the snapshot is made (`plain.flatten`), so what cannot be stored is an error at the call of
`save_state`, and a dict that changes afterwards changes nothing. Tensors are still those of the run, until `Arena.keep` copies them;
a save that writes behind the training does that, one that makes it wait need not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy
import torch

from slipstream.checkpoint.pieces import Place
from slipstream.checkpoint.plain import flatten
from slipstream.checkpoint.shares import Share
from slipstream.devices.host import cores

__all__ = ["Arena", "Facts", "ModelPart", "Part", "PiecesPart", "Snapshot", "part_of", "pieces_of"]

_PIECE: Final = 64 << 20
"""What a thread copies in one go: above half of the cache of a processor, copying bypasses the cache and is nearly twice as fast."""
_LITTLE: Final = 8 << 20
_COPIERS: Final = 4
_Bytes: TypeAlias = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


@dataclass(frozen=True)
class Part:
    """A state taken apart: what JSON holds, and the tensors by name."""

    name: str
    tree: Any
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ModelPart:
    """The weights of one model."""

    number: int
    base: str
    kind: str
    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    extra: Part | None = None
    frozen: frozenset[str] = frozenset()
    """Names of weights that are not trained."""
    sharded: bool = False
    """Whether some of its weights are sharded over ranks; those are not here."""


@dataclass(frozen=True)
class PiecesPart:
    """What this rank stores of the tensors of a model or a part that are sharded over ranks."""

    base: str
    """Whose they are: the name of the model or part."""
    tensors: Mapping[str, torch.Tensor]
    places: Mapping[str, Place]
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of all sharded tensors of it, also of those that other ranks store."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Facts:
    """What the manifest says of the run."""

    stamp: str
    step: int
    world: int
    strategy: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    metric: float | None = None
    receipt: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """What a save writes: all of it on the process that writes, `own` alone on the others."""

    facts: Facts
    own: Part
    """What belongs to this rank."""
    models: tuple[ModelPart, ...] = ()
    optimizers: tuple[Part, ...] = ()
    training: Part | None = None
    objects: tuple[Part, ...] = ()
    pieces: tuple[PiecesPart, ...] = ()
    """Of strategies that shard: on every process."""

    def parts(self) -> Iterator[Part | ModelPart | PiecesPart]:
        """Everything that holds tensors."""
        yield from self.models
        yield from self.pieces
        yield from (model.extra for model in self.models if model.extra is not None)
        yield from self.optimizers
        yield from () if self.training is None else (self.training,)
        yield from self.objects
        yield self.own

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for part in self.parts() for tensor in part.tensors.values())


def part_of(name: str, state: Any, where: str, sharded: dict[str, Any] | None = None) -> Part:
    """A state taken apart; `where` names it in errors. Tensors that are sharded are put into `sharded`, and refused without it.

    >>> part_of("training", {"epoch": 3}, "loaders")
    Part(name='training', tree={'epoch': 3}, tensors={})
    """
    tree, tensors = flatten(state, where, sharded)
    return Part(name, tree, tensors)


def pieces_of(
    base: str, shares: Mapping[str, Share], aliases: Mapping[str, str] | None = None, frozen: frozenset[str] = frozenset()
) -> PiecesPart:
    """What this rank stores of sharded tensors; other names of tied ones are stored by none."""
    owned = {name: share for name, share in shares.items() if share.owned and name not in (aliases or {})}
    return PiecesPart(
        base,
        {name: share.tensor for name, share in owned.items()},
        {name: share.place for name, share in owned.items()},
        {name: share.place.shape for name, share in shares.items()},
        aliases or {},
        frozen,
    )


class Arena:
    """Memory for copies of a run's tensors, kept from one save to the next: fresh pages cost as much as the copy itself."""

    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._used = 0
        self._left: list[tuple[_Bytes, _Bytes]] = []
        """Where bytes are still to be copied to, and from."""

    def keep(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot with copies of all tensors; it is valid until the next call."""
        padded = sum(-(-tensor.numel() * tensor.element_size() // self._ALIGNMENT) * self._ALIGNMENT for tensor in _tensors(snapshot))
        if self._memory is None or self._memory.numel() < padded:
            self._memory = None  # given back before more is taken
            self._memory = torch.empty(padded, dtype=torch.uint8, device="cpu")
        self._used = 0
        with torch.no_grad():
            models = tuple(
                replace(model, tensors=self._copies(model.tensors), extra=None if model.extra is None else self._part(model.extra))
                for model in snapshot.models
            )
            kept = Snapshot(
                facts=snapshot.facts,
                own=self._part(snapshot.own),
                models=models,
                optimizers=tuple(self._part(part) for part in snapshot.optimizers),
                training=None if snapshot.training is None else self._part(snapshot.training),
                objects=tuple(self._part(part) for part in snapshot.objects),
                pieces=tuple(replace(part, tensors=self._copies(part.tensors)) for part in snapshot.pieces),
            )
        left, self._left = self._left, []
        _copy_bytes(left)
        return kept

    def _part(self, part: Part) -> Part:
        return replace(part, tensors=self._copies(part.tensors))

    def _copies(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._copy(tensor.detach()) for name, tensor in tensors.items()}

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._memory is not None
        size = tensor.numel() * tensor.element_size()
        room = self._memory[self._used : self._used + size]
        self._used += -(-size // self._ALIGNMENT) * self._ALIGNMENT
        place = room.view(tensor.dtype).view(tensor.shape)
        if not size or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return place.copy_(tensor)
        into, data = room.numpy(), tensor.view(-1).view(torch.uint8).numpy()
        self._left += [(into[start : start + _PIECE], data[start : start + _PIECE]) for start in range(0, size, _PIECE)]
        return place


def _copy_bytes(left: list[tuple[_Bytes, _Bytes]]) -> None:
    """Copies everything, by several threads if it is much.

    They share no barrier as those of torch do after every tensor, so that one that has to wait for a core does not make the others wait.
    """
    tasks = iter(left)

    def copy() -> None:
        for into, data in tasks:
            numpy.copyto(into, data)

    if sum(data.nbytes for _, data in left) <= _LITTLE:
        copy()
        return
    with ThreadPoolExecutor(min(_COPIERS, cores()), thread_name_prefix="slipstream: copying for a save") as copiers:
        for copier in [copiers.submit(copy) for _ in range(_COPIERS)]:
            copier.result()


def _tensors(snapshot: Snapshot) -> Iterator[torch.Tensor]:
    for part in snapshot.parts():
        yield from part.tensors.values()
