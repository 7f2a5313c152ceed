"""Fingerprints of data and order: for the run receipt, and to check that all ranks are about to read the same pass.

`fingerprint` is equal on two ranks exactly if they hold the same data; foreign objects count by their contents, and nothing is pickled.
`describe_loader` puts the order of a loader into a short digest that is independent of the number of processes; two datasets of one type
and length count as equal. Before the first batch of a pass, ranks compare epoch, position, length, order and selection in one guarded
call, and every rank raises if these differ. Samples that differ, and passes that begin at different lines, are warnings of the main
process. Nothing is compared for one process or for a data rank given by hand, and no sample of a custom dataset is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from slipstream.data.order import COMPUTED_SAMPLERS, torch_sampler_kind
from slipstream.data.plan import SampleOrder
from slipstream.data.sampler_state import SamplerState
from slipstream.distributed import codec, pytree
from slipstream.distributed.call_site import call_path
from slipstream.distributed.current import current_or_none
from slipstream.distributed.scatter import agree_or_raise
from slipstream.errors import MismatchError
from slipstream.logging import get_logger

if TYPE_CHECKING:
    from slipstream.data.loader import PreparedLoader

__all__ = ["OpenedOrder", "describe_loader", "digest_selection_and_samples", "fingerprint", "open_agreed_order"]


_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_MAX_DEPTH = 12


def fingerprint(items: Iterable[Any]) -> bytes:
    """Return sixteen bytes for these items, in this order.

    >>> fingerprint([{"a": 1}, "x"]) == fingerprint([{"a": 1}, "x"]), fingerprint([1, 2]) == fingerprint([2, 1])
    (True, False)
    """
    digest = blake2b(digest_size=16)
    for item in items:
        data = codec.encode(_encodable(item, 0), plain_only=True)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _encodable(value: Any, depth: int) -> Any:
    """Return data that the codec takes, different for different values as far as that can be told."""
    if depth > _MAX_DEPTH:
        return _text_without_addresses(value)
    if type(value) in (str, int, float, bool, bytes, complex, type(None)):
        return value
    if isinstance(value, torch.Tensor):
        return _encodable_tensor(value)
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return value if value.dtype.kind in "biufcSUmM" and type(value).__module__ == "numpy" else _encodable(value.tolist(), depth + 1)
    if isinstance(value, Mapping):
        return [(_encodable(key, depth + 1), _encodable(item, depth + 1)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(codec.encode(_encodable(item, depth + 1), plain_only=True) for item in value)
    if isinstance(value, (list, tuple)) or pytree.is_node(value):
        return [_encodable(item, depth + 1) for _, item in pytree.children(value)]
    return _encodable_object(value, depth)


def _encodable_tensor(value: torch.Tensor) -> Any:
    value = value.detach()
    if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        return _text_without_addresses(value)
    return value.as_subclass(torch.Tensor)


def _encodable_object(value: Any, depth: int) -> Any:
    kind = type(value).__qualname__
    if hasattr(value, "__array_interface__"):  # images
        return kind, numpy.asarray(value)
    held = getattr(value, "__dict__", None)
    if held:
        return kind, _encodable(dict(held), depth + 1)
    return kind, _text_without_addresses(value)


def _text_without_addresses(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))


def describe_loader(loader: PreparedLoader) -> dict[str, Any]:
    """Return what is read and in which order, for the receipt of a run: plain data, and no sample is read for it.

    Two loaders with the same `order` read the same samples in the same order, on any number of processes. After a position was loaded,
    the seed is that of the saved run.

    >>> from torch.utils.data import DataLoader
    >>> from slipstream.data.prepare import prepare_data_loader
    >>> description = describe_loader(prepare_data_loader(DataLoader(range(10), batch_size=2, shuffle=True), data_seed=7))
    >>> description["length"], description["sampler"], description["batch"], description["seed"]
    (10, 'RandomSampler', 2, 7)
    """
    original: Any = loader.original
    dataset = original.dataset
    stream = isinstance(dataset, IterableDataset)
    batch_sampler = original.batch_sampler
    while getattr(batch_sampler, "is_share_of_batches", False):  # of the drop-in: what is described is the same on any number of processes
        batch_sampler = batch_sampler.batch_sampler
    own_batches = batch_sampler is not None and torch_sampler_kind(batch_sampler) != "BatchSampler"
    sampler = None if stream else batch_sampler if own_batches else getattr(batch_sampler, "sampler", original.sampler)
    drop_last = bool(getattr(batch_sampler, "drop_last", original.drop_last))
    found = {
        "dataset": type(dataset).__name__,
        "length": _length_of(dataset),
        "sampler": None if sampler is None else type(sampler).__name__,
        "batch": loader.total_batch_size,
        "drop_last": drop_last,
        "even": loader.config.even_batches,
        "seed": loader.seed,
    }
    shuffled: Any = loader.seed
    if stream:
        # several workers, and processes with parts of their own, read in an order of theirs
        rules: list[Any] = ["stream", max(1, original.num_workers), loader.data_parts]
    else:
        rules = _describe_sampler(sampler, dataset)
        kind, version = torch_sampler_kind(sampler), loader._epochs.order_version
        if kind == "SequentialSampler" or _is_sequence(sampler):
            shuffled = None
        elif version > 1 and kind in COMPUTED_SAMPLERS:
            shuffled = loader.seed, version
    dropped = loader._stride * (loader.steps_per_update or 1) if drop_last else 0
    text = repr((found["dataset"], found["length"], rules, _describe_selection(dataset), shuffled, dropped, found["even"], loader._kind))
    return {**found, "order": blake2b(text.encode(), digest_size=8).hexdigest()}


def _length_of(dataset: Any) -> int | None:
    """Return how many samples there are, where the dataset says so."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _is_sequence(sampler: Any) -> bool:
    return isinstance(sampler, (list, tuple, range, torch.Tensor, numpy.ndarray))


