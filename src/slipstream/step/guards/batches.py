"""Processes that train on the same batches: a loader that was not prepared, and shuffles with the same seed everywhere, does that.

A prepared loader gives each process its share. Where a model trains without one, the inputs of its first calls are hashed (a sample of
their values), and the main process compares the hashes of all ranks (`rank_reports.py`). That is over after a few calls; then nothing of it
is left in the model. Calls without gradients, in evaluation mode or with the same input every time (a warm-up) say nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from slipstream.step.guards.drift import replicated
from slipstream.step.guards.finding import Finding

__all__ = ["FirstBatches", "hash_inputs", "shared_batches"]

_CALLS = 3
_SAMPLE = 16384
"""Values of a tensor that are hashed at most, evenly over all of them."""
_LEAST = 32
"""Values that the calls need together: fewer may be the same by chance."""


class FirstBatches:
    """Hashes what the first calls of prepared models are given, and hands the hashes on when there are enough."""

    def __init__(self, reads_loader: Callable[[], bool], report: Callable[[bytes], None]) -> None:
        self._reads_loader = reads_loader
        """Whether a prepared loader is being read: then there is nothing to find."""
        self._report = report
        self._handles: list[Any] = []
        self._hashes: list[bytes] = []
        self._values = 0
        self._is_over = False

    def watch(self, model: torch.nn.Module) -> None:
        """Looks at the calls of a model too."""
        if not self._is_over:
            self._handles.append(model.register_forward_pre_hook(_Hook(self), with_kwargs=True))

    def look(self, module: torch.nn.Module, inputs: Any) -> None:
        """Takes the inputs of a call in."""
        if self._is_over or not module.training or not torch.is_grad_enabled():
            return
        if self._reads_loader():
            self._end()
            return
        hashed, values = hash_inputs(inputs)
        self._hashes.append(hashed)
        self._values += values
        if len(self._hashes) == _CALLS:
            self._end()
            if len(set(self._hashes)) == _CALLS and self._values >= _LEAST:
                self._report(b"".join(self._hashes))

    def _end(self) -> None:
        self._is_over = True
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Hook:
    """What a model holds: in a copy or a pickle of it, something that does nothing."""

    def __init__(self, batches: FirstBatches) -> None:
        self._batches = batches

    def __call__(self, module: torch.nn.Module, inputs: Any, keywords: Any) -> None:
        if not torch.compiler.is_compiling():
            self._batches.look(module, (inputs, keywords))

    def __reduce__(self) -> Any:
        return _idle_hook, ()


def _idle_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(module: torch.nn.Module, inputs: Any, keywords: Any) -> None:
    return None


def hash_inputs(inputs: Any) -> tuple[bytes, int]:
    """Return a hash of the tensors in some inputs, and how many values they have; waits for their device.

    >>> hash_inputs(torch.ones(2, 3)) == hash_inputs([torch.ones(2, 3)]), hash_inputs(torch.ones(6)) == hash_inputs(torch.ones(2, 3))
    (True, False)
    """
    found, values = hashlib.blake2b(digest_size=16), 0
    for _, tensor in replicated(("", tensor) for tensor in _tensors(inputs)):
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].contiguous().cpu()
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(sample.view(torch.uint8).numpy().tobytes())
        values += tensor.numel()
    return found.digest(), values


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def shared_batches(reports: list[bytes]) -> Finding | None:
    """Return what is to be said if ranks were given the same batches, by the reports of all ranks.

    >>> print(shared_batches([b"abc", b"xyz", b"abc"]).text)
    ranks 0 and 2 train on the same batches, so they do the same work: the first 3 batches are equal
    >>> shared_batches([b"abc", b"xyz"])
    """
    groups: dict[bytes, list[int]] = {}
    for rank, report in enumerate(reports):
        groups.setdefault(report, []).append(rank)
    ranks = max(groups.values(), key=len)
    if len(ranks) < 2:
        return None
    who = f"all {len(ranks)} processes" if len(groups) == 1 else f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    text = f"{who} train on the same batches, so they do the same work: the first {_CALLS} batches are equal"
    remedy = (
        "prepare the loader (loader = accelerator.prepare(loader)), which gives each process its share; a loop without a loader "
        "takes other samples on each process, by accelerator.process_index"
    )
    return Finding("batches", None, None, text, remedy, {"ranks": ranks})
