"""Weights that are away and come for the time of a forward: stand-ins in the module, and the exchange of the two.

A module whose weights are elsewhere (in other memory, on disk) holds *parked* tensors in their places: meta tensors of the same shape,
type, class and `requires_grad`. An `Exchange` knows those places once and for all. `enter` takes the weights from a `Bundle` and puts
them in place, `leave` parks again and gives the bundle back. Entries are counted, under a lock: nested calls and calls from several
threads take once, and the last one out gives back.

Between `enter` and `leave` nothing is looked up by name, and no Parameter is made anew for a tensor that was seen before: the Parameter
stays with the tensor it was made of, so it lives as long as the bundle keeps that tensor. What is never done: writing changes back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from slipstream.errors import ConfigError, StateError
from slipstream.logging import get_logger
from slipstream.offload.hooking.parts import MADE, PLAIN, Place, dressed_like, parked_like, places_of, same_memory
from slipstream.offload.hooking.standins import KEEPER, stand_in

__all__ = ["Bundle", "Exchange", "MappedBundle", "exchanges_of"]

_TiedTensors = MutableMapping[int, dict[torch.device, torch.Tensor]]


class Bundle(Protocol):
    """The tensors of one module, from wherever they are.

    One that has a method `arrive` is told before each use, also of threads that find the tensors in place; it may let them wait there.
    One that has a method `restore` is told when somebody has written into the tensors, which shall have their values again next time.
    One that has a method `recall` is told when a backward comes to what the module computed, and will use the tensors again.
    """

    def take(self) -> Sequence[torch.Tensor]:
        """The tensors, on the execution device, in the order of the names; valid until `give_back`."""

    def give_back(self) -> None:
        """They are not needed any more. What a graph of autograd still holds stays valid."""


class MappedBundle:
    """Tensors looked up by name in any mapping, and moved to the device if they are elsewhere.

    >>> bundle = MappedBundle({"weight": torch.ones(2)}, ["weight"], torch.device("cpu"))
    >>> bundle.take()
    [tensor([1., 1.])]
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], names: Sequence[str], device: torch.device, tied: _TiedTensors | None = None
    ) -> None:
        self._weights = weights
        self._names = list(names)
        self._device = device
        self._tied = tied if tied is not None else {}
        self._shared: list[int] = []
        self.keeps_changes = True
        """Whether what is written into the tensors stays: they are those of the mapping itself. Until told otherwise by a move."""

    def take(self) -> list[torch.Tensor]:
        """The tensors of the mapping themselves where they are on the device already."""
        weights, device = self._weights, self._device
        found = [weights[name] for name in self._names]
        return [tensor if tensor.device == device else self._moved(tensor) for tensor in found]

    def give_back(self) -> None:
        """Copies on the device are let go; those that other modules share too."""
        while self._shared:
            self._tied[self._shared.pop()].pop(self._device, None)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        self.keeps_changes = False
        copies = self._tied.get(tensor.data_ptr()) if self._tied and not tensor.is_meta else None
        if copies is not None and self._device in copies:
            return copies[self._device]
        with torch.inference_mode(False), torch.no_grad():
            moved = tensor.detach().to(self._device)
        if copies is not None:
            copies[self._device] = moved
            self._shared.append(tensor.data_ptr())
        return moved


_Made = tuple[torch.Tensor, int, torch.dtype, bool]
"""What stands for a tensor, its address (0: not watched), and for which dtype and requires_grad of the stand-in it was made."""