def _describe_sampler(sampler: Any, dataset: Any) -> list[Any]:
    """Return what decides the order of a sampler, besides the seed."""
    kind = torch_sampler_kind(sampler)
    if kind == "SequentialSampler":
        return [kind, len(sampler)]
    if kind == "RandomSampler":
        return [kind, bool(sampler.replacement), int(sampler.num_samples), len(sampler.data_source)]
    if kind == "SubsetRandomSampler":
        return [kind, _digest_values(sampler.indices).hex()]
    if kind == "WeightedRandomSampler":
        return [kind, bool(sampler.replacement), int(sampler.num_samples), _digest_values(sampler.weights).hex()]
    if _is_sequence(sampler):
        return ["listed", _digest_values(sampler).hex()]
    state = SamplerState(sampler, dataset)
    return [[type(own).__qualname__, fingerprint([state.plain_attributes(own)]).hex()] for own in state.samplers] or [
        type(sampler).__qualname__
    ]


def _describe_selection(dataset: Any) -> list[Any]:
    """Return which samples were selected of the data (`Subset`)."""
    if isinstance(dataset, Subset):
        return [_digest_values(dataset.indices).hex(), *_describe_selection(dataset.dataset)]
    if isinstance(dataset, ConcatDataset):
        return [(_length_of(part), _describe_selection(part)) for part in dataset.datasets[:100]]
    return []


def _digest_values(values: Any) -> bytes:
    if isinstance(values, range) and len(values) > _MAX_COMPARED:
        return fingerprint([values.start, values.stop, values.step])
    if isinstance(values, (list, tuple, range)) and (isinstance(values, range) or all(type(value) is int for value in values)):
        values = numpy.asarray(values, numpy.int64)
    return fingerprint([values])


_PLAIN_TYPES = (str, int, float, bool, bytes, complex, type(None))
_MAX_COMPARED = 10_000
"""Of a selection of more samples than this, evenly spread ones are compared, so that a pass begins as quickly with any number of them."""
_MAX_PARTS = 100
"""Of a dataset that is made of more parts than this, the first ones are looked at."""


OpenedOrder = tuple["SampleOrder | Iterator[Any]", "Sequence[Any] | None"]
"""An order, and its first positions if it stands further on already."""


def open_agreed_order(loader: PreparedLoader, epoch: int, start: int, make: Callable[[], OpenedOrder]) -> OpenedOrder:
    """Return the order of a pass that begins (and its head, if it stands further on), once all ranks agree that theirs is the same."""
    data_rank = loader.data_rank
    if not data_rank.compares or data_rank.world_size == 1:
        return make()
    order: Any = None
    head: Any = None
    found: Any
    first_time = loader.compared is None
    try:
        order, head = make()
        length, positions, order = _digest_beginning(order, start, max(1, loader._stride))
        if loader.compared is None:
            loader.compared = digest_selection_and_samples(loader.original.dataset)
        found = (epoch, start, length, positions, *loader.compared, call_path().partition(", ")[0] or "unknown place")
    except Exception as error:  # whatever a sampler raises: every rank raises
        found = error
    name = type(loader.original.dataset).__name__
    over = f"over a loader of {name}"
    answers = agree_or_raise(data_rank.channel(), data_rank.limits, found, operation="begin of a pass", condition=over)
    for column, complaint in enumerate(_MISMATCH_MESSAGES):
        values = [answer[column] for answer in answers]
        if len(set(values)) > 1:
            spelled = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values) if not isinstance(value, bytes))
            raise MismatchError(complaint.format(name=name, values=spelled, rank=data_rank.rank))
    lines = [answer[-1] for answer in answers]
    if first_time and len({answer[-2] for answer in answers}) > 1:
        _warn_once("samples", _DIFFERENT_SAMPLES_MESSAGE.format(name=name), lines[0])
    if len(set(lines)) > 1:
        spelled = ", ".join(f"rank {rank} at {line}" for rank, line in enumerate(lines))
        _warn_once("lines", _DIFFERENT_LINES_MESSAGE.format(name=name, lines=spelled), lines[0])
    return order, head


