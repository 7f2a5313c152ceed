"""Random states of the data pipeline: isolated from the script, derived from (seed, epoch, batch), and saved as plain data.

`RandomStateScope` swaps the global states of Python, numpy and torch for its own while data is read, so that every rank that reads the
same stream sees the same items and the script's states stay as they were. Entering a scope costs about 50 us; a reader asks `used` after
the first block and leaves the scope out for data that draws nothing. Workers are reseeded for every batch (`SeededDataset`), so what they
draw does not depend on the number of workers or on where the pass began; a generator that the dataset keeps itself is out of reach.
States are stored without pickle and set in place. Device generators are not touched.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import numpy
import torch
from numpy.random import mtrand
from torch.utils.data import Dataset, get_worker_info

from slipstream.errors import ConfigError

__all__ = [
    "RandomStateScope", "RandomStates", "SeededDataset", "WorkerInit", "check_generator_state", "decode_random_states", "default_device",
    "derive_seed", "digest_random_states", "encode_random_states", "generator_state", "is_generator", "reseed", "seed_loader",
    "set_generator_state",
]


RandomStates = tuple[Any, "tuple[int, bytes]", bytes]
"""The states of Python, numpy and torch between two blocks."""


class RandomStateScope:
    """While it is entered, the random states of the process are those of this object.

    Without a seed the first block begins with the states that it finds (those of a loader's worker, which torch has seeded).

    >>> own, before = RandomStateScope(7), random.getstate()
    >>> with own:
    ...     first = random.random()
    >>> random.getstate() == before, own.used
    (True, True)
    """

    def __init__(self, seed: int | None = None) -> None:
        self.used = False
        """Whether any random number was drawn inside so far."""
        self._python: Any = None
        self._numpy: Any = None
        self._torch: Any = None
        if seed is not None:
            self._python = random.Random(seed).getstate()
            self._numpy = numpy.random.MT19937(seed)
            self._torch = torch.Generator().manual_seed(seed).get_state()
        self._theirs: tuple[Any, Any, Any, Any] = (None, None, None, None)

    def capture(self) -> RandomStates:
        """Return a copy of the states as they are between two blocks."""
        return self._python, _numpy_state(self._numpy), self._torch.numpy().tobytes()

    def resume(self, captured: RandomStates) -> None:
        """Let the next block draw from these states."""
        self._python, (position, key), state = captured
        self._torch = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        self._numpy = numpy.random.MT19937()
        self._numpy.state = {"bit_generator": "MT19937", "state": {"key": numpy.frombuffer(key, numpy.uint32), "pos": position}}
        self.used = True

    def __enter__(self) -> None:
        generator = mtrand.get_bit_generator()
        # Exchanging numpy's generator as a whole is quick, but forgets a number that randn keeps for its next call.
        held = numpy.random.get_state(legacy=False)
        self._theirs = random.getstate(), generator, held if held["has_gauss"] else None, torch.get_rng_state()
        if self._python is None:
            self._python, self._numpy, self._torch = self._theirs[0], copy.deepcopy(generator), self._theirs[3]
        random.setstate(self._python)
        mtrand.set_bit_generator(self._numpy)
        torch.set_rng_state(self._torch)
        self._drawn = None if self.used else _numpy_state(self._numpy)

    def __exit__(self, *details: object) -> None:
        python, generator, held, tensor = self._theirs
        now, state = random.getstate(), torch.get_rng_state()
        if not self.used:
            self.used = now != self._python or not torch.equal(state, self._torch) or _numpy_state(self._numpy) != self._drawn
        self._python, self._torch = now, state
        random.setstate(python)
        mtrand.set_bit_generator(generator)
        if held is not None:
            numpy.random.set_state(held)
        torch.set_rng_state(tensor)


def _numpy_state(generator: Any) -> tuple[int, bytes]:
    """Return what is equal as long as nothing was drawn."""
    state = generator.state["state"]
    return int(state["pos"]), state["key"].tobytes()


def default_device() -> torch.device:
    """Return the device on which torch makes tensors."""
    try:
        return torch.get_default_device()
    except AttributeError:  # torch 2.8 looks for the device of `torch.set_default_device(None)`, which means the CPU
        return torch.device("cpu")


def seed_loader(loader: Any, seed: int) -> None:
    """Seed the generator of a `DataLoader` of ours. torch draws from it on the default device, so it has to be of that device."""
    device = default_device()
    if loader.generator.device.type != device.type:
        loader.generator = torch.Generator(device)
    loader.generator.manual_seed(seed)


def encode_random_states(captured: RandomStates) -> dict[str, Any]:
    """Return captured states as plain data.

    >>> own = RandomStateScope(7)
    >>> decode_random_states(encode_random_states(own.capture()))[1] == own.capture()[1]
    True
    """
    (version, words, gauss), (position, key), state = captured
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {"pos": position, "key": numpy.frombuffer(key, numpy.uint32).tolist()},
        "torch": torch.frombuffer(bytearray(state), dtype=torch.uint8),
    }


def decode_random_states(plain: Any) -> RandomStates:
    """Return what `encode_random_states` was given; raise a `ConfigError` for plain data that cannot be that."""
    try:
        python, theirs, state = plain["python"], plain["numpy"], plain["torch"]
        captured = (
            (python["version"], tuple(python["words"]), python["gauss"]),
            (int(theirs["pos"]), _numpy_key_bytes(theirs["key"])),
            state.numpy().tobytes(),
        )
        RandomStateScope(0).resume(captured)
        random.Random().setstate(captured[0])
        torch.Generator().set_state(state)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, IndexError, AttributeError) as error:
        raise ConfigError(f"the random state of a stream that was saved cannot be read ({error!r})") from None
    return captured


def _numpy_key_bytes(key: Any) -> bytes:
    words = numpy.asarray(key, numpy.uint32)
    if words.shape != (624,):
        raise ValueError(f"numpy's state has {words.shape} words")
    return words.tobytes()


def digest_random_states(captured: RandomStates) -> str:
    """Return a short text that is equal for equal states."""
    python, (position, key), state = captured
    return blake2b(repr((python, position)).encode() + key + state, digest_size=16).hexdigest()


def reseed(seed: int) -> None:
    """Seed the random states of this process, for what a worker draws for one batch: quick, and devices are not touched."""
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


_GENERATOR_TYPES: dict[str, tuple[type, ...]] = {
    "python": (random.Random,),
    "torch": (torch.Generator,),
    "numpy": (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator),
}


def is_generator(value: Any) -> bool:
    """Return whether this is a random generator whose state can be saved; `random.SystemRandom` has none.

    >>> is_generator(random.Random(1)), is_generator(random.SystemRandom()), is_generator(3)
    (True, False, False)
    """
    return _generator_kind(value) is not None


def _generator_kind(value: Any) -> str | None:
    if isinstance(value, random.SystemRandom):
        return None
    return next((kind for kind, types in _GENERATOR_TYPES.items() if isinstance(value, types)), None)


def generator_state(generator: Any) -> dict[str, Any]:
    """Return the state of a generator as plain data, with its kind.

    >>> generator = numpy.random.default_rng(3)
    >>> state = generator_state(generator)
    >>> first = generator.random()
    >>> set_generator_state(generator, state)
    >>> generator.random() == first
    True
    """
    kind = _generator_kind(generator)
    if kind == "python":
        version, words, gauss = generator.getstate()
        return {"kind": kind, "version": version, "words": list(words), "gauss": gauss}
    if kind == "torch":
        return {"kind": kind, "state": generator.get_state()}
    if isinstance(generator, numpy.random.RandomState):
        return {"kind": "numpy", "state": _to_python(generator.get_state(legacy=False))}
    bits = generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator
    return {"kind": "numpy", "state": _to_python(bits.state)}


def set_generator_state(generator: Any, state: Mapping[str, Any]) -> None:
    """Restore a state; raise a `ConfigError` for one of another kind, or that the generator does not take."""
    kind = _generator_kind(generator)
    if not isinstance(state, Mapping) or kind is None or state.get("kind") != kind:
        found = state.get("kind") if isinstance(state, Mapping) else type(state).__name__
        raise ConfigError(f"the state of a random generator is of kind {found!r}, and the {type(generator).__name__} here is of {kind!r}")
    try:
        if kind == "python":
            generator.setstate((state["version"], tuple(state["words"]), state["gauss"]))
        elif kind == "torch" or isinstance(generator, numpy.random.RandomState):
            generator.set_state(state["state"])
        else:
            bits = generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator
            bits.state = state["state"]
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, IndexError) as error:
        raise ConfigError(f"the state of a {type(generator).__name__} cannot be put back ({error}): it was saved of another one") from None


def check_generator_state(generator: Any, state: Any) -> None:
    """Raise unless the generator takes this state; it stays as it is."""
    set_generator_state(generator.clone_state() if isinstance(generator, torch.Generator) else copy.deepcopy(generator), state)


def _to_python(value: Any) -> Any:
    """Convert numpy's arrays and numbers to lists and numbers of Python."""
    if isinstance(value, dict):
        return {key: _to_python(inner) for key, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


class SeededDataset(Dataset[Any]):
    """The dataset of a worker: the script's own, which is given positions, the seed of the pass and the number of the batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, wanted: tuple[Any, int, int]) -> Any:
        positions, seed, number = wanted
        reseed(derive_seed(seed, number))
        read = getattr(self.dataset, "__getitems__", None)
        return read(positions) if read else [self.dataset[position] for position in positions]

    def __getitem__(self, wanted: tuple[Any, int, int]) -> Any:
        position, seed, number = wanted
        reseed(derive_seed(seed, number))
        return self.dataset[position]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or (name.startswith("__") and name.endswith("__")):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class WorkerInit:
    """The `worker_init_fn` of a worker: `get_worker_info()` shows the script's dataset instead of ours, then the script's own runs."""

    def __init__(self, init: Callable[[int], Any] | None, roles: tuple[int, ...] = ()) -> None:
        self.init = init
        self.roles = roles
        """Which workers these are, in a resumed pass: the one whose turn comes next is the first."""

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        ours: Any = info.dataset
        # torch internals: `WorkerInfo` is frozen (torch 2.13), and the script's code must see its own dataset there.
        # tests/data/test_stream_loader.py notices a change.
        object.__setattr__(info, "dataset", ours.dataset)
        if self.roles and self.roles[worker] != worker:
            role = self.roles[worker]
            object.__setattr__(info, "seed", info.seed - worker + role)
            object.__setattr__(info, "id", role)
            reseed(info.seed)
            worker = role
        if self.init is not None:
            self.init(worker)


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a seed made of a seed and what tells its uses apart: neighbouring seeds and epochs give unrelated ones.

    >>> derive_seed(42, 0) == derive_seed(42, 0), derive_seed(42, 1) == derive_seed(43, 0), 0 <= derive_seed(42, 0) < 2**63
    (True, False, True)
    """
    text = repr((int(seed), *parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1