class _Keeper:
    """On a stand-in: whose it is. Copies of a model find their own when they run."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange | None = None) -> None:
        self._exchange = None if exchange is None else weakref.ref(exchange)

    def __reduce__(self) -> tuple[type[_Keeper], tuple[()]]:
        return (_Keeper, ())

    def __call__(self) -> Exchange | None:
        return None if self._exchange is None else self._exchange()


def exchanges_of(module: torch.nn.Module) -> list[Exchange]:
    """Those that bring the tensors of a module itself, whichever module their hooks are on; each once."""
    keepers = [getattr(place.tensor, KEEPER, None) for place in places_of(module, recurse=False)]
    found = [keeper() for keeper in keepers if isinstance(keeper, _Keeper)]
    return list({id(one): one for one in found if one is not None}.values())


class _Slot:
    """A tensor that is away: its first place with its stand-in, and its other places."""

    __slots__ = ("also", "first", "name")

    def __init__(self, places: Sequence[Place]) -> None:
        self.name = places[0].name
        self.first = (places[0].store, places[0].key, parked_like(places[0].tensor))
        self.also = tuple((place.store, place.key) for place in places[1:])
        self.put(self.first[2])

    def put(self, tensor: torch.Tensor) -> None:
        """Into every place."""
        self.first[0][self.first[1]] = tensor
        for store, key in self.also:
            store[key] = tensor

    def look_again(self) -> torch.Tensor:
        """Something else stands in the place. Another stand-in is taken for this one; values of somebody else are left alone."""
        store, key, parked = self.first
        now = store.get(key)
        if now is not None and now.is_meta:
            self.first = (store, key, now)
        return self.first[2]


class _Told:
    """What was said already: a warning is given once for all blocks that have their weights from one store."""

    def __init__(self, prefix: str, bundle: Any) -> None:
        self.prefix = prefix
        said: set[str] | None = getattr(getattr(bundle, "store", None), "said", None)
        self._said = set() if said is None else said

    def once(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            get_logger(__name__).warning(message)

    def got_gradient(self, name: str, parameter: torch.Tensor) -> None:
        parameter.grad = None
        self.once(
            "gradient",
            f"A gradient reached the offloaded weight {self.prefix}{name} and was dropped: offloaded weights are not trained. Freeze "
            "them (requires_grad_(False)) and train adapters beside them, or keep this module in memory (another device_map).",
        )


class Exchange:
    """The weights of one module, that come and go.

    `groups`: the places of each tensor (several where it is tied); the bundle gives one tensor for each group, in this order.

    >>> linear = torch.nn.Linear(2, 2, bias=False)
    >>> weights = {"weight": linear.weight.detach()}
    >>> exchange = Exchange([list(places_of(linear, recurse=False))], MappedBundle(weights, ["weight"], torch.device("cpu")))
    >>> linear.weight.is_meta, exchange.enter(), linear.weight.is_meta, exchange.leave(), linear.weight.is_meta
    (True, None, False, None, True)
    """

    def __init__(self, groups: Iterable[Sequence[Place]], bundle: Bundle, prefix: str = "") -> None:
        self._slots = [_Slot(places) for places in groups]
        for slot in self._slots:
            setattr(stand_in(slot.first[2], f"{prefix}{slot.name}"), KEEPER, _Keeper(self))
        self._bundle = bundle
        self._recall = getattr(bundle, "recall", None)
        self._arrive = getattr(bundle, "arrive", None)
        self._lock = threading.RLock()
        self._count = 0
        self._held = False
        self._seen = False
        self._now: list[_Made] = []
        self._versions: list[int] = []
        self._tensors: Sequence[torch.Tensor] = ()
        self._told = _Told(prefix, bundle)

    @property
    def in_use(self) -> bool:
        """Whether the weights are in their places."""
        return self._held

    def enter(self, counted: bool = True) -> None:
        """Put the weights in place, unless they are. What is not counted holds them until the next `leave`, if nothing else is running."""
        if self._arrive is not None:  # outside of the lock: it may wait for other threads that come to this module too
            self._arrive()
        with self._lock:
            if not self._held:
                self._take()
                self._held = True
            if counted or self._count:
                self._count += 1

    def leave(self) -> None:
        """The counterpart of `enter`; more often than that does no harm."""
        with self._lock:
            if self._count:
                self._count -= 1
            if self._held and not self._count:
                self._held = False
                self._park()

    def watch(self, output: Any) -> None:
        """A backward will come through this output, and to the weights that made it."""
        if self._recall is None:
            return
        if isinstance(output, torch.Tensor):
            if output.requires_grad:
                output.register_hook(self._recalled)  # type: ignore[no-untyped-call]
        elif isinstance(output, (list, tuple)):
            for one in output:
                self.watch(one)
        elif isinstance(output, Mapping):
            for one in output.values():
                self.watch(one)

    def _recalled(self, _: torch.Tensor) -> None:
        if self._recall is not None:
            self._recall()

    @contextmanager
    def values_of(self, stand_in: torch.Tensor) -> Iterator[torch.Tensor]:
        """The values of one of its stand-ins, for an operation outside of the module."""
        slot = next(slot for slot in self._slots if slot.first[2] is stand_in)
        self._told.once(
            f"outside {self._told.prefix}{slot.name}",
            f"{self._told.prefix}{slot.name} was used outside of the block that it is offloaded with, and is brought for single "
            "operations, which is slow. Call that block as a whole; or, if a module uses the weights of its children itself, name its "
            "class in preload_module_classes when you dispatch the model.",
        )
        with self._lock:
            tensors = self._bundle.take()
            try:
                yield self._make(slot, tensors[self._slots.index(slot)])[0]
            finally:
                self._bundle.give_back()

    def close(self) -> None:
        """Park at once, whatever runs."""
        with self._lock:
            self._count = 0
            if self._held:
                self._held = False
                self._park()

    def uses_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is, or lies in, one of those in place now."""
        return any(same_memory(made[0], tensor) for made in self._now)

    def _take(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # stand-ins are looked at here, not computed with
            self._put_in_place(self._bundle.take())

    def _put_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        now: list[_Made] = []
        graph = torch.is_grad_enabled()  # without a graph it does not matter what is frozen
        try:
            if not self._seen:
                self._check(tensors)
            for slot, tensor in zip(self._slots, tensors, strict=True):
                store, key, parked = slot.first
                alone = False
                if (held := store.get(key)) is not parked:
                    parked = slot.look_again()
                    alone = held is None or not held.is_meta  # somebody's own values, such as those of torch.func.functional_call
                made: _Made | None = getattr(tensor, MADE, None)
                if made is None or made[2] is not parked.dtype or (graph and made[3] is not parked.requires_grad):
                    made = self._make(slot, tensor)
                now.append(made)
                if alone:
                    continue
                store[key] = made[0]
                if slot.also:
                    slot.put(made[0])
            self._versions = [made[0]._version if made[1] else 0 for made in now]
        except BaseException:
            for slot, made in zip(self._slots, now, strict=False):
                if slot.first[0].get(slot.first[1]) is made[0]:
                    slot.put(slot.first[2])
            self._bundle.give_back()
            raise
        self._now, self._tensors = now, tensors

    def _park(self) -> None:
        for slot, (value, address, _, _), version in zip(self._slots, self._now, self._versions, strict=True):
            if address and (value._version != version or value.data_ptr() != address):
                self._changed(slot, value, address)
            store, key, parked = slot.first
            if store.get(key) is not value:
                slot.look_again()
            elif slot.also:
                slot.put(parked)
            else:
                store[key] = parked
        self._now, self._tensors = [], ()
        self._bundle.give_back()

    def _make(self, slot: _Slot, tensor: torch.Tensor) -> _Made:
        """What stands in the slot for this tensor, and its address (0 where there is none to watch); kept with the tensor."""
        parked = slot.first[2]
        wanted, converted = parked.dtype, tensor
        if tensor.dtype is not wanted and tensor.is_floating_point() and wanted.is_floating_point:
            with torch.inference_mode(False), torch.no_grad():
                converted = tensor.detach().to(wanted)
        value = dressed_like(parked, converted)
        if value.requires_grad and value.is_leaf:
            value.register_post_accumulate_grad_hook(partial(self._told.got_gradient, slot.name))  # type: ignore[no-untyped-call]
        watched = type(value) in PLAIN and not value.is_inference() and not value.is_meta
        made = (value, value.data_ptr() if watched else 0, wanted, parked.requires_grad)
        if converted is tensor:
            setattr(tensor, MADE, made)
        return made

    def _changed(self, slot: _Slot, value: torch.Tensor, address: int) -> None:
        same = value.data_ptr() == address
        if same and getattr(self._bundle, "keeps_changes", False):
            return
        for tensor in self._tensors:
            made = getattr(tensor, MADE, None)
            if made is not None and made[0] is value:  # it may stand for other values now
                delattr(tensor, MADE)
        if same and (restore := getattr(self._bundle, "restore", None)) is not None:
            restore()
        if not same and value.dtype is not slot.first[2].dtype:  # converted for this forward, by a hook that casts: nothing is lost
            return
        self._told.once(
            "changed",
            f"{self._told.prefix}{slot.name} was written to while its module ran, and the change is lost: offloaded weights are read anew "
            "for every forward. Keep this module in memory (another device_map), or assign the new values to the hook's weights_map.",
        )

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != len(self._slots):
            raise StateError(f"A bundle of {len(self._slots)} weights gave {len(tensors)} tensors.")
        for slot, tensor in zip(self._slots, tensors, strict=True):
            if tensor.shape != slot.first[2].shape:
                raise ConfigError(
                    f"The weights that are offloaded have {self._told.prefix}{slot.name} with shape {list(tensor.shape)}, but the module "
                    f"wants {list(slot.first[2].shape)}. Give the weights of this model (state_dict, weights_map or offload_index)."
                )
        self._seen = True