def _warn_once(kind: str, text: str, line: str) -> None:
    """Warn once on the main process, with the level and the user's line in front, as Python's own warnings have them."""
    runtime = current_or_none()
    if runtime is None or kind not in runtime.warned:
        get_logger(__name__).warning(f"WARNING: {line}: {text}")
    if runtime is not None:
        runtime.warned.add(kind)


def _digest_beginning(order: SampleOrder | Iterator[Any], start: int, block: int) -> tuple[int, bytes, SampleOrder | Iterator[Any]]:
    """Return how long an order is (-1 for not known), a digest of its first global batch, and the order."""
    if isinstance(order, Iterator):
        first = list(islice(order, block))
        return -1, _digest_values(first), chain(first, order)
    return len(order), _digest_values(order.take(start, start + block)), order


def digest_selection_and_samples(dataset: Any) -> tuple[bytes, bytes]:
    """Return digests of which samples were selected of the data (`Subset`), and of the first and last that are cheap to read.

    >>> whole, part = digest_selection_and_samples(range(8)), digest_selection_and_samples(Subset(range(8), range(0, 8, 2)))
    >>> whole[0] == part[0], whole[0] == digest_selection_and_samples(list(range(8)))[0]
    (False, True)
    """
    selected: list[Any] = []
    samples: list[Any] = []
    _collect_samples(dataset, selected, samples)
    return fingerprint(selected), fingerprint(samples)


def _collect_samples(dataset: Any, selected: list[Any], samples: list[Any]) -> None:
    if isinstance(dataset, Subset):
        selected.append(_digest_values(_spread_values(dataset.indices)))
        selected.append(len(dataset.indices))
        _collect_samples(dataset.dataset, selected, samples)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets[:_MAX_PARTS]:
            _collect_samples(part, selected, samples)
    elif type(dataset) is TensorDataset:
        samples.extend(tensor[place] for tensor in dataset.tensors for place in (0, -1) if len(tensor))
    elif type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "with_format") and len(dataset):
        stored = dataset.with_format(None)  # what is stored, without transforms
        samples.extend(_plain_sample(stored[place]) for place in (0, len(dataset) - 1))
    elif type(dataset) in (list, tuple, range, numpy.ndarray, torch.Tensor) and len(dataset):
        samples.extend(_plain_sample(dataset[place]) for place in (0, -1))


def _spread_values(values: Any) -> Any:
    """Return at most `_MAX_COMPARED` values, evenly spread; all of a sequence that may not know slices with a step."""
    return values[:: max(1, len(values) // _MAX_COMPARED)] if _is_sequence(values) else values


def _plain_sample(value: Any) -> Any:
    """Return data that is the same in two processes if it was made alike; of anything else, its type."""
    if type(value) in (torch.Tensor, numpy.ndarray) or isinstance(value, (*_PLAIN_TYPES, numpy.generic)):
        return value
    if type(value) is dict:
        return {str(key): _plain_sample(item) for key, item in value.items()}
    return [_plain_sample(item) for item in value] if type(value) in (list, tuple) else type(value).__qualname__


_MISMATCH_MESSAGES = (
    "the processes begin different epochs of a loader of {name} ({values}), so some samples would be read twice and others never. A "
    "prepared loader is read by all processes together: one of them has read it alone (as in `if accelerator.is_main_process: "
    "next(iter(loader))`; look at a batch on all of them, or of the loader that was not prepared), or set_epoch was called "
    "with different numbers. (raised on rank {rank})",
    "the processes begin a loader of {name} at different positions ({values}): skip as many batches on each, or load the same saved "
    "position. (raised on rank {rank})",
    "the processes have different numbers of samples in a loader of {name} ({values}): the data was shared out already, or each selected "
    "its own. prepare shares it out itself: give every process the whole dataset, and the same sampler. (raised on rank {rank})",
    "the samplers of a loader of {name} draw different positions on the processes, so some samples would be read twice and others never. "
    "prepare shares the data out itself, and needs the same order everywhere: a sampler that takes a part for its process has to give all "
    "positions, and one with random numbers of its own has to draw from a `generator` attribute, from Python's, numpy's or torch's global "
    "state, or from a seed that is the same on every process. (raised on rank {rank})",
    "the processes selected different samples of the data for a loader of {name} (a Subset with other indices on each), so prepare, which "
    "shares the data out itself, would give each a part of its part. Leave out a selection like indices[rank::world_size]; call set_seed, "
    "or give a seeded generator, before random_split. (raised on rank {rank})",
)
"""What differs, in the order in which it is reported."""

_DIFFERENT_LINES_MESSAGE = (
    "processes begin a pass over a loader of {name} at different lines ({lines}). If one of them reads a batch alone, as under "
    "`if accelerator.is_main_process:`, it is ahead of the others from then on: read the loader on all of them."
)

_DIFFERENT_SAMPLES_MESSAGE = (
    "processes hold different samples in {name}. Give every process the whole data (prepare shares it out), and call set_seed before you "
    "draw data at random."
)
